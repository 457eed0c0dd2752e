"""Bundles that a configuration requests, and messages about missing resources; test_launch.py uses Ray."""

import signal
import socket
import sys
import threading
import time

import pytest
from commands import Capture, printed
from small_run import QUICKSTART

from grpo_ray.cluster import session
from grpo_ray.cluster.placement import Bundle, Node, bundles_of, listed, shortfalls
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.run import PlacementConfig
from grpo_ray.errors import RunError
from grpo_ray.run.machine import check_machine, gpus_of
from grpo_ray.tools.cli import main

EIGHT_GPUS = "configs/qwen2.5-math-1.5b-8gpu.yaml"


def test_each_scorer_environment_worker_and_teacher_reserves_its_own() -> None:
    """The amounts per kind of actor add up to the sum: 2 x 0.5 + 0.5 + 3 x 2."""
    others = ["generator.num_cpus=0", "learner.num_cpus=0"]
    scorers = quickstart(*others, "scorer.num_scorers=3", "scorer.num_cpus=2")
    assert bundles_of(scorers) == tuple(Bundle((f"scorer-{n}",), {"CPU": 2}) for n in range(3))
    assert shortfalls(scorers, [Node("a", {"CPU": 5})]) == ["CPU: 6 needed (3 x 2 for Scorers), 5 available"]
    few = ["generator.num_generators=2", "episodes.num_cpus=2"]
    workers = load_config("configs/calculator.yaml", [*few, "episodes.num_workers=3"])
    needed = "7.5 needed (2 x 0.5 for Generators, 0.5 for the Learner, 3 x 2 for EnvironmentWorkers)"
    assert shortfalls(workers, [Node("a", {"CPU": 5})]) == [f"CPU: {needed}, 5 available"]
    (line,) = shortfalls(load_config("configs/calculator.yaml", few), [Node("a", {"CPU": 2})])
    assert "0.5 for the Learner, 2 for the EnvironmentWorker)" in line
    given = [*others, "distillation.num_gpus=2", "distillation.num_teachers=2"]
    assert bundles_of(quickstart(*given)) == ()  # there is no teacher
    teachers = quickstart(*given, "distillation.teacher=/some/where", "sampling.min_tokens=0")
    assert bundles_of(teachers) == tuple(Bundle((f"teacher-{n}",), {"GPU": 2, "CPU": 1}) for n in range(2))
    assert gpus_of(teachers) == 4
    nodes = [Node("a", {"GPU": 2, "CPU": 4})]
    assert shortfalls(teachers, nodes) == ["GPU: 4 needed (2 x 2 for Teachers), 2 available"]


def quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def on_gpus(*overrides: str) -> Config:
    """Return a configuration with seven Generators and a Learner of one rank, a GPU for each."""
    one_rank = ("generator.num_generators=7", "learner.num_ranks=1", "learner.num_cpus=1")
    return load_config(EIGHT_GPUS, [*one_rank, *overrides])


def test_colocated_actors_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = ("generator.num_generators=1", "generator.colocated=true", "weight_sync.max_lag=0")
    config = on_gpus(*turns, "scorer.num_cpus=1")
    assert bundles_of(config) == (
        Bundle(("generator-0", "learner"), {"GPU": 1, "CPU": 2}),
        Bundle(("scorer",), {"CPU": 1}),
    )
    assert gpus_of(config) == 1
    ray = FakeRay(monkeypatch, [LARGE])
    with session.placed(config) as placement:
        assert ray.groups == [([{"GPU": 1, "CPU": 2}, {"CPU": 1}], "PACK")]
        for actor, index, gpus in (("generator-0", 0, 0.5), ("learner", 0, 0.5), ("scorer", 1, 0)):
            options = placement[actor]
            assert options["num_gpus"] == gpus
            assert options["scheduling_strategy"].placement_group_bundle_index == index


def test_all_on_one_node() -> None:
    (bundle,) = bundles_of(on_gpus("placement.strategy=colocate", "scorer.num_cpus=1"))
    assert bundle.resources == {"GPU": 8, "CPU": 9}
    assert bundle.actors == (*(f"generator-{index}" for index in range(7)), "learner", "scorer")


def test_fractions_add_up_as_ray_counts() -> None:
    config = quickstart("generator.num_generators=3", "generator.num_cpus=0.8", "learner.num_cpus=0.6")
    assert shortfalls(config, [Node("10.0.0.1", {"CPU": 3})]) == []
    together = config.model_copy(update={"placement": PlacementConfig(strategy="colocate")})
    actors = "generator-0", "generator-1", "generator-2", "learner"
    assert bundles_of(together) == (Bundle(actors, {"CPU": 3}),)


RANKS = ("generator.num_generators=2", "learner.num_ranks=6")
LARGE, SMALL = Node("10.0.0.1", {"GPU": 8, "CPU": 96}), Node("10.0.0.2", {"GPU": 2, "CPU": 16})


