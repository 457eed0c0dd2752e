"""Calls of actors with Ray's clients and without Ray, and the logs of their processes."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from ray import exceptions
from ray.exceptions import RayError
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster.local import LocalClient, check_local
from grpo_ray.cluster.remote_actor import Client, last_line, result_of
from grpo_ray.config.loading import load_config
from grpo_ray.config.model import AdapterConfig
from grpo_ray.errors import ActorDied, DataLost, RunError
from grpo_ray.run.training import warnings_in
from grpo_ray.watch import actor_log
from grpo_ray.watch.actor_log import MAX_BYTES, older, redirect_output, shorten


class Reference:
    """A reference as Ray's, to 7 or to an error: it may be awaited or not."""

    def __init__(self, error: RayError | None = None) -> None:
        self._error = error

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        if self._error is not None:
            raise self._error
        return 7


class Handle:
    """An actor with methods that all answer 7; with `options`, in addition to a bulky result."""

    def __getattr__(self, _: str) -> Any:
        return self

    def options(self, num_returns: int) -> Any:
        return SimpleNamespace(remote=lambda *_: [Reference() for _ in range(num_returns)])

    def remote(self, *_: Any) -> Any:
        return Reference()


async def test_an_answer_can_be_awaited_gathered_and_given_a_time_limit() -> None:
    _, copied = Client("learner", Handle()).snapshot()
    assert await copied == 7
    actor = Client("scorer", Handle())
    assert await asyncio.gather(actor.score(1), actor.score(2)) == [7, 7]
    assert await asyncio.wait_for(actor.ready(), 120) == 7


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
        exceptions.NodeDiedError("the node is gone"),
        exceptions.LocalRayletDiedError("the raylet is gone"),
        exceptions.ActorUnschedulableError("no node has room for its bundle"),
        exceptions.RuntimeEnvSetupError("pip failed"),
        exceptions.ActorDiedError(),
        exceptions.ActorUnavailableError("the connection is gone", b"0" * 16),
    ],
)
async def test_every_end_of_an_actor_is_its_death(error: RayError) -> None:
    """Only some of Ray's errors for it are a RayActorError; a kill for memory is none."""
    with pytest.raises(ActorDied, match="scorer died: ") as caught:
        await result_of("scorer", Reference(error))
    assert caught.value.name == "scorer"


def test_the_end_of_pydantics_error_is_the_field_with_what_it_should_be() -> None:
    with pytest.raises(ValidationError) as caught:
        AdapterConfig(rank=0)
    text = last_line(RayError(f"Traceback:\n  File x\n{caught.value}"))
    assert text == "rank: Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]"


@pytest.mark.parametrize(
    "error",
    [exceptions.OutOfMemoryError("of its owner"), exceptions.ObjectLostError("0" * 56, None, ""), RayError()],
)
async def test_an_argument_that_died_with_its_owner_is_no_death_of_the_actor(error: RayError) -> None:
    with pytest.raises(DataLost, match="scorer: "):
        await result_of("scorer", Reference(exceptions.RayTaskError("score", "traceback", error)))


