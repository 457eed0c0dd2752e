"""`grpo-ray` with faults that only the process itself can cause; profiling/chaos/chaos.py starts it.

    python profiling/chaos/chaos_driver.py train CONFIG [section.key=value ...]    or    resume RUN

A file in the folder GRPO_RAY_CHAOS_TRIGGERS requests one fault and is removed as the fault happens:
`poison_reward` (the grading of one response fails), `scorer_error` (the scoring of one group raises),
`nan_gradient` (the gradient of one update is NaN), `hang_generator_start` and `hang_scorer_start` (the next one
hangs as it starts), `kill_rank_1_backward` and the like (the Learner's rank 1 is killed in its next backward
pass; `stop` stops it, `oom` raises that memory ran out; chaos_moment_faults.py has the stages),
`kill_sync_load` and the like (a Generator is killed in that phase of a sync; `stop` stops it, `fail` raises),
`flip_sync_bits` (the weights that arrive do not fit their checksum), `poison_prompt` (one training prompt ends
its Generator, each time, until the file is removed), `kill_learner_sending` (the Learner is killed between two
chunks of a version that it sends over a wire) and `drop_wire_sending` (the wire is closed there). As long as
there is a file `clock` next to that folder, `time.time` is ahead by the seconds in it.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from chaos_episodes import FOREVER_S, is_poisoned, is_requested, triggers

from grpo_ray.cluster import kinds
from grpo_ray.config import Config
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer
from grpo_ray.engines.base import Engine
from grpo_ray.learning import training_state
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.rewards.base import ScoringError
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.isolation import processes
from grpo_ray.tools.cli import main
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.types import PromptItem, RolloutGroup, SamplingSettings, StepReport, Verdict


def _follow_clock() -> None:
    """Let this process's wall clock jump with the file `clock`."""
    clock, now = triggers().parent / "clock", time.time

    def jumping() -> float:
        try:
            return now() + float(clock.read_text())
        except (OSError, ValueError):  # there is none, or it is being written
            return now()

    time.time = jumping


class ChaosGrader(Grader):
    def grade(self, task: str, pairs: Sequence[tuple[str, str]], item: Any = None) -> list[Any]:
        results = super().grade(task, pairs, item)
        if is_requested("poison_reward"):
            results[0] = ScoringError("chaos: the grading of this response fails")
        return results


class ChaosScorer(Scorer):
    def __init__(self, config: Config, secrets: Mapping[str, str]) -> None:
        _follow_clock()
        if is_requested("hang_scorer_start"):
            time.sleep(FOREVER_S)
        processes.START_TIMEOUT_S = 10  # a fork server that hangs is replaced before the stall watch looks
        super().__init__(config, secrets)
        self._grader.__class__ = ChaosGrader  # a second one would have a fork server of its own

    def _score(self, group: RolloutGroup) -> Verdict:
        if is_requested("scorer_error"):
            raise OSError(errno.EMFILE, "chaos: too many open files")
        return super()._score(group)


class PhasedEngine:
    """An engine that a fault may hit as it begins a phase of a sync."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, method: str) -> Any:
        if method in ("pause", "load", "finish", "resume"):
            _in_phase(method)
        return getattr(self._engine, method)


class ChaosGenerator(Generator):
    def __init__(self, name: str, engine: Engine, slowdown_s: float = 0.0, version: int = 0) -> None:
        _follow_clock()
        if is_requested("hang_generator_start"):
            time.sleep(FOREVER_S)
        super().__init__(name, cast(Engine, PhasedEngine(engine)), slowdown_s, version)

    async def generate(self, item: PromptItem, settings: SamplingSettings) -> tuple[RolloutGroup, int]:
        if settings.num_samples > 1 and is_poisoned(item.prompt):  # one sample is a validation's
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(item, settings)

    async def stage_weights(self, snapshot: WeightSnapshot) -> None:
        _in_phase("stage")
        if is_requested("flip_sync_bits"):
            # With wires the bytes come later: another checksum is as wrong as other bytes.
            snapshot = replace(snapshot, checksum=(snapshot.checksum or 0) ^ 1)
        await super().stage_weights(snapshot)


def _in_phase(phase: str) -> None:
    """Suffer the fault that is requested for a Generator in this phase of a sync, if one is."""
    if is_requested(f"kill_sync_{phase}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_requested(f"stop_sync_{phase}"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_requested(f"fail_sync_{phase}"):
        raise OSError(errno.EIO, f"chaos: {phase} fails")


class ChaosLearner(Learner):
    def __init__(self, *args: Any) -> None:
        _follow_clock()
        super().__init__(*args)
        block: Any = self.model.model.layers[-1]
        block.register_forward_hook(self._in_block)
        self._optimizer.register_step_pre_hook(lambda *_: self._at("optimizer"))
        gathered_weights = vars(training_state)["gathered_weights"]

        def gathered(*args: Any) -> Any:
            self._at("write_model")
            return gathered_weights(*args)

        vars(training_state)["gathered_weights"] = gathered

    def _at(self, stage: str) -> None:
        """Suffer the fault that is requested for this rank at this stage, if one is."""
        suffix = f"rank_{self._ranks.rank}_{stage}"
        for kind, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            if is_requested(f"{kind}_{suffix}"):
                os.kill(os.getpid(), number)
        if is_requested(f"oom_{suffix}"):
            raise torch.OutOfMemoryError(f"chaos: out of memory in {stage}")

    def _in_block(self, _module: object, _args: object, output: Any) -> None:
        self._at("forward")
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._at("backward"))

    def accumulate_gradient(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        sums = super().accumulate_gradient(sequences)
        if is_requested("nan_gradient"):
            weights = next(self.model.parameters())
            weights.grad = torch.full_like(weights, float("nan"))
        return sums

    def snapshot(self) -> tuple[WeightSnapshot, int]:
        self._at("snapshot")
        return super().snapshot()

    def send(self, name: str, version: int) -> None:
        """Over a wire: suffer a fault once the header is sent, in the middle of the transfer."""
        channel = self._packer.sender._channels[name][1]
        send = channel.send

        def counted(part: torch.Tensor, timeout_s: float) -> None:
            send(part, timeout_s)
            if is_requested("kill_learner_sending"):
                os.kill(os.getpid(), signal.SIGKILL)
            if is_requested("drop_wire_sending"):
                self.drop_wire(name)

        channel.send = counted  # type: ignore[method-assign]
        try:
            super().send(name, version)
        finally:
            channel.send = send  # type: ignore[method-assign]

    def capture(self) -> StepReport | None:
        self._at("capture")
        return super().capture()

    def write_captured(self, folder: Path) -> dict[str, int]:
        self._at("write_shards")
        return super().write_captured(folder)


if __name__ == "__main__":  # classes of __main__ travel to the actors by value
    _follow_clock()
    for kind, place in (("SCORER", ChaosScorer), ("LEARNER", ChaosLearner), ("GENERATOR", ChaosGenerator)):
        setattr(kinds, kind, replace(getattr(kinds, kind), place=place))
    sys.exit(main())
