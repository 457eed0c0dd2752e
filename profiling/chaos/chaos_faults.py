"""The faults that profiling/chaos/chaos.py injects, and what must follow from each."""

import errno
import signal
from dataclasses import dataclass
from functools import partial

import chaos_disk_faults as disk
import chaos_moment_faults as moment
import chaos_process_faults as process
from chaos_process_faults import Inject
from chaos_run import INTERRUPTED

# Outcomes by the event that reports them; RODE_THROUGH has no event.
OUTCOMES = {"restored": "restored", "generator_back": "replaced", "scorer_back": "replaced"}
OUTCOMES |= {"environment_back": "replaced"}
OUTCOMES |= {"update_skipped": "skipped and counted", "group_failed": "retried", "set_aside": "set aside"}
RODE_THROUGH, RESUMED, COUNTED = "rode through", "resumed", "counted"
RESTORED = ("restored",)
REPLACED, WITH_OTHERS = ("replaced",), ("replaced, restored", "restored")  # if others were killed, too
NODE_LOST = ("replaced", "replaced, restored")  # if it had Generators or the Scorer alone


@dataclass(frozen=True)
class Fault:
    """One kind of fault; `inject` returns what it did when it is done, or None if it could not.

    One that ends the driver does not resume it: the campaign does.
    """

    name: str
    inject: Inject
    outcomes: tuple[str, ...]  # each of these must follow if the fault is alone, or one of `or_else`
    event: str | None = None  # reports that the run has handled it
    needs: str = ""  # `disk`, `memory`, or a word of the scenario
    or_else: tuple[str, ...] = ()
    is_plain: bool = False  # may come together with another plain one

    @property
    def ends_driver(self) -> bool:
        return RESUMED in self.outcomes

    def is_as_it_must_be(self, outcome: str) -> bool:
        return outcome == ", ".join(self.outcomes) or outcome in self.or_else


def _replaced(name: str, inject: Inject, needs: str = "", is_plain: bool = False) -> Fault:
    kinds = ("scorer", "environment", "generator")
    back = f"{next(kind for kind in kinds if kind in name or kind == 'generator')}_back"
    return Fault(name, inject, ("replaced",), back, needs, is_plain=is_plain)


def _restored(name: str, inject: Inject, needs: str = "", is_plain: bool = False) -> Fault:
    return Fault(name, inject, RESTORED, "restored", needs, is_plain=is_plain)


def _resumed(name: str, inject: Inject, needs: str = "") -> Fault:
    return Fault(name, inject, (RESUMED,), None, needs)


def _from_inside(
    name: str, outcomes: tuple[str, ...], event: str | None = None, needs: str = "",
    or_else: tuple[str, ...] = (), is_plain: bool = False,
) -> Fault:  # fmt: skip
    return Fault(name, partial(moment.trigger, name=name), outcomes, event, needs, or_else, is_plain)


def _ridden(name: str, inject: Inject, needs: str = "", or_else: tuple[str, ...] = ()) -> Fault:
    return Fault(name, inject, (RODE_THROUGH,), None, needs, or_else)


