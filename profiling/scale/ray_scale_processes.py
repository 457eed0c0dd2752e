"""The processes of a run on real Ray with simulated engines; they load neither torch nor vLLM.

An engine only waits, so a process per engine would be nothing but memory: `EngineProcess` hosts several
Generators, and each has a client of its own. A call is one call to the process, as it would be to a Generator's
own.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from grpo_ray.config import Config
from grpo_ray.core.generator import Generator
from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.workers import Account, SimulatedLearner
from grpo_ray.types import StepReport, TrainBatch
from grpo_ray.watch.memory import resident_bytes


def refuse_heavy_modules() -> None:
    """Raise RuntimeError in a process that has loaded torch or vLLM, which would measure their memory."""
    if found := sorted({"torch", "vllm"} & sys.modules.keys()):
        raise RuntimeError(f"a process of simulated engines has loaded {', '.join(found)}")


class EngineProcess:
    """Several Generators with simulated engines in one process."""

    def __init__(
        self, names: Sequence[str], seeds: Sequence[int], config: Config, speeds: Speeds, lengths: Lengths,
        version: int,
    ) -> None:  # fmt: skip
        """
        Args:
            names: the Generators'.
            seeds: their engines'.
            version: of the weights that the engines have loaded.
        """
        most, recompute_kv = config.generator.max_num_seqs, config.weight_sync.recompute_kv
        self._generators = [
            Generator(
                name,
                SimulatedEngine(speeds, lengths, most, seed, recompute_kv),
                config.generator.slowdown_s,
                version,
            )
            for name, seed in zip(names, seeds, strict=True)
        ]

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of one Generator."""
        refuse_heavy_modules()
        return await getattr(self._generators[index], method)(*args)

    async def memory_bytes(self) -> int:
        """Return the resident memory of this process."""
        refuse_heavy_modules()
        return resident_bytes()


@dataclass(frozen=True)
class LogicalHandle:
    """One Generator of an EngineProcess, with the part of an actor handle that `Client` uses."""

    process: ActorHandle
    index: int

    def __getattr__(self, method: str) -> "LogicalMethod":
        if method.startswith("_"):  # pickle asks for such names before the fields are there
            raise AttributeError(method)
        return LogicalMethod(self, method)


@dataclass(frozen=True)
class LogicalMethod:
    """A method of one Generator of an EngineProcess."""

    handle: LogicalHandle
    name: str
    num_returns: int = 1

    def options(self, num_returns: int) -> "LogicalMethod":
        return LogicalMethod(self.handle, self.name, num_returns)

    def remote(self, *args: Any) -> Any:
        call = self.handle.process.call
        if self.num_returns != 1:
            call = call.options(num_returns=self.num_returns)
        return call.remote(self.handle.index, self.name, *args)


class AccountingLearner(SimulatedLearner):
    """A simulated Learner with its account in a file, which outlives its process."""

    def __init__(self, config: Config, speeds: Speeds, account_path: Path, version: int) -> None:
        self._account_path = account_path
        super().__init__(config, speeds, read_account(account_path, config), version)

    async def train_step(self, batch: TrainBatch) -> StepReport:
        try:
            return await super().train_step(batch)
        finally:
            partial = self._account_path.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(self._account))
            os.replace(partial, self._account_path)


def read_account(path: Path, config: Config) -> Account:
    """Return the account of a run so far."""
    if not path.exists():
        return Account(config.max_token_age)
    account: Account = pickle.loads(path.read_bytes())
    return account


def account_path(run: Path) -> Path:
    return run / "account.pickle"
