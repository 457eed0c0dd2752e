"""A Learner of one and of two ranks: a step, a snapshot, and the memory of each rank. A process per rank."""

import contextlib
import ctypes
import gc
import multiprocessing
import secrets
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.adapter_memory import QUICK, SHAPE
from benchmarks.results import Options, Row, take_turns
from benchmarks.tiny_learner import QUICKSTART, SMALL, make_batch, model_folder
from grpo_ray.config.loading import load_config
from grpo_ray.core.learner import Learner
from grpo_ray.learning.ranks import Seat
from grpo_ray.learning.rendezvous import NUM_BYTES, open_store
from grpo_ray.learning.sharded import local_part
from grpo_ray.watch.memory import resident_bytes

TITLE = "a Learner of one and of two ranks: steps, snapshots and memory (gloo)"
ONE, THREADS, RANKS = "one rank", "one rank, two threads", "two ranks"
CASES = {ONE: (1, 1), THREADS: (1, 2), RANKS: (2, 1)}  # ranks, threads of each
MIB = 2**20
LARGE = ["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4"]


def run(options: Options) -> list[Row]:
    rounds = options.rounds or (1 if options.quick else 6)
    rows = _of_model("quickstart's model", [], SMALL if options.quick else [], rounds)
    shape = [f"model.tiny.{name}={value}" for name, value in (QUICK if options.quick else SHAPE).items()]
    return rows + _of_model("102M parameters", shape, LARGE, min(rounds, 3))


def _of_model(model: str, shape: Sequence[str], overrides: Sequence[str], rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(model_folder(shape))
        crews = {
            f"{model}, {name}": stack.enter_context(_ranks(folder, [*shape, *overrides], size, threads))
            for name, (size, threads) in CASES.items()
        }
        steps = {name: (lambda pipes=pipes: _ask(pipes, "step")) for name, pipes in crews.items()}
        seconds = take_turns(steps, rounds)
        facts = {name: _facts(_ask(pipes, "facts"), len(pipes)) for name, pipes in crews.items()}
    return [Row(name, values, f"{model}, {ONE}", 1, "steps", facts[name]) for name, values in seconds.items()]


def _facts(of_ranks: Sequence[dict[str, float]], size: int) -> dict[str, float]:
    facts = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
    return {name: value for name, value in facts.items() if size > 1 or name != "collectives s"}


def _ask(pipes: Sequence[Connection], what: str) -> list[Any]:
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


@contextlib.contextmanager
def _ranks(folder: str, overrides: Sequence[str], size: int, threads: int) -> Iterator[list[Connection]]:
    """Start the ranks of one Learner; yield the pipes to them."""
    store, secret = open_store("127.0.0.1"), secrets.token_bytes(NUM_BYTES)
    changes = [*overrides, f"learner.num_ranks={size}", f"learner.num_threads={threads}"]
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=_work, args=(there, folder, changes, rank, size, store.port, secret), daemon=True
        )
        for rank, (_, there) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    try:
        yield [here for here, _ in pairs]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(
    pipe: Connection, folder: str, overrides: list[str], rank: int, size: int, port: int, secret: bytes
) -> None:
    """Train, and answer questions, in a process of its own."""
    seat = Seat(rank, size, 1, size, "127.0.0.1", port, 600.0, 600.0, secret) if size > 1 else None
    config = load_config(QUICKSTART, overrides)
    torch.ones(1).sum()  # torch's own memory is there before the Learner's
    before = resident_bytes()
    learner = Learner(folder, config, (), seat=seat)
    collectives_s = 0.0
    while True:
        if pipe.recv() == "step":
            metrics = learner.train_step(make_batch(config, learner.version)).metrics
            collectives_s = metrics.get(f"ranks/learner-{rank}/collectives_s", 0.0)
            learner.snapshot()
            pipe.send(None)
        else:
            pipe.send(_memory(learner, before) | {"collectives s": collectives_s})


def _memory(learner: Any, before: int) -> dict[str, float]:
    """Return the MiB of the state's tensors, and the growth of the process since before the Learner."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    weights = learner.masters.parameters
    moments = [v for state in learner._optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    kinds = {"weights": weights, "gradients": [w.grad for w in weights if w.grad is not None], "AdamW": moments}
    found = {
        f"{kind} MiB": sum(local_part(tensor).nbytes for tensor in tensors) / MIB
        for kind, tensors in kinds.items()
    }
    return {**found, "resident MiB": (resident_bytes() - before) / MIB}
