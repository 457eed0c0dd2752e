"""One step of training, in two ways: the Learner's own code, and what one would write first in its place."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from grpo_ray.config import Config
from grpo_ray.config.loading import make_config
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.optimizer import make_optimizer
from grpo_ray.learning.policy_model import compile_blocks, recompute_in_backward
from grpo_ray.learning.sequences import TrainSequence

BASE = {
    "model": {"tiny": {}, "dtype": "bfloat16"},  # the page builds its own models, of any size
    "task": {"kind": "sorting"},
    "sampling": {"min_tokens": 0, "max_tokens": 1_000_000},
}


def step_config(device: torch.device, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the Learner on `device`, with the given changes."""
    on_gpu = int(device.type == "cuda")
    devices = [f"learner.num_gpus={on_gpu}", f"generator.num_gpus={on_gpu}"]
    return make_config(BASE, [*devices, *overrides], "the page's configuration")


class LearnerStep:
    """A step as `core/learner.py` takes it, from the same parts of `grpo_ray.learning`."""

    def __init__(self, model: Qwen2ForCausalLM, config: Config, device: torch.device) -> None:
        recompute_in_backward(model, config.learner.gradient_checkpointing)
        if config.learner.compile:
            compile_blocks(model)
        self._model, self._learner = model, config.learner
        self.masters = MasterWeights(model, getattr(torch, config.model.dtype))
        self._optimizer = make_optimizer(self.masters.parameters, config.learner)
        self._forward_backward = ForwardBackward(config, (), device)
        self.notes: dict[str, str] = {}  # of the layout, as a run's events have them
        self.kernel: str | None = None  # that computed attention
        self.sums: dict[str, float] = {}

    def log_probs(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        """Return each response's log-probabilities, float32 on the CPU."""
        found = self._forward_backward.with_proximal(self._model, sequences)
        return [torch.from_numpy(sequence.proximal_logprobs) for sequence in found]

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> None:
        """Compute the gradient of one update."""
        self._optimizer.zero_grad()
        self.sums = dict(self._forward_backward.backward(self._model, sequences))
        self.notes |= self._forward_backward.take_layout_notes()
        self.kernel = self._forward_backward.attention_kernel

    def update(self) -> None:
        """Clip the gradient and update the weights."""
        torch.nn.utils.clip_grad_norm_(self.masters.parameters, self._learner.max_grad_norm)
        self._optimizer.step()
        self.masters.refresh()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.masters.named.items() if p.grad is not None}


class PlainStep:
    """A step of transformers and torch alone: padded rows under autocast, one tensor of logits, log_softmax.

    Its loss is the Learner's with `loss: reinforce_with_baseline`, and costs what any other costs.
    """

    def __init__(
        self, model: Qwen2ForCausalLM, device: torch.device, dtype: torch.dtype, micro_batch_tokens: int,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable()
        self._model, self._device, self._dtype = model, device, dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        """Return each response's log-probabilities, float32 on the CPU."""
        return [row.float().cpu() for rows in self._micro_batches(sequences) for row in self._rows(rows)]

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> None:
        """Compute the gradient: the mean over responses of each response's mean of -advantage * logprob."""
        self._optimizer.zero_grad()
        for rows in self._micro_batches(sequences):
            means = zip(rows, map(torch.mean, self._rows(rows)), strict=True)
            losses = [-torch.as_tensor(s.advantage) * mean for s, mean in means]
            (torch.stack(losses).sum() / len(sequences)).backward()

    def update(self) -> None:
        """Clip the gradient and update the weights."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[Sequence[TrainSequence]]:
        rows = max(1, self._micro_batch_tokens // max(map(len, sequences)))
        for first in range(0, len(sequences), rows):
            yield sequences[first : first + rows]

    def _rows(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        """Return the log-probabilities of each response's tokens."""
        ids = [torch.tensor([*s.prompt_token_ids, *s.response_token_ids.tolist()]) for s in sequences]
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self._device)
        is_mixed = self._dtype != torch.float32
        with torch.autocast(self._device.type, self._dtype, enabled=is_mixed):
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        log_probs = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        starts = [len(s.prompt_token_ids) - 1 for s in sequences]
        return [
            row[start : start + len(s.response_token_ids)]
            for row, start, s in zip(log_probs, starts, sequences, strict=True)
        ]