@pytest.mark.parametrize(
    ("overrides", "nodes", "lines"),
    [
        ((), (LARGE,), []),
        ((), (SMALL,), ["GPU: 8 needed (7 x 1 for Generators, 1 for the Learner), 2 available"]),
        ((), (), [
            "GPU: 8 needed (7 x 1 for Generators, 1 for the Learner), 0 available",
            "CPU: 8 needed (7 x 1 for Generators, 1 for the Learner), 0 available",
        ]),
        (("scorer.num_cpus=100",), (LARGE, SMALL), [
            "CPU: 100 for scorer must be on one node, where 96 are available",
        ]),
        (("placement.strategy=strict_spread",), (LARGE, LARGE), [
            "nodes: 8 needed (placement.strategy: strict_spread), 2 available",
        ]),
        (("placement.strategy=colocate", "generator.num_generators=1", "generator.num_cpus=20"),
         (SMALL, Node("10.0.0.3", {"CPU": 64})), [
            "2 GPU, 21 CPU for generator-0 and learner are not available on one node",
        ]),
        (RANKS, (SMALL, SMALL, SMALL, SMALL), [
            "GPU: 6 for learner-0 to learner-5 must be on one node, where 2 are available; a lower "
            "learner.ranks_per_node divides them over nodes",
        ]),
        ((*RANKS, "learner.ranks_per_node=2"), (SMALL, SMALL, SMALL, SMALL), []),
        ((*RANKS, "learner.ranks_per_node=3"), (Node("a", {"GPU": 4, "CPU": 9}), SMALL, SMALL), [
            "3 GPU, 3 CPU must be on one node each for learner-0 to learner-2 and for learner-3 to learner-5; "
            "room for 1 of these 2 is available",
        ]),
    ],
)  # fmt: skip
def test_what_is_missing(overrides: tuple[str, ...], nodes: tuple[Node, ...], lines: list[str]) -> None:
    assert shortfalls(on_gpus(*overrides), nodes) == lines


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""), (["learner"], "learner"), (["generator-0", "learner"], "generator-0 and learner"),
        (["a-0", "a-1"], "a-0 and a-1"), ([f"a-{n}" for n in range(8)], "a-0 to a-7"),
        (["a-0", "a-2", "a-3", "a-4", "b-5", "scorer"], "a-0, a-2 to a-4, b-5 and scorer"),
    ],
)  # fmt: skip
def test_long_lists_of_actors_are_shortened(names: list[str], text: str) -> None:
    assert listed(names) == text


@pytest.mark.slow
def test_check_prints_the_bundles_and_what_a_cluster_lacks(capsys: Capture) -> None:
    """The quickstart's data are built in, so only its places are changed here."""
    command = ["check", QUICKSTART, "generator.num_gpus=1", "learner.num_gpus=1", *RANKS]
    bundles = [
        "  2 x 1 GPU, 0.5 CPU for generator-0 and generator-1",
        "  6 GPU, 3 CPU on one node for learner-0 to learner-5",
    ]
    for nodes, lacking in (
        (["--nodes", "1x8"], []),
        (["--nodes", "1x8x3"], [
            "  ! CPU: 4 needed (2 x 0.5 for Generators, 6 x 0.5 for the Learner's ranks), 3 available"
        ]),
        (["--nodes", "2x4"], [
            "  ! GPU: 6 for learner-0 to learner-5 must be on one node, where 4 are available; a lower "
            "learner.ranks_per_node divides them over nodes"
        ]),
    ):  # fmt: skip
        lines = printed(capsys, *command, *nodes, status=1 if lacking else 0).splitlines()[1:]
        assert [line for line in lines if "lacks" not in line][-len(bundles + lacking) :] == bundles + lacking
        assert any("its ground truth: " in line for line in lines)


@pytest.mark.parametrize("nodes", ["8", "0x8", "2x8x9x9", "axb"])
def test_nodes_that_are_not_understood_are_refused(nodes: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["check", QUICKSTART, "--nodes", nodes])
    assert "is not NODESxGPUS, such as 2x8" in capsys.readouterr().err


def test_a_driver_is_on_a_node_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in [
        ("http://head:8265", "an address for submitting jobs"),
        ("ray://head:10001", "must start on a node of the cluster"),
    ]:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(RunError, match=message):
            session.connected().__enter__()


