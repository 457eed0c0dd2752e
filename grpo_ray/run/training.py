"""The entry points `train` and `resume`: a run from its checks, through restores, to its last checkpoint."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

import numpy as np
from safetensors import safe_open

from grpo_ray.cluster import local
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.schema import leaves
from grpo_ray.config.user_code import check_arguments, import_from, is_async, keyword_parameters
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import Controller
from grpo_ray.errors import RunError, all_of, shown_plainly
from grpo_ray.learning.model_files import is_local as is_local_model
from grpo_ray.records.checkpoint import GROUPS, REPLAY, Checkpoint, CheckpointStore
from grpo_ray.records.durable import sync_files
from grpo_ray.records.json_lines import JsonLines, readable_rows
from grpo_ray.records.resumable_folder import changed_values
from grpo_ray.records.rollout_log import read_uses
from grpo_ray.records.run_files import RunDirectory, check_dumped, dump_config, last_logged_step, run_name
from grpo_ray.records.visible_text import print_visible
from grpo_ray.run.machine import check_machine, on_this_machine, with_dtype_of
from grpo_ray.run.preparation import TaskData, at_commits, check_files, prepare, with_models, with_trial
from grpo_ray.run.restores import Host, no_whole_checkpoint, train_through_restores
from grpo_ray.run.signals import run_until_signal, signals_answered
from grpo_ray.run.supervised import LearnerHost, after_sft
from grpo_ray.tasks.input_digests import TINY, check_inputs, input_digests, write_digests
from grpo_ray.watch.actor_log import MAX_BYTES
from grpo_ray.watch.console import RunConsole, banner
from grpo_ray.watch.memory import imports_left_alone
from grpo_ray.watch.run_state import reported
from grpo_ray.watch.trackers import check_trackers, tracking


class Follower:
    """The Python program that a run belongs to: it sees each step, and may stop the run from any thread."""

    def __init__(self, on_step: Callable[[int, Mapping[str, float]], object] | None = None) -> None:
        """`on_step` is called with each step and its metrics; the run stops if it returns True."""
        if on_step is not None:
            if not callable(on_step):
                raise ValueError(f"on_step: a {type(on_step).__name__} is not a function")
            if is_async(on_step):
                raise ValueError("on_step: nothing would wait for an `async` function; write it without")
            further = keyword_parameters(on_step, "step, metrics", "on_step: the function") or {}
            check_arguments(further, {}, "on_step: the function", "it is called with step and metrics alone")
        self.on_step, self._is_stopped = on_step, False
        self._request: Callable[[], object] = lambda: None
        self.exit: BaseException | None = None  # by which the program asked to end

    def can_stop(self, request: Callable[[], object]) -> None:
        """Note how the run can be asked to stop."""
        self._request = request
        if self._is_stopped:
            request()

    def stop(self) -> None:
        """Stop the run, or have it stop as soon as it can."""
        self._is_stopped = True
        self._request()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step to the program."""
        try:
            result = self.on_step(step, metrics) if self.on_step is not None else None
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop before there is a checkpoint
            self.exit, result = error, True
        if isinstance(result, bool | np.bool_) and result:
            self.stop()


def train(
    config: Config, config_path: str, is_local: bool = False, follower: Follower | None = None,
    is_sft_alone: bool = False,
) -> RunDirectory:  # fmt: skip
    """Run a whole job, and return the run's directory.

    Args:
        is_local: all actors are objects of this process, without Ray (`cluster/local.py`).
        follower: the Python program that called.
        is_sft_alone: end after the supervised steps, before GRPO.

    Raises:
        RunError: a fault of the files, the model, the cluster or an actor; the message says what to do.
        Interrupted: Ctrl-C or SIGTERM.
    """
    run = RunDirectory(Path(config.run.output_dir) / run_name(config, config_path), is_local, is_sft_alone)
    config, notice = on_this_machine(with_dtype_of(run, config), is_local)
    if notice is not None:
        print(f"! {notice}")
    with signals_answered(run):
        if config.run.if_exists == "resume" and run.config_path.exists():
            return _resume(run, config, follower)
        return _train(run, config, follower)