@pytest.mark.slow
def test_an_answer_need_not_be_awaited() -> None:
    """A snapshot's publication may be cancelled before it begins."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RuntimeWarning)  # "... was never awaited"
        Client("learner", Handle()).snapshot()
        Client("scorer", Handle()).score(1)
        gc.collect()
    assert [str(each.message) for each in complaints] == []


LIMIT = 20_000
ACTOR = """
import subprocess, sys, time
from pathlib import Path
from grpo_ray.watch import actor_log
actor_log.MAX_BYTES, actor_log.LOOK_EVERY_S = LIMIT, 0.01
actor_log.redirect_output(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
for number in range(3000):
    os.write(1, f"child {number:6d} {'x' * 85}\\\\n".encode())
    time.sleep(0.0003)
'''])
while child.poll() is None:
    print(f"actor {'y' * 85}", flush=True)
    time.sleep(0.003)
while Path(sys.argv[1]).stat().st_size > LIMIT:  # until it is shortened, and then not again
    time.sleep(0.01)
print("the end", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_log_is_bounded_and_holds_the_newest_output_of_all_processes(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "generator-0.log"
    command = [sys.executable, "-c", ACTOR.replace("LIMIT", str(LIMIT)), str(log)]
    subprocess.run(command, check=True, timeout=600)
    assert sorted(path.name for path in log.parent.iterdir()) == ["generator-0.log", "generator-0.log.1"]
    # 300 kB and more were written. A file exceeds the limit by what is written between two looks at it.
    assert log.stat().st_size < 4 * LIMIT
    assert older(log).stat().st_size < 4 * LIMIT
    before, after = older(log).read_text().splitlines(), log.read_text().splitlines()
    lines = before + after
    assert lines[-1] == "the end"
    numbers = [[int(line.split()[1]) for line in part if line.startswith("child ")] for part in (before, after)]
    assert all(part == sorted(part) for part in numbers)
    assert max(map(max, filter(None, numbers))) > 2900  # a few are lost as the log is shortened
    assert sum(map(len, numbers)) > 20
    assert any(line.startswith("actor ") for line in lines)


@pytest.fixture(autouse=True)
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_log, "MAX_BYTES", 40)


def test_the_end_of_a_large_log_is_kept_from_a_whole_line_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab") as writer:
        writer.write(b"".join(b"line %d\n" % number for number in range(100)))
        writer.flush()
        shorten(log)
        assert log.read_bytes() == b""
        assert older(log).read_bytes() == b"line 96\nline 97\nline 98\nline 99\n"
        writer.write(b"later\n")
        writer.flush()
        shorten(log)
        assert log.read_bytes() == b"later\n"
        writer.write(b"much later " * 5 + b"\n")
        writer.flush()
        shorten(log)
    assert older(log).read_bytes() == b""  # one line longer than the limit: nothing of it


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    log, mine = tmp_path / "logs" / "a.log", tmp_path / "mine"
    mine.write_text("mine")
    log.parent.mkdir()
    log.write_bytes(b"line\n" * 100)
    for name in (".a.log.partial", ".a.log.1.partial", "a.log.1", "b.log"):
        (log.parent / name).symlink_to(mine)
    shorten(log)
    with pytest.raises(OSError, match="symbolic links"):
        redirect_output(log.parent / "b.log")
    assert mine.read_text() == "mine"
    assert older(log).read_bytes().startswith(b"line\n")


def test_a_log_that_cannot_be_copied_stays(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"line\n" * 100)
    older(log).mkdir()
    with pytest.raises(OSError, match="directory"):
        shorten(log)
    assert log.read_bytes() == b"line\n" * 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]


def test_what_one_process_cannot_do_is_refused_by_name() -> None:
    on_gpus = "generator.engine=vllm generator.num_gpus=1 learner.num_gpus=1 learner.num_ranks=2"
    on_cpu = "generator.engine=torch generator.num_gpus=0 learner.num_gpus=0 learner.num_ranks=1"
    teacher = "distillation.teacher=/some/where distillation.num_gpus=0"
    for asked, needed in (
        (f"{on_gpus} weight_sync.transport=collective", f"{on_cpu} weight_sync.transport=object_store"),
        ("generator.cpu_cores=[0] learner.cpu_cores=[1]", "generator.cpu_cores=null learner.cpu_cores=null"),
        (f"{teacher} distillation.engine=vllm sampling.min_tokens=0", "distillation.engine=torch"),
    ):
        with pytest.raises(RunError, match=f"; add {needed}, or omit --local$"):
            check_local(load_config(QUICKSTART, [*SMALL, *asked.split()]))
    check_local(load_config(QUICKSTART, [*SMALL, *teacher.split(), "distillation.engine=torch"]))
    check_local(load_config(QUICKSTART, SMALL))


def test_warnings_of_actors_go_to_the_runs_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "local.log"
    with warnings_in(log):
        logging.warning("group 0: not graded")
    logging.warning("later")
    assert log.read_text() == "group 0: not graded\n"
    with warnings_in(log):  # of a reward that fails for each response of a long run
        for text in ("x" * MAX_BYTES, "newest"):
            logging.warning(text)
    assert (log.read_text(), older(log).stat().st_size) == ("newest\n", MAX_BYTES + 1)


class Worker:
    """An actor with a method of each kind."""

    def __init__(self) -> None:
        self.began, self.may_end, self.order = threading.Event(), threading.Event(), list[str]()

    def held(self) -> None:
        self.began.set()
        self.may_end.wait()
        self.order.append("held")

    def next(self) -> None:
        self.order.append("next")

    def work_done(self) -> int:  # in a concurrency group of its own
        return len(self.order)

    async def asynchronous(self, value: Any) -> Any:
        return value

    async def never(self) -> None:
        await asyncio.Event().wait()


async def test_synchronous_calls_run_one_at_a_time_beside_asynchronous_ones() -> None:
    client = LocalClient("worker", Worker, beside=["work_done"])
    held, after = client.held(), client.next()
    while not client.actor.began.is_set():
        await asyncio.sleep(0.001)
    assert await client.asynchronous(1) == 1
    assert await client.work_done() == 0  # `next` waits for `held`, this does not
    client.actor.may_end.set()
    await held
    await after
    assert client.actor.order == ["held", "next"]


async def test_a_reference_arrives_as_its_value_but_not_in_a_box() -> None:
    client = LocalClient("worker", Worker)
    reference = client.asynchronous(7)
    assert await client.asynchronous(reference) == 7
    assert await client.asynchronous((reference, 8)) == (reference, 8)


async def test_the_death_of_an_actor_ends_its_open_calls_and_refuses_later_ones() -> None:
    client = LocalClient("worker", Worker)
    never = client.never()
    await asyncio.sleep(0)
    client.die("killed")
    for answer in (never, client.asynchronous(1)):
        with pytest.raises(ActorDied, match="worker died: killed"):
            await answer
