"""The Learner's ranks as one client: which error ends them all, and which is a consequence of another's."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from grpo_ray.cluster import crew as crew_module
from grpo_ray.cluster.crew import Crew
from grpo_ray.cluster.kinds import Answer
from grpo_ray.errors import FORGED, ActorDied, DataLost, OutOfDeviceMemory, RunError

LIMIT_S = 0.2
CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
TIMED_OUT = RuntimeError("[/pytorch/third_party/gloo/gloo/unbound_buffer.cc:81] Timed out waiting 20000ms")
PAIR_CLOSED = RuntimeError("Application timeout caused pair closure")  # gloo's, which it does not say
SILENT = object()


class Rank:
    """The client of a rank, and the rank: a call is answered when the test says so, or when it is killed."""

    def __init__(self, number: int) -> None:
        self.name, self.handle, self.is_killed = f"learner-{number}", self, False
        self.open: dict[str, asyncio.Future[Any]] = {}

    def __getattr__(self, method: str) -> Any:
        return lambda *_: self._call(method)

    def snapshot(self) -> tuple[str, Answer]:
        return f"the weights of {self.name}", self._call("snapshot")

    def _call(self, method: str) -> Answer:
        call = self.open[method] = asyncio.get_running_loop().create_future()
        if self.is_killed:
            self.kill()
        return Answer(lambda: call)

    def answer(self, method: str, value: object) -> None:
        if isinstance(value, BaseException):
            self.open[method].set_exception(value)
        elif value is not SILENT:
            self.open[method].set_result(value)

    def kill(self) -> None:
        self.is_killed = True
        for call in self.open.values():
            if not call.done():
                call.set_exception(ActorDied(self.name, "it was killed by `ray.kill`."))


class Ranks(list[Rank]):
    """The ranks of a Learner, and their crew."""

    def __init__(self, size: int) -> None:
        super().__init__(map(Rank, range(size)))
        clients: Any = self
        self.crew: Any = Crew("learner", clients, lambda name: f"10.0.0.{name[-1]}", LIMIT_S)

    @property
    def are_killed(self) -> bool:
        assert len({rank.is_killed for rank in self}) == 1, "some were left"
        return self[0].is_killed

    def answer(self, method: str, *values: object) -> None:
        for rank, value in zip(self, values, strict=True):
            rank.answer(method, value)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "GRACE_S", 0.1)
    monkeypatch.setattr(ray, "kill", Rank.kill)


def died(number: int, reason: str = "its worker process has died") -> ActorDied:
    return ActorDied(f"learner-{number}", reason)


def outcome(*values: object, method: str = "train_step") -> tuple[Any, bool]:
    """Return what the call returned or raised, with one value per rank, and whether all ranks were killed."""

    async def main() -> tuple[Any, bool]:
        ranks = Ranks(len(values))
        call = getattr(ranks.crew, method)()
        ranks.answer(method, *values)
        try:
            found = await call
        except Exception as error:
            found = error
        return found, ranks.are_killed

    return asyncio.run(main())


def ended(*values: object, method: str = "train_step") -> str:
    """Return the reason of the death with which all ranks are ended."""
    error, are_killed = outcome(*values, method=method)
    assert type(error) is ActorDied
    assert error.name == "learner"
    assert are_killed
    return str(error).removeprefix("learner died: ")


async def test_the_answer_and_the_bulk_are_the_first_ranks_once_all_have_answered() -> None:
    ranks = Ranks(3)
    bulk, copied = ranks.crew.snapshot()
    call = asyncio.ensure_future(copied)
    await asyncio.sleep(0)
    for number in (0, 2):
        ranks[number].answer("snapshot", number)
    await asyncio.sleep(LIMIT_S / 4)
    assert not call.done()
    ranks[1].answer("snapshot", 1)
    assert (bulk, await call) == ("the weights of learner-0", 0)
    call = ranks.crew.train_step()
    ranks.answer("train_step", 5, 6, 7)
    assert await call == 5
    assert not ranks.are_killed


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
DISAGREEING = [
    RuntimeError(f"the Learner's ranks disagree about the batch: ranks [{other}] differ from {own}")
    for own, other in ((0, 1), (1, 0))
]
UNMET = died(0, "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /first/1")
STRANGER = died(1, f"RuntimeError: seat 0 of 2 (gloo) is taken by a process that {FORGED}")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((SILENT, died(1), SILENT), "^learner-1 on 10.0.0.1: its worker process has died"),
        ((CLOSED, died(1), "done"), "^learner-1 on 10.0.0.1: its worker process has died"),
        # A hung rank is named before those that waited for it.
        ((PAIR_CLOSED, SILENT, TIMED_OUT), "^learner-1 on 10.0.0.1: no answer; learner-0 .* pair closure"),
        # NCCL's watchdog ends a process that waited in vain; but many that wait for a dead one are no news.
        ((died(0), SILENT, died(2)), "^learner-0 .*; learner-1 on 10.0.0.1: no answer$"),
        ((died(0), SILENT, SILENT), "^learner-0 on 10.0.0.0: its worker process has died$"),
        # All ranks were stopped for long and continued: none is silent, and none has died.
        ((TIMED_OUT, CLOSED), "Timed out"),
        # Each says which ones differ from itself; to write a checkpoint of such ranks would be wrong.
        (DISAGREEING, re.escape(f"learner-0 on 10.0.0.0: RuntimeError: {DISAGREEING[0]}")),
        ((SILENT, OSError(28, "full")), r"learner-1 on 10.0.0.1: OSError: \[Errno 28\] full"),
        ((died(0), OSError(28, "full")), r"learner-1 on 10.0.0.1: OSError: \[Errno 28\] full"),
        ((CLOSED, OUT_OF_MEMORY), "OutOfMemoryError: CUDA out of memory"),
        ((died(0), OUT_OF_MEMORY), "OutOfMemoryError: CUDA out of memory"),
        ((OUT_OF_MEMORY, OUT_OF_MEMORY), "OutOfMemoryError: CUDA out of memory"),  # even if all have it
        ((TIMED_OUT, DataLost("learner-1: the owner's connection timed out")), "^learner-1 on .*: DataLost: "),
        # A rank that failed at its start, and one that waited for it.
        ((UNMET, died(1, "ValueError: model.path: bad")), "^learner-1 on 10.0.0.1: ValueError"),
        ((died(0, "gloo: closed"), STRANGER), re.escape(f"learner-1 on 10.0.0.1: {STRANGER.reason}")),
    ],
)
def test_all_ranks_end_with_the_cause_not_its_consequences(values: tuple[object, ...], reason: str) -> None:
    assert re.search(reason, ended(*values))


@pytest.mark.slow
def test_a_rank_that_hangs_outside_of_collectives_has_a_limit() -> None:
    assert ended("done", SILENT, method="capture") == "learner-1 on 10.0.0.1: no answer"


@pytest.mark.slow
async def test_a_write_may_take_the_first_rank_long() -> None:
    ranks = Ranks(2)
    call = asyncio.ensure_future(ranks.crew.write_captured(Path()))
    await asyncio.sleep(0)
    ranks[1].answer("write_captured", {})
    await asyncio.sleep(2 * LIMIT_S)
    assert not call.done()
    ranks[0].answer("write_captured", {"model": 3})
    assert await call == {"model": 3}


@pytest.mark.parametrize("error", [ValueError("no groups"), RunError("a single sequence does not fit")])
def test_an_error_that_all_ranks_raise_alike_is_raised_as_it_is(error: Exception) -> None:
    found, are_killed = outcome(error, type(error)(str(error)))
    assert (type(found), str(found)) == (type(error), str(error))
    assert not are_killed


async def test_a_full_disk_of_one_rank_is_raised_as_it_is_and_does_not_count_for_later_calls() -> None:
    ranks = Ranks(2)
    call = ranks.crew.write_captured(Path())
    ranks.answer("write_captured", {}, OSError(28, "full"))
    with pytest.raises(OSError, match="full"):
        await call
    assert not ranks.are_killed
    call = ranks.crew.train_step()
    ranks.answer("train_step", SILENT, died(1))
    with pytest.raises(ActorDied, match=r"learner-1 on 10\.0\.0\.1: its worker process has died"):
        await call


@pytest.mark.parametrize(
    "error",
    [OutOfDeviceMemory("learner", "CUDA out of memory", 4096), RunError("learner: give it a larger GPU")],
)
def test_an_error_that_says_what_to_do_keeps_its_kind(error: Exception) -> None:
    found, are_killed = outcome(SILENT, error)
    text = str(error).replace("died: ", "died: learner-1 on 10.0.0.1: ")
    assert (type(found), str(found)) == (type(error), text)
    assert getattr(found, "num_tokens", None) == getattr(error, "num_tokens", None)
    assert are_killed


async def test_a_rank_whose_collective_fails_first_is_not_the_cause() -> None:
    ranks = Ranks(2)
    call = asyncio.ensure_future(ranks.crew.train_step())
    await asyncio.sleep(0)
    ranks[0].answer("train_step", CLOSED)
    await asyncio.sleep(0.03)
    ranks[1].answer("train_step", died(1))
    with pytest.raises(ActorDied, match=r"^learner died: learner-1 on 10\.0\.0\.1: its worker process"):
        await call


@pytest.mark.parametrize("of_step", [SILENT, CLOSED])
async def test_every_open_and_later_call_raises_the_error_that_ended_the_ranks(of_step: object) -> None:
    """The step that is open while a checkpoint's write fails would only say that its ranks were killed.

    Or a rank that failed goes on with the step, where the other's collective is not the one it expects.
    """
    ranks = Ranks(2)
    calls = [
        asyncio.ensure_future(call) for call in (ranks.crew.write_captured(Path()), ranks.crew.train_step())
    ]
    ranks.answer("write_captured", SILENT, torch.OutOfMemoryError("CUDA out of memory"))
    await asyncio.sleep(0.03)
    ranks.answer("train_step", of_step, of_step)
    await asyncio.wait(calls)
    cause = r"learner-1 on 10\.0\.0\.1: OutOfMemoryError: CUDA out"
    for call in (*calls, ranks.crew.capture()):
        with pytest.raises(ActorDied, match=rf"^learner died: {cause}"):
            await call


async def test_a_call_that_is_given_up_goes_on_in_every_rank() -> None:
    """One rank that has begun it would wait for another where it was cancelled in time."""
    ranks = Ranks(2)
    call = asyncio.ensure_future(ranks.crew.train_step())
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.sleep(0.01)
    assert call.cancelled()
    assert not any(rank.open["train_step"].cancelled() for rank in ranks)
    ranks.answer("train_step", 1, 1)