def _train(run: RunDirectory, config: Config, follower: Follower | None) -> RunDirectory:
    task = _check(config, run.is_local, run.check_free)
    for line in task.first_prompts:
        print_visible(line)
    with shown_plainly():
        config = at_commits(config)
    with _hosted(config, run.is_local) as (console, host, learner_host):
        prepared = _prepare(config, task, console)
        with run.lock():
            with shown_plainly():
                run.create(config)
            write_digests(run, _digests(config, task, prepared))
            _run_to_the_end(config, prepared, run, console, host, learner_host, follower)
    return run


def resume(
    path: str, overrides: Sequence[str], is_local: bool = False, follower: Follower | None = None
) -> RunDirectory:
    """Resume the run in folder `path` from its last checkpoint; overrides may change all fields but `FIXED`.

    Raises:
        RunError: as for `train`; also if the folder holds no run, or an override would change its prompts.
        Interrupted: Ctrl-C or SIGTERM.
    """
    run = RunDirectory(path, is_local)
    if not run.config_path.exists():
        raise RunError(f"{path}: no run to resume (it has no config.yaml); give a folder that `train` made")
    with signals_answered(run):
        return _resume(run, load_config(run.config_path, overrides, is_local), follower)


def _resume(run: RunDirectory, config: Config, follower: Follower | None) -> RunDirectory:
    """Resume; whatever can refuse does so before the first change in the run's folder."""
    if run.is_sft_alone and run.sft.exists():
        return run
    import_from(run.given)
    check_dumped(run.config_path)
    before = load_config(run.config_path)
    config = _with_commits_of(before, config)
    _check_same_prompts(before, config)
    # The demonstrations are not needed any more once the model has seen them.
    task = _check(config.model_copy(update={"sft": None}) if run.sft.exists() else config, run.is_local)
    digests = _digests(config, task)
    if unchecked := check_inputs(run, digests):
        print_visible(f"! {unchecked}")
    with run.lock():
        store, logged = CheckpointStore(run, config.checkpoint), last_logged_step(run.metrics_path)
        try:
            checkpoint = store.latest()
        except OSError as error:
            raise RunError(f"a checkpoint cannot be read: {error}; make it readable, or remove it") from error
        step = checkpoint.state.step if checkpoint is not None else 0
        if min(step, logged) >= config.algorithm.num_steps:
            return run  # `print_ending` says so, and how to train longer
        every, last = before.checkpoint.every_num_steps, before.algorithm.num_steps
        # The process may have been killed while it wrote the first one.
        is_first = any(run.checkpoints.glob(f"unfinished-step-{min(every, last):06d}*"))
        if checkpoint is None and (store.damaged or (logged >= min(every + 1, last) and not is_first)):
            raise RunError(no_whole_checkpoint(run, store.damaged))
        run.check_records(step)
        profiled = config.learner.profile_steps
        if profiled and profiled[1] <= step and profiled != before.learner.profile_steps:
            raise RunError(f"learner.profile_steps: step {step} is trained already; choose later ones")
        if checkpoint is not None:
            check_same_reference(before, config)
            check_same_sampling(before, config, checkpoint)
            check_same_moments(config, checkpoint)
        with shown_plainly():
            config = at_commits(config)  # of a run of an earlier release, which has none
        with _hosted(config, run.is_local) as (console, host, learner_host):
            prepared = _prepare(config, task, console)
            if checkpoint is not None:
                with shown_plainly():
                    prepared.prompts.load_state_dict(checkpoint.state.ledger)
            run.create_subfolders()
            _adopt(run, before, config, step, unchecked)
            write_digests(run, digests)
            _run_to_the_end(config, prepared, run, console, host, learner_host, follower)
    return run


def check_resume(run: RunDirectory, config: Config, task: TaskData) -> None:
    """Refuse a configuration with which `resume` would refuse the run; raises RunError."""
    check_dumped(run.config_path)
    _check_same_prompts(before := load_config(run.config_path), _with_commits_of(before, config))
    check_inputs(run, _digests(config, task))


