"""Retrying passes that run out of GPU memory, with smaller micro-batches."""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from grpo_ray.errors import OutOfDeviceMemory, RunError
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.sequences import TrainSequence

T = TypeVar("T")


class SmallerMicroBatches:
    """Halves `micro_batch_tokens` when a pass runs out of GPU memory, for the rest of the process.

    A gradient does not depend on the number, so a pass that starts over gives the gradient it would have given.
    One of several ranks cannot start over, because the others wait for it in the middle of theirs.
    """

    def __init__(self, forward_backward: ForwardBackward, num_ranks: int) -> None:
        self._passes, self._num_ranks = forward_backward, num_ranks
        self._reductions: list[str] = []

    def retry(self, compute: Callable[[Sequence[TrainSequence]], T], sequences: Sequence[TrainSequence]) -> T:
        """Compute on the sequences, again with half the tokens per micro-batch each time that memory runs out.

        Raises:
            RunError: memory ran out with one sequence per micro-batch.
            OutOfDeviceMemory: memory ran out, and there are several ranks.
        """
        while True:
            try:
                return compute(sequences)
            except RuntimeError as error:
                # NCCL and cuBLAS have errors of their own for it.
                if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
                    raise
                reason = str(error).partition("\n")[0]
            if self._num_ranks > 1 and self._passes.in_progress[0] != 1:
                raise OutOfDeviceMemory("learner", reason, self._passes.in_progress[1])
            # Only here, after the error, are the tensors of the failed pass unreferenced.
            gc.collect()
            torch.cuda.empty_cache()
            self._halve(reason)

    def _halve(self, reason: str) -> None:
        num_sequences, num_tokens = self._passes.in_progress
        if num_sequences <= 1:
            raise RunError(
                f"learner: out of GPU memory with a single sequence of {num_tokens} tokens per micro-batch "
                f"({reason}). Set learner.gradient_checkpointing to full, raise learner.num_ranks, set "
                "learner.moments to 8bit, lower sampling.max_tokens, or give the Learner a larger GPU"
            )
        old, self._passes.micro_batch_tokens = self._passes.micro_batch_tokens, num_tokens // 2
        self._reductions.append(
            f"out of GPU memory with {num_tokens} tokens, learner.micro_batch_tokens {old}; continues with "
            f"{self._passes.micro_batch_tokens} ({reason})"
        )

    def take_report(self) -> str | None:
        """Return what was reduced since the last call, None if nothing was."""
        reductions, self._reductions = self._reductions, []
        return "; ".join(reductions) or None
