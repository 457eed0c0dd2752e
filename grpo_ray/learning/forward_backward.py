"""The policy on a batch, one micro-batch after another: computing log-probabilities, accumulating gradients."""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from torch.profiler import record_function

from grpo_ray.config import Config
from grpo_ray.learning.layout import Layout, choose_layout
from grpo_ray.learning.microbatch import MicroBatch, Pass, deal, imbalance
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sequences import TrainSequence, lengths_of, plan, samples_of
from grpo_ray.objectives import SELECTIONS, CorrectionInputs, Objective, loss_denominator, policy_gradient_step
from grpo_ray.objectives.aggregation import gradient_sums
from grpo_ray.objectives.checking import acts_without_advantage
from grpo_ray.objectives.correction import correction_sums
from grpo_ray.objectives.kl import kl_sums, mismatch_sums, teacher_term
from grpo_ray.objectives.objective import EntropyBonus
from grpo_ray.watch.flops import ModelSize, WorkCount, num_tokens
from grpo_ray.watch.learner_metrics import Sums, add

MISMATCH = (
    "mismatch_kl", "logprob_diff_max", "weight_sum", "weight_square_sum", "num_weights", "after_switch_kl",
    "num_after_switch",
)  # fmt: skip


class ForwardBackward:
    """Forward and backward passes on sequences; the split into micro-batches does not change the results."""

    def __init__(
        self, config: Config, end_token_ids: tuple[int, ...], device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self._config, self._end_token_ids, self._device = config, end_token_ids, device
        self._ranks = ranks or Ranks()
        self._objective = Objective.from_config(config.algorithm)
        self.entropy_bonus = EntropyBonus(config.algorithm)
        self._layout: Layout | None = None  # chosen in the first pass, when the model is on the device
        self._layout_notes: dict[str, str] = {}
        self.micro_batch_tokens = config.learner.micro_batch_tokens
        self.in_progress = (0, 0)  # the sequences and tokens of the latest micro-batch
        self.num_micro_batches = 0  # computed so far
        self.work = WorkCount()
        self.imbalance = 1.0  # of the latest passes' costs over the ranks

    @property
    def needs_proximal(self) -> bool:
        """True if the objective uses the policy as it was before the first update on the batch."""
        algorithm = self._config.algorithm
        is_old = algorithm.old_log_probs == "proximal" and self._objective.needs_old_log_probs
        return is_old or bool(algorithm.corrections)

    @cached_property
    def _acts_without_advantage(self) -> bool:
        # Not before the first backward pass: commands that only look log-probabilities up run no user's loss.
        return acts_without_advantage(self._objective)

    @property
    def attention_kernel(self) -> str | None:
        """The name of the kernel that computes attention; None before the first pass."""
        return None if self._layout is None else self._layout.kernel

    def take_layout_notes(self) -> dict[str, str]:
        """Return once what `choose_layout` says of the layout."""
        notes, self._layout_notes = self._layout_notes, {}
        return notes

    def with_proximal(self, model: PolicyModel, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Add the model's current log-probabilities to the sequences, and its entropies for a selection."""
        found, selects = self._look_up(model, sequences), self.selects_tokens
        return [
            replace(s, proximal_logprobs=found[n][0], entropies=found[n][1] if selects else None)
            for n, s in enumerate(sequences)
        ]

    @property
    def selects_tokens(self) -> bool:
        """True if tokens are chosen over the whole batch."""
        return self._objective.selection != "none"

    def with_selection(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Add the token selection's weights and penalties to sequences that `with_proximal` returned."""
        if not self.selects_tokens or not sequences:
            return sequences
        log_probs = np.concatenate([s.proximal_logprobs for s in sequences if s.proximal_logprobs is not None])
        entropies = np.concatenate([s.entropies for s in sequences if s.entropies is not None])
        advantages = np.concatenate([self._first_advantages(s) for s in sequences])
        seed = 0  # of the tokens, as log-probabilities differ in their rounding between numbers of ranks
        for s in sequences:
            seed = zlib.crc32(np.asarray(s.response_token_ids).tobytes(), seed)
        select, rng = SELECTIONS[self._objective.selection], np.random.default_rng(seed)
        options = self._objective.selection_options
        chosen = select(log_probs, entropies, advantages, rng, **options)
        ends = np.cumsum([s.num_sampled for s in sequences])[:-1]
        own = zip(sequences, *(np.split(values, ends) for values in chosen), strict=True)
        return [replace(s, token_weights=w, token_penalties=p) for s, w, p in own]

    def _first_advantages(self, s: TrainSequence) -> np.ndarray:
        """Return each token's advantage before the first update, with a teacher's term."""
        given = np.broadcast_to(s.advantage, s.num_sampled)
        if self._config.distillation.teacher is None or s.teacher_logprobs is None:
            return given
        values = torch.tensor(given), torch.tensor(s.teacher_logprobs), torch.tensor(s.proximal_logprobs)
        taught: np.ndarray = self._taught(*values).numpy()
        return taught

    def _taught(
        self, advantages: torch.Tensor, teacher: torch.Tensor | None, policy: torch.Tensor
    ) -> torch.Tensor:
        """Add the teacher's term to the advantages, or put it in their place."""
        distillation = self._config.distillation
        assert teacher is not None, "with a teacher, no group enters the buffer without them"
        term = distillation.coefficient * teacher_term(teacher, policy, distillation.max_gap)
        return advantages + term if distillation.use_reward else term

    def with_reference(self, reference: PolicyModel, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Add the reference's log-probabilities to the sequences."""
        found = self._look_up(reference, sequences)
        return [replace(s, reference_logprobs=found[index][0]) for index, s in enumerate(sequences)]

    def _look_up(
        self, model: PolicyModel, sequences: Sequence[TrainSequence]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return log-probabilities and entropies of each sequence's sampled tokens by its index."""
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for indices, batch in self._batches(model, sequences):
            with torch.set_grad_enabled(self._config.learner.compile):  # another graph rounds differently
                rows = [_rows(values.detach(), batch) for values in self._log_probs(model, batch)]
            if indices:
                found |= zip(indices, zip(*rows, strict=True), strict=True)
        self._ranks.end_lookup(model)
        self.work.flops += ModelSize.of(model).forward_flops(lengths_of(sequences))
        if self._ranks.size == 1:
            return found
        sent = [
            (index, log_probs.tobytes(), entropy.tobytes()) for index, (log_probs, entropy) in found.items()
        ]
        return {
            index: (_floats(log_probs), _floats(entropy))
            for of_rank in self._ranks.gathered(sent)
            for index, log_probs, entropy in of_rank
        }

    def backward(self, model: PolicyModel, sequences: Sequence[TrainSequence]) -> Sums:
        """Add the gradient of one update on all of `sequences` to `.grad`; return summed metrics.

        Denominators count all samples. Sequences without signal have no gradient from the policy-gradient loss,
        and are computed only if the objective has other terms, or the loss a term of its own there.
        """
        config = self._config
        has_other_terms = (
            config.algorithm.kl.loss_coefficient or self.entropy_bonus.weight or self._acts_without_advantage
        )
        aggregation, max_tokens = self._objective.aggregation, config.sampling.max_tokens
        is_of_prompts = aggregation == "prompt_mean"
        num_samples = len(samples_of(sequences))
        units = samples_of(sequences, by_prompt=is_of_prompts)  # of one mean each
        counts_of = [sum(map(self._num_counted, unit)) for unit in units]
        denominator = loss_denominator(aggregation, num_samples, sum(counts_of), max_tokens, len(units))
        if is_of_prompts or len(units) < len(sequences):  # one unit may be in different micro-batches
            counted = zip(units, counts_of, strict=True)
            sequences = [replace(s, sample_tokens=num) for unit, num in counted for s in unit]
        # Without a denominator the loss counts no token of any sequence.
        computed = [s for s in sequences if denominator and (s.has_signal or has_other_terms)]
        omitted = [s for s in sequences if not (s.has_signal or has_other_terms)]
        measured = [s for s in omitted if s.reference_logprobs is not None or self._steers_entropy]
        # On the device until the end, so that no micro-batch waits for the one before it.
        found = [self._measure(model, batch) for _, batch in self._batches(model, measured)]
        counts: Sums = {"loss": 0.0}
        for indices, batch in self._batches(model, computed):
            found.append(self._backward(model, batch, denominator))
            add(counts, _sizes(batch) if indices else {})
        size, lengths = ModelSize.of(model), lengths_of(computed)
        self.work.flops += size.forward_flops(lengths_of(measured)) + size.training_flops(lengths)
        self.work.trained_tokens += num_tokens(lengths)
        total: Sums = {}
        for of_rank in self._ranks.gathered({**counts, **_total(found)}):
            add(total, of_rank)
        return {**total, "trained_tokens": float(sum(s.num_sampled for s in computed))}

    @torch.no_grad()
    def _measure(self, model: PolicyModel, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Measure responses without signal, which have no backward pass: the KL to a reference, the entropy."""
        log_probs, entropy = self._log_probs(model, batch)
        sums: dict[str, torch.Tensor] = {}
        if batch.reference_logprobs is not None:
            mask = self._loss_mask(batch)
            sums |= kl_sums(log_probs, batch.reference_logprobs, mask) | {"kl_tokens": mask.sum()}
        return sums | self._entropy_sums(entropy, batch)

    @property
    def _steers_entropy(self) -> bool:
        return self._config.algorithm.entropy_target is not None

    def _entropy_sums(self, entropy: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Sum the entropies of tokens with an advantage; with a target, of all that the bonus acts on."""
        mask = self._loss_mask(batch) if self._steers_entropy else batch.advantage_mask
        return {"entropy": entropy.detach().masked_fill(~mask, 0.0).sum(), "entropy_tokens": mask.sum()}

    @property
    def omits_without_behaviour(self) -> bool:
        """True if a token without a finite logprob of the sampler has no ratio, and so is not in the loss."""
        return self._objective.needs_old_log_probs and self._config.algorithm.old_log_probs == "behaviour"

    def _loss_mask(self, batch: MicroBatch) -> torch.Tensor:
        """Return the tokens in the loss, bool `[batch, resp]`."""
        mask = batch.response_mask
        return mask & batch.behaviour_logprobs.isfinite() if self.omits_without_behaviour else mask

    def _backward(self, model: PolicyModel, batch: MicroBatch, denominator: float) -> dict[str, torch.Tensor]:
        algorithm, mask = self._config.algorithm, batch.response_mask
        log_probs, entropy = self._log_probs(model, batch)  # [batch, resp]
        # None stored: this is the only update, so the current policy is the one before the first update.
        proximal = log_probs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        if self._config.distillation.teacher is not None:
            advantages = self._taught(batch.advantages, batch.teacher_logprobs, log_probs.detach())
            batch = replace(batch, advantages=advantages)
        weights, measured = self._weights(proximal, log_probs.detach(), batch)
        loss, counts = policy_gradient_step(
            log_probs,
            mask,
            objective=replace(self._objective, entropy_bonus=self.entropy_bonus.weight),
            denominator=denominator,
            advantages=batch.advantages,
            old_log_probs=proximal if algorithm.old_log_probs == "proximal" else batch.behaviour_logprobs,
            weights=weights,
            reference_log_probs=batch.reference_logprobs,
            entropy=entropy,
            row_tokens=batch.sample_tokens,
            penalties=batch.token_penalties,
        )
        log_probs.retain_grad()
        with record_function("backward"):
            torch.autograd.backward(loss)
        is_plain = self._objective.has_plain_gradient and batch.token_penalties is None
        if log_probs.grad is not None and is_plain:
            aggregated = self._objective.aggregation, denominator, batch.sample_tokens
            counts |= gradient_sums(
                log_probs.grad, self._loss_mask(batch), batch.advantages, *aggregated, weights
            )
        counts |= measured | _mismatch_sums(proximal, batch) | self._entropy_sums(entropy, batch)
        return counts | {"kl_tokens": counts["num_tokens"], "loss": loss.detach()}

    def _weights(
        self, proximal: torch.Tensor, current: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return the factors of the token losses, None if all are 1, and sums of the corrections' weights."""
        if not self._objective.corrections:
            return batch.token_weights, {}
        inputs = CorrectionInputs.of(
            proximal, batch.behaviour_logprobs, batch.response_mask, batch.advantages, current
        )
        weights, is_limited = self._objective.correction_weights(inputs)
        sums = correction_sums(weights, is_limited, inputs.mask & batch.advantage_mask)
        return weights if batch.token_weights is None else weights * batch.token_weights, sums

    def _log_probs(self, model: PolicyModel, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._layout is not None
        with record_function("forward"):
            return self._ranks.forward(model, self._layout.log_probs, model, batch)

    def _batches(
        self, model: PolicyModel, sequences: Sequence[TrainSequence]
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this rank's micro-batches and the indices of their sequences; none for a repetition.

        Each is made while the one before it runs. Every rank yields as many.
        """
        if self._layout is None:
            self._layout, self._layout_notes = choose_layout(
                model, self._config, self._end_token_ids, self._ranks
            )
        layout, on_gpu = self._layout, self._device.type == "cuda"

        def make(planned: Pass) -> MicroBatch:
            batch = layout.collate([sequences[index] for index in planned.indices])
            if not planned.counts:
                batch = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
            return batch.pinned() if on_gpu else batch

        planned = self._dealt(model, sequences)
        with ThreadPoolExecutor(1) as beside:
            made = beside.submit(make, planned[0]) if planned else None
            for each, following in itertools.zip_longest(planned, planned[1:]):
                assert made is not None
                made_batch = made.result()
                self.in_progress = len(each.indices), made_batch.input_ids.numel()
                batch = made_batch.to(self._device)
                made = beside.submit(make, following) if following else None
                yield each.indices if each.counts else [], batch
                self.num_micro_batches += 1

    def _dealt(self, model: PolicyModel, sequences: Sequence[TrainSequence]) -> list[Pass]:
        """Return this rank's passes, checked to be a part of the same plan on all ranks."""
        assert self._layout is not None
        planned = partial(plan, sequences, shares_prompts=self._layout.shares_prompts)
        if self._ranks.size == 1:
            return [Pass(indices) for indices in planned(self.micro_batch_tokens)]
        size = ModelSize.of(model)

        def cost(indices: list[int]) -> float:
            return size.forward_flops(lengths_of([sequences[index] for index in indices]))

        dealt = deal(planned, self.micro_batch_tokens, self._ranks.size, cost)
        self._ranks.agree("their micro-batches", zlib.crc32(repr(dealt).encode()))
        self.imbalance = imbalance(dealt, cost)
        return dealt[self._ranks.rank]

    def _num_counted(self, sequence: TrainSequence) -> int:
        """Count the sampled tokens in the loss: a ratio needs a finite old logprob."""
        if self.omits_without_behaviour:
            return int(np.isfinite(sequence.behaviour_logprobs).sum())
        return sequence.num_sampled


def _total(found: Sequence[Mapping[str, torch.Tensor]]) -> Sums:
    """Add up scalars of micro-batches, as `add` does; the device is waited for once."""
    values = [value.double() for scalars in found for value in scalars.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())
    total: Sums = {}
    for scalars in found:
        add(total, {name: next(numbers) for name in scalars})
    return total


def _sizes(batch: MicroBatch) -> Sums:
    """Return the tokens that go through the model's layers."""
    return {
        "computed_tokens": float(batch.input_ids.numel()),
        "prompt_tokens": float(batch.num_prompt_tokens),
        "padding_tokens": float(batch.num_padding_tokens),
    }


def _mismatch_sums(first: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Compare the policy before the first update with the sampler, on tokens with an advantage."""
    given, mask = (first, batch.behaviour_logprobs), batch.advantage_mask
    later = mismatch_sums(*given, mask & batch.after_switch)
    of_later = {"after_switch_kl": later["mismatch_kl"], "num_after_switch": later["num_weights"]}
    return mismatch_sums(*given, mask) | of_later


def _floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32).copy()


def _rows(log_probs: torch.Tensor, batch: MicroBatch) -> list[np.ndarray]:
    """Return the values of each row's sampled tokens, as float32 on the host."""
    values, mask = log_probs.float().cpu().numpy(), batch.response_mask.cpu().numpy()
    return [row[kept] for row, kept in zip(values, mask, strict=True)]