def _digests(config: Config, task: TaskData, prepared: Prepared | None = None) -> dict[str, str]:
    templates = {name: prompter.template for name, prompter in task.prompters.items()}
    digests = input_digests(config, templates, task.train, task.validation)
    if config.model.tiny is not None:
        from grpo_ray.run.tiny_model import tiny_digest  # takes seconds

        built = prepared and Path(prepared.model.path).name.removeprefix("tiny-")  # or takes seconds
        digests[f"{TINY} (as it is built)"] = built or tiny_digest(config)
    return digests


def _with_commits_of(before: Config, now: Config) -> Config:
    """Return the configuration with the commits of the models that the run has loaded, where it names none."""
    known = {
        field: path for field, path in before.models.items() if path.partition("@")[0] == now.models.get(field)
    }
    return with_models(now, now.models | known)


def _adopt(run: RunDirectory, before: Config, now: Config, step: int, unchecked: str | None) -> None:
    """Replace the run's configuration; events say what changes, and what was not compared."""
    changes = changed_values(before.model_dump(mode="json"), now.model_dump(mode="json"))
    change = f"resumed with other values: {'; '.join(changes)}" if changes else None
    if any(r.get("kind") == "config_changed" and r["step"] > step for r in readable_rows(run.events_path)):
        change = change or "resumed from a step before other values were given"
    for kind, text in (("config_changed", change), ("inputs_unchecked", unchecked)):
        if text is not None:
            row = {"time": time.time(), "kind": kind, "actor": None, "step": step, "text": text}
            if kind == "config_changed":
                row["before"] = before.model_dump(mode="json")  # what the audit judges the steps so far by
            JsonLines(run.events_path).append(row)
            sync_files([run.events_path])  # or a power cut could leave the new configuration without it
    dump_config(now, run.config_path)  # also what a kill has left half written
    run.state_path.unlink(missing_ok=True)  # it describes how the run ended the last time


def _check(config: Config, is_local: bool, *others: Callable[[], None]) -> TaskData:
    """Run every check that needs no Ray, and return the task's data."""
    *_, task, _, _ = all_of(
        *others,
        lambda: check_files(config),
        lambda: check_machine(config, is_local),
        lambda: check_trackers(config),
    )
    assert isinstance(task, TaskData)
    with shown_plainly():
        return with_trial(config, task)


FIXED = (
    "model.",
    "task.",
    "sft.",
    "run.seed",
    "distillation.teacher",
    "algorithm.preset",  # every field that it sets is in config.yaml already, and would win
    "algorithm.prompts_per_step",
    "algorithm.samples_per_prompt",
    "algorithm.dynamic_sampling_tries",
    "buffer.replay.",
)


def _check_same_prompts(before: Config, now: Config) -> None:
    """Refuse a change of the model or of the prompts' order; a resumed run may change everything else."""
    old, new = leaves(before.model_dump()), leaves(now.model_dump())
    for path in sorted(old.keys() | new.keys()):
        if path.startswith(FIXED) and old.get(path) != new.get(path):
            raise RunError(
                f"{path}: this run has {old.get(path)!r} and cannot be resumed with {new.get(path)!r}; "
                "leave it, or train a new run"
            )


SAMPLED = ("temperature", "min_tokens")  # they decide the logprobs of sampled tokens


def check_same_reference(before: Config, now: Config) -> None:
    """Refuse to give up a reference that has been refreshed; raises RunError."""
    old, new = before.algorithm.kl, now.algorithm.kl
    if old.refresh_every_num_steps and new.refresh_every_num_steps is None and new.reference == "initial":
        raise RunError(
            "algorithm.kl.refresh_every_num_steps: without it the reference would be the weights of step 0 "
            f"again; to keep it as it is, give more than the run's {now.algorithm.num_steps} steps"
        )


