"""The policy on a batch, one micro-batch after another: computing log-probabilities, accumulating gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import record_function

from grpo_ray.algorithms import (
    Objective,
    compute_entropy,
    effective_sample_fraction,
    effective_sample_sums,
    importance_weights,
    kl_sums,
    logprob_mismatch,
    loss_denominator,
    policy_gradient_step,
    token_log_probs,
)
from grpo_ray.config import Config
from grpo_ray.policy.microbatch import MicroBatch, TrainSequence, micro_batches
from grpo_ray.policy.model import PolicyModel
from grpo_ray.policy.response_logits import response_logits

Sums = dict[str, float]
LARGEST = "logprob_diff_max"  # the one sum that is a maximum
MISMATCH = ("mismatch_kl", LARGEST, "weight_sum", "weight_square_sum", "num_weights")


class ForwardBackward:
    """Forward and backward passes on sequences; the split into micro-batches does not change the results."""

    def __init__(self, config: Config, end_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._config, self._end_token_ids, self._device = config, end_token_ids, device
        self._dtype = getattr(torch, config.model.dtype)
        self._objective = Objective.from_config(config.algorithm)

    @property
    def needs_proximal(self) -> bool:
        """True if the objective uses the policy as it was before the first update on the batch."""
        algorithm = self._config.algorithm
        is_old = algorithm.old_log_probs == "proximal" and self._objective.needs_old_log_probs
        return is_old or algorithm.off_policy_correction != "none"

    def with_proximal(
        self, model: PolicyModel, sequences: Sequence[TrainSequence]
    ) -> tuple[list[TrainSequence], Sums]:
        """Add the model's current log-probabilities to the sequences; also return the sampler's mismatch."""
        found, sums = self._look_up(model, sequences, _mismatch_sums)
        return [replace(s, proximal_logprobs=found[index]) for index, s in enumerate(sequences)], sums

    def with_reference(self, reference: PolicyModel, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Add the reference's log-probabilities to the sequences."""
        found, _ = self._look_up(reference, sequences, lambda log_probs, batch: {})
        return [replace(s, reference_logprobs=found[index]) for index, s in enumerate(sequences)]

    @torch.no_grad()
    def _look_up(
        self,
        model: PolicyModel,
        sequences: Sequence[TrainSequence],
        measure: Callable[[torch.Tensor, MicroBatch], Sums],
    ) -> tuple[dict[int, np.ndarray], Sums]:
        """Return each response's log-probabilities by the sequence's index, and the sums of `measure`."""
        sums: Sums = defaultdict(float)
        found: dict[int, np.ndarray] = {}
        for indices, batch in self._batches(sequences):
            log_probs, _ = self._log_probs(model, batch)
            add(sums, measure(log_probs, batch))
            found |= zip(indices, _rows(log_probs, batch), strict=True)
        return found, sums

    def backward(self, model: PolicyModel, sequences: Sequence[TrainSequence]) -> Sums:
        """Add the gradient of one update on all of `sequences` to `.grad`; return summed metrics.

        Denominators count all sequences. Those without signal have no gradient from the policy-gradient loss,
        and are computed only if the objective has other terms.
        """
        config = self._config
        has_other_terms = config.algorithm.kl.coefficient or config.algorithm.entropy_bonus
        computed = [s for s in sequences if s.has_signal or has_other_terms]
        denominator = loss_denominator(
            config.algorithm.aggregation,
            len(sequences),
            sum(map(self._num_counted, sequences)),
            config.sampling.max_tokens,
        )
        if not denominator:  # the loss counts no token of any sequence
            computed = []
        sums: Sums = defaultdict(float, loss=0.0)
        for _, batch in self._batches([s for s in sequences if not s.has_signal and not has_other_terms]):
            if batch.reference_logprobs is not None:
                add(sums, self._measure_kl(model, batch))
        sums["trained_tokens"] = float(sum(len(s.response_token_ids) for s in computed))
        for _, batch in self._batches(computed):
            add(sums, self._backward(model, batch, denominator))
        return sums

    @torch.no_grad()
    def _measure_kl(self, model: PolicyModel, batch: MicroBatch) -> Sums:
        """Measure the distance to the reference on responses without signal, which have no backward pass."""
        assert batch.reference_logprobs is not None
        log_probs, _ = self._log_probs(model, batch)
        sums = kl_sums(log_probs, batch.reference_logprobs, batch.response_mask)
        return {name: value.item() for name, value in sums.items()} | {
            "kl_tokens": float(batch.response_mask.sum())
        }

    def _backward(self, model: PolicyModel, batch: MicroBatch, denominator: float) -> Sums:
        algorithm, mask = self._config.algorithm, batch.response_mask
        log_probs, logits = self._log_probs(model, batch)  # [batch, resp], [batch, resp, vocab]
        # None stored: this is the only update, so the current policy is the one before the first update.
        proximal = log_probs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        weights = None
        if algorithm.off_policy_correction != "none":
            weights = importance_weights(
                proximal,
                batch.behaviour_logprobs,
                mask,
                algorithm.off_policy_correction,
                algorithm.correction_cap,
                algorithm.correction_band,
            )
        with torch.set_grad_enabled(algorithm.entropy_bonus > 0):
            entropy = compute_entropy(logits)
        loss, counts = policy_gradient_step(
            log_probs,
            mask,
            objective=self._objective,
            denominator=denominator,
            advantages=batch.advantages,
            old_log_probs=proximal if algorithm.old_log_probs == "proximal" else batch.behaviour_logprobs,
            weights=weights,
            reference_log_probs=batch.reference_logprobs,
            entropy=entropy,
        )
        with record_function("backward"):
            torch.autograd.backward(loss)
        sums = {name: count.item() for name, count in counts.items()}
        sums["kl_tokens"] = sums["num_tokens"]
        sums |= {"loss": loss.item(), "entropy": entropy.detach()[mask].sum().item()}
        if batch.proximal_logprobs is None:
            sums |= _mismatch_sums(log_probs.detach(), batch)
        return sums

    def _log_probs(self, model: PolicyModel, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        sampling = self._config.sampling
        is_mixed = self._dtype != torch.float32
        with record_function("forward"), torch.autocast(self._device.type, self._dtype, enabled=is_mixed):
            logits = response_logits(
                model, batch, sampling.temperature, sampling.min_tokens, self._end_token_ids
            )
        return token_log_probs(logits, batch.labels), logits

    def _batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[list[int], MicroBatch]]:
        for indices, batch in micro_batches(sequences, self._config.learner.micro_batch_tokens):
            yield indices, batch.to(self._device)

    def _num_counted(self, sequence: TrainSequence) -> int:
        """Count the response tokens in the loss: a ratio needs a finite old logprob."""
        if self._objective.needs_old_log_probs and self._config.algorithm.old_log_probs == "behaviour":
            return int(np.isfinite(sequence.behaviour_logprobs).sum())
        return len(sequence.response_token_ids)


