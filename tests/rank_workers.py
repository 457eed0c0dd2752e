"""Real ranks in processes of their own, without Ray: each runs a function with its seat."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from grpo_ray.learning.ranks import Seat
from grpo_ray.learning.rendezvous import NUM_BYTES, open_store

TIMEOUT_S = 120.0
ANSWER_S = 1200.0  # for all that a rank does: some tests train with every setting in one call
SECRET = bytes(range(NUM_BYTES))
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["grpo_ray.core.learner", "builders", "peft"])


def on_ranks(
    size: int, work: Callable[..., Any], *args: Any, replicas: int = 1, port: int | None = None, **changes: Any
) -> list[Any]:
    """Return what `work(seat, *args)` returned in each of `size` processes; raise the first error."""
    store = meeting()
    limits = dict.fromkeys(("start_timeout_s", "collective_timeout_s"), TIMEOUT_S)
    options: dict[str, Any] = {**limits, "ranks_per_node": size, "secret": SECRET, **changes}
    pipes: list[Connection] = []
    processes = []
    for rank in range(size):
        seat = Seat(
            rank=rank, size=size, replicas=replicas, host="127.0.0.1", port=port or store.port, **options
        )
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(there, work, seat, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return _answers(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def meeting() -> TCPStore:
    """Open a place for ranks to meet, at its `port`, while the object lives."""
    return open_store("127.0.0.1", TIMEOUT_S)


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], ANSWER_S)
        if not ready:
            raise TimeoutError(f"{len(pipes) - len(answers)} ranks gave no answer")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            answer, error = pipe.recv()
            if error is not None:
                raise RuntimeError(f"rank {pipes.index(pipe)}: {error}")
            answers[pipe] = answer
    return [answers[pipe] for pipe in pipes]


def refused(*_: object) -> None:
    """Stand in for both ends of every collective that sends pickles."""
    raise AssertionError("a pickle would be exchanged")


def _run(pipe: Connection, work: Callable[..., Any], seat: Seat, args: Sequence[Any]) -> None:
    dist.distributed_c10d._tensor_to_object = refused  # type: ignore[attr-defined]
    dist.distributed_c10d._object_to_tensor = refused  # type: ignore[attr-defined]
    try:
        pipe.send((work(seat, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