def check_same_sampling(before: Config, now: Config, checkpoint: Checkpoint) -> None:
    """Refuse another distribution while the checkpoint's buffer holds groups of the earlier one.

    The Learner would compare their logprobs with its own at the new temperature.

    Raises:
        RunError: names the field.
    """
    changed = [name for name in SAMPLED if getattr(before.sampling, name) != getattr(now.sampling, name)]
    num_groups = sum(len(read_uses(checkpoint.training_path / name)) for name in (GROUPS, REPLAY))
    if changed and num_groups:
        old, new = (getattr(config.sampling, changed[0]) for config in (before, now))
        raise RunError(
            f"sampling.{changed[0]}: the buffer of {checkpoint.path} holds {num_groups} groups sampled with "
            f"{old!r}, so the run cannot be resumed with {new!r}; leave it, or train a new run from that "
            "checkpoint (model.path)"
        )


def check_same_moments(now: Config, checkpoint: Checkpoint) -> None:
    """Refuse 8-bit moments in place of others, or the other way round; raises RunError."""
    file = checkpoint.training_path / "optimizer.safetensors"
    moments = {"exp_avg"}  # of several ranks, which write other files, and have none of 8 bits
    if file.exists():
        with safe_open(file, framework="numpy") as tensors:
            names = [name for name in tensors.keys() if name.startswith("adam/")]  # noqa: SIM118
        moments = {name.rpartition("/")[2] for name in names}
    if moments and ("state1" in moments) != (now.learner.moments == "8bit"):
        raise RunError(
            "learner.moments: the checkpoint's moments and those of the configuration are not both 8bit; "
            "resume with the moments that the run began with"
        )


@contextlib.contextmanager
def _hosted(config: Config, is_local: bool) -> Iterator[tuple[RunConsole, Host, LearnerHost]]:
    """Connect to Ray, and yield the console and the hosts of all actors and of a Learner alone."""
    with RunConsole(config.algorithm.num_steps, config.weight_sync.max_lag) as console:
        if is_local:
            with local.threads_kept():
                yield console, local.LocalActors, local.learning
            return
        console.status("starting Ray")
        from grpo_ray.cluster import hosting, session

        needs_hub = not all(map(is_local_model, config.models.values()))
        with session.connected(needs_hub):
            console.status("reserving resources for the actors")
            with session.placed(config) as placement:
                yield console, partial(hosting.ActorGroup, placement), partial(hosting.learning, placement)


def _prepare(config: Config, task: TaskData, console: RunConsole) -> Prepared:
    console.status("preparing the model")
    with shown_plainly():
        return prepare(config, task, console.warmup)


@contextlib.contextmanager
def warnings_in(path: Path) -> Iterator[None]:
    """Write the warnings of the actors in this process to a file, as on Ray, instead of between the steps."""
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1)) as handler:
        logging.root.addHandler(handler)
        try:
            yield
        finally:
            logging.root.removeHandler(handler)


def _run_to_the_end(
    config: Config, prepared: Prepared, run: RunDirectory, console: RunConsole, host: Host,
    learner_host: LearnerHost, follower: Follower | None,
) -> None:  # fmt: skip
    config, prepared = after_sft(config, prepared, run, learner_host, console.warmup)
    if run.is_sft_alone:
        return
    is_alone, follower = follower is None, follower or Follower()
    console.print(banner(config, prepared.longest_prompt, str(run.path)))
    logged = warnings_in(run.logs / "local.log") if run.is_local else contextlib.nullcontext()
    with imports_left_alone(), logged, reported(run, config.algorithm.num_steps, console) as reporter:
        reporter.on_step = follower.step
        for notice in prepared.notices:
            reporter.warning(notice)

        def drive(controller: Controller) -> None:
            reporter.follow(controller.live_status)
            limit_s = config.run.on_preemption_s
            run_until_signal(controller, limit_s, run, is_alone, console.print, follower.can_stop)

        with tracking(config, run, console.print, reporter.warning) as trackers:
            train_through_restores(config, prepared, run, reporter, host, drive, trackers)