def add(sums: Sums, more: Mapping[str, float]) -> None:
    """Add `more` to `sums` in place; of `LARGEST` keep the maximum."""
    for name, value in more.items():
        # np.maximum keeps a nan, Python's max would lose it.
        sums[name] = float(np.maximum(sums[name], value)) if name == LARGEST else sums[name] + value


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of a step from its sums over micro-batches and updates."""
    got: Mapping[str, float] = defaultdict(float, sums)
    tokens, compared = max(1.0, got["num_tokens"]), max(1.0, got["num_weights"])
    metrics = {
        "loss/clip_frac": got["num_clipped"] / tokens,
        "policy/entropy": got["entropy"] / max(1.0, got["trained_tokens"]),
        "mismatch/kl": got["mismatch_kl"] / compared,
        "mismatch/logprob_diff/max": got[LARGEST],
        "mismatch/ess_frac": effective_sample_fraction(
            got["weight_sum"], got["weight_square_sum"], got["num_weights"]
        ),
    }
    if "kl_k1_sum" in sums:
        measured = max(1.0, got["kl_tokens"])
        metrics |= {"loss/kl_ref": got["kl_k1_sum"] / measured, "loss/kl_ref_k3": got["kl_k3_sum"] / measured}
    return metrics


def _mismatch_sums(log_probs: torch.Tensor, batch: MicroBatch) -> Sums:
    mismatch = logprob_mismatch(log_probs, batch.behaviour_logprobs, batch.response_mask)
    sample = effective_sample_sums(log_probs, batch.behaviour_logprobs, batch.response_mask)
    return {
        "mismatch_kl": mismatch["kl_sum"].item(),
        LARGEST: mismatch["abs_diff_max"].item(),
        **{name: value.item() for name, value in sample.items()},
    }


def _rows(log_probs: torch.Tensor, batch: MicroBatch) -> list[np.ndarray]:
    """Return each response's tokens without padding, as float32 on the host."""
    values, mask = log_probs.float().cpu().numpy(), batch.response_mask.cpu().numpy()
    return [row[kept] for row, kept in zip(values, mask, strict=True)]