# A program that is still importing may end by the signal itself.
_INTERRUPT_EARLY = partial(process.interrupt, allowed=(INTERRUPTED, -signal.SIGTERM))
_ALL = (
    # Processes
    _replaced("kill_generator", partial(process.kill, prefix="generator"), is_plain=True),
    _replaced("kill_scorer", partial(process.kill, prefix="scorer"), is_plain=True),
    _restored("kill_buffer", partial(process.kill, prefix="buffer"), is_plain=True),
    _restored("kill_learner", partial(process.kill, prefix="learner"), is_plain=True),
    _restored("kill_weight_sync", partial(process.kill, prefix="weight_sync"), is_plain=True),
    _replaced("hang_generator", partial(process.hang, prefix="generator"), is_plain=True),
    _replaced("hang_scorer", partial(process.hang, prefix="scorer"), is_plain=True),
    _restored("hang_buffer", partial(process.hang, prefix="buffer")),
    _restored("hang_learner", partial(process.hang, prefix="learner")),
    _restored("hang_weight_sync", partial(process.hang, prefix="weight_sync")),
    Fault("delay", process.delay, (RODE_THROUGH,), is_plain=True),
    Fault("stop_generators", process.stop_generators, REPLACED, or_else=(RODE_THROUGH,)),
    _ridden("stop_driver", process.stop_driver),
    _resumed("kill_driver", process.kill_driver),
    _resumed("hang_up", process.hang_up),
    _resumed("interrupt", process.interrupt),
    _resumed("interrupt_twice", process.interrupt_twice),
    _ridden("second_driver", process.second_driver),
    _resumed("kill_raylet", partial(process.rays_own, name="raylet"), "local"),
    _resumed("kill_gcs", partial(process.rays_own, name="gcs_server"), "local"),
    _replaced("kill_engine", partial(process.kill_child, actor="generator-0"), "vllm"),
    _replaced("hang_engine", partial(process.hang_child, actor="generator-0"), "vllm"),
    _ridden("kill_grader", partial(process.kill_child, actor="scorer", is_leaf=True), "graders", (COUNTED,)),
    _ridden("hang_grader", partial(process.hang_child, actor="scorer", is_leaf=True), "graders", (COUNTED,)),
    _ridden("kill_fork_server", partial(process.kill_child, actor="scorer"), "graders", (COUNTED, "replaced")),
    _ridden("hang_fork_server", process.hang_fork_server, "graders", (COUNTED,)),
    # Memory and files
    _replaced("kernel_kill_generator", partial(process.kernel_kill, prefix="generator"), "memory"),
    _replaced("kernel_kill_scorer", partial(process.kernel_kill, prefix="scorer"), "memory"),
    _restored("kernel_kill_learner", partial(process.kernel_kill, prefix="learner"), "memory"),
    *(
        Fault(
            f"monitor_kill_{name}",
            partial(process.memory_monitor, newest=name),
            REPLACED,
            None,
            "memory",
            WITH_OTHERS,
        )
        for name in ("generator", "scorer")
    ),
    _restored("monitor_kill", partial(process.memory_monitor, newest=""), "memory"),
    _ridden("full_shm", process.full_shm, "memory", ("replaced", "replaced, restored", "restored")),
    _ridden("few_files", process.few_files, or_else=("retried", "replaced", COUNTED)),
    # The run's files
    Fault("fill_disk", disk.fill_disk, (RODE_THROUGH,), is_plain=True),
    _ridden("full_disk", disk.full_disk, "disk"),
    _ridden("read_only", disk.read_only, "disk"),
    _ridden("io_error", partial(disk.covered, error=errno.EIO), "disk"),
    _ridden("stale_handle", partial(disk.covered, error=errno.ESTALE), "disk"),
    _ridden("hung_folder", partial(disk.covered, error=None), "disk", ("restored",)),
    _ridden("frozen_disk", disk.frozen_disk, "disk", ("restored",)),
    _resumed("interrupt_on_frozen_disk", partial(disk.ended_on_frozen_disk, number=signal.SIGTERM), "disk"),
    _resumed("kill_on_frozen_disk", partial(disk.ended_on_frozen_disk, number=signal.SIGKILL), "disk"),
    _resumed("power_cut", disk.power_cut, "disk"),
    _resumed("damaged_checkpoint", partial(disk.with_driver_down, change=disk.damage)),
    _resumed("flipped_checkpoint", partial(disk.with_driver_down, change=disk.flip)),
    _resumed("torn_logs", partial(disk.with_driver_down, change=disk.half_lines)),
    _ridden("delete_logs", disk.delete_logs),
    _replaced("hang_generator_with_empty_pids", disk.empty_pids),
    _restored("delete_checkpoint", disk.delete_checkpoint),
    # Bad moments
    _restored("die_again", moment.die_again),
    _resumed("interrupt_restore", partial(moment.ended, moment=moment.restore, end=process.interrupt)),
    _resumed("kill_restore", partial(moment.ended, moment=moment.restore, end=process.kill_driver)),
    _resumed("interrupt_start", partial(moment.ended, moment=moment.start, end=_INTERRUPT_EARLY)),
    _resumed("kill_start", partial(moment.ended, moment=moment.start, end=process.kill_driver)),
    _resumed("interrupt_checkpoint", partial(moment.ended, moment=moment.checkpoint, end=process.interrupt)),
    _resumed("kill_checkpoint", partial(moment.ended, moment=moment.checkpoint, end=process.kill_driver)),
    _replaced("hang_generators_replacement", partial(moment.hang_replacement, actor="generator")),
    _replaced("hang_scorers_replacement", partial(moment.hang_replacement, actor="scorer")),
    _ridden("jump_clock", moment.jump_clock),
    # From inside
    _from_inside("poison_reward", (COUNTED,), is_plain=True),
    _from_inside("scorer_error", ("retried",), "group_failed"),
    _from_inside("nan_gradient", ("skipped and counted",), "update_skipped", is_plain=True),
    Fault("poison_prompt", moment.poison_prompt, ("replaced", "set aside"), "set_aside"),
    # Episodes and their environments
    _replaced("kill_environment", partial(process.kill, prefix="environment"), "episodes"),
    _replaced("hang_environment", partial(process.hang, prefix="environment"), "episodes"),
    _from_inside("exit_in_environment", REPLACED, "environment_back", "episodes"),
    _from_inside("fill_environment", (COUNTED,), None, "episodes", ("replaced", "replaced, counted")),
    *(
        _from_inside(name, (COUNTED,), None, "episodes")
        for name in ("raise_in_environment", "leave_environment", "block_environment")
    ),
    *(
        _from_inside(name, (COUNTED,), None, "episodes", (RODE_THROUGH,))
        for name in ("poison_text", "poison_number", "poison_metrics", "huge_tool_result")
    ),
    # Ranks of the Learner
    *(
        _restored(f"{kind}_rank_{stage}", partial(moment.at_stage, kind=kind, stage=stage), "ranks")
        for stage in moment.STAGES
        for kind in moment.CAUSES
    ),
    _restored("pause_rank", moment.pause_rank, "ranks"),
    _restored("stop_ranks", moment.stop_ranks, "ranks"),
    _resumed("interrupt_with_hung_rank", moment.interrupt_with_hung_rank, "ranks"),
    _ridden("fill_disk_of_rank", moment.fill_disk_of_rank, "ranks"),
    # Weight syncs
    *(
        _replaced(f"{kind}_sync_{phase}", partial(moment.in_phase, kind=kind, phase=phase))
        for phase in moment.PHASES
        for kind in moment.SAYS
    ),
    _replaced("flip_sync_bits", moment.flip_bits, "checksum"),
    _restored("kill_learner_sending", partial(moment.request, name="kill_learner_sending"), "wires"),
    _replaced("drop_wire_sending", partial(moment.request, name="drop_wire_sending"), "wires"),
    # Nodes
    Fault("lose_node", moment.lose_node, RESTORED, None, "cluster", NODE_LOST),
    _resumed("lose_head_in_checkpoint", moment.lose_head_in_checkpoint, "cluster"),
    Fault("lose_nodes_for_a_while", moment.lose_node_for_a_while, RESTORED, None, "cluster", NODE_LOST),
)
FAULTS = {fault.name: fault for fault in _ALL}