def test_signals_as_ray_starts_and_ends_are_answered_as_at_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.alarm(60)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(session, "check_answers", lambda address: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        session.connected().__enter__()
    assert (signal.getsignal(signal.SIGTERM), signal.alarm(0)) == (before, 0)

    def shutdown() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        ended.append(True)

    ended: list[bool] = []
    monkeypatch.setattr(session.ray, "init", lambda **_: None)
    monkeypatch.setattr(session.ray, "shutdown", shutdown)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as pytest-xdist has it
    with pytest.raises(KeyboardInterrupt), session.connected():
        pass
    signal.signal(signal.SIGINT, ignored)
    assert ended  # half a shutdown would leave Ray's agents for a minute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "is_auto", "message"),
    [
        ("none", True, "Connection refused"),
        ("silent", False, "timed out"),
        ("web", True, "something other than a Ray head node answers"),
        ("no port", False, "give HOST:PORT"),
    ],
)
def test_an_address_at_which_no_ray_answers_is_refused_before_ray_is_asked(
    server: str, is_auto: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 0.2 if server == "silent" else 60.0)
    monkeypatch.setattr(session.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        if server == "none":
            listening.close()
        if server == "web":
            answer = b"HTTP/1.1 400 Bad Request\r\n"
            threading.Thread(target=lambda: listening.accept()[0].sendall(answer)).start()
        address = "head" if server == "no port" else address
        monkeypatch.setenv("RAY_ADDRESS", "auto" if is_auto else address)
        monkeypatch.setattr(session, "bootstrap_address", lambda given: address if is_auto else given)
        with pytest.raises(RunError, match=f"no Ray cluster answers at RAY_ADDRESS=.*{message}"):
            session.connected().__enter__()


@pytest.mark.parametrize("address", ["", "local"])
def test_an_empty_address_is_this_machine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match="this machine lacks resources: CPU: 100000 needed") as refused:
        check_machine(quickstart("generator.num_cpus=100000", "learner.num_cpus=0"), is_local=False)
    assert "placement.wait_s" not in str(refused.value)  # nothing is coming


# ---- the placement group; Ray's calls are fakes ----


class FakeRay:
    """Stand-in for Ray: a cluster's nodes, and the placement groups that were requested."""

    def __init__(self, patch: pytest.MonkeyPatch, there: list[Node], free: list[Node] | None = None) -> None:
        patch.setattr(session, "_nodes", self.nodes)
        for name in ("placement_group", "remove_placement_group"):
            patch.setattr(session, name, getattr(self, name))
        self.there, self.free = there, free if free is not None else there
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.waited: list[float] = []
        self.num_removed = 0

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> "FakeRay":
        self.groups.append((bundles, strategy))
        return self

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.free is self.there

    def remove_placement_group(self, group: "FakeRay") -> None:
        self.num_removed += 1

    def nodes(self, free: bool = False) -> list[Node]:
        return self.free if free else self.there


def test_an_actor_has_the_same_bundle_whenever_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, [LARGE, LARGE])
    engines = ("generator.num_generators=2", "generator.num_gpus=4", "placement.strategy=strict_spread")
    config = on_gpus(*engines, "learner.num_gpus=0", "learner.num_cpus=0")
    with session.placed(config) as placement:
        assert ray.groups == [([{"GPU": 4, "CPU": 1}] * 2, "STRICT_SPREAD")]
        for index in (0, 1, 1):
            options = placement[f"generator-{index}"]
            assert (options["num_gpus"], options["num_cpus"]) == (4, 1)
            assert options["scheduling_strategy"].placement_group_bundle_index == index
        assert placement["learner"] == {"num_gpus": 0, "num_cpus": 0}  # wherever Ray puts it
        assert ray.num_removed == 0
    assert ray.num_removed == 1


BUSY = [Node("10.0.0.1", {"GPU": 3, "CPU": 96}), Node("10.0.0.2", {})]
NEVER = r"the cluster lacks resources: GPU: 8 needed .* 2 available.* still coming, .* set placement\.wait_s"
NOT_NOW = r"the cluster is busy: GPU: 8 needed .* 3 free\. Free: .*\.1: 3 GPU, 96 CPU; .*\.2: nothing"
NOT_YET = r"after 60 s \(placement\.wait_s\) the cluster lacks resources: GPU: 8 needed"


@pytest.mark.parametrize(
    ("overrides", "there", "free", "waited", "message"),
    [
        ((), [SMALL], None, [], NEVER),  # no group is requested
        ((), [LARGE], BUSY, [session.GRACE_S], NOT_NOW),
        (("placement.wait_s=60",), [SMALL], [SMALL], [60], NOT_YET),  # an autoscaler sees the group's demand
    ],
    ids=["never", "not now", "not yet"],
)
def test_a_request_without_room_is_refused_and_leaves_no_group(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], there: list[Node], free: list[Node] | None,
    waited: list[float], message: str,
) -> None:  # fmt: skip
    ray = FakeRay(monkeypatch, there, free)
    with pytest.raises(RunError, match=message):
        session.placed(on_gpus(*overrides)).__enter__()
    assert ray.waited == waited
    assert len(ray.groups) == ray.num_removed == len(waited)


def test_the_group_is_removed_however_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, [LARGE])
    with pytest.raises(KeyboardInterrupt), session.placed(on_gpus()):
        raise KeyboardInterrupt
    assert ray.num_removed == 1
