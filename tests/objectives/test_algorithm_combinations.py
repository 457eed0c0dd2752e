"""Every loss in every combination against slow loops per token, written from the papers' formulas.

Tensors are in float64, whole updates of a small model in float32. A sample of the combinations runs always, all
of them with `make campaign`.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, changed, clip_range, gradient, perturb, relative_difference
from episode_batches import Turn, random_batch, rows_of_turns, slow_gradient, teach
from slow_objectives import slow_kl, slow_loss, slow_total

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig, KLEstimator
from grpo_ray.config.losses import RATIO_LOSSES, Aggregation, LossType
from grpo_ray.core.learner import Learner
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import Objective, kl_estimate, loss_denominator, policy_gradient_step
from grpo_ray.types import ScoredGroup

LOSSES, AGGREGATIONS = get_args(LossType), get_args(Aggregation)
MAX_TOKENS = 8

FEATURES = ("factors", "turns", "branches", "masked", "empty", "terms", "micro_batches")
SUBSETS = [s for size in range(len(FEATURES) + 1) for s in itertools.combinations(FEATURES, size)]
ESTIMATORS = get_args(KLEstimator)
LENGTHS = (5, 2, 1, 4, 3, 5)
ROWS = range(len(LENGTHS))
PROMPT_OF_SAMPLE = {True: (0, 0, 1), False: (0, 0, 0, 1, 1, 1)}  # with branches, and without


class Batch:
    """Six ragged rows: six responses, or with `branches` three samples of one to three rows.

    Whatever is per token is NaN outside the mask.
    """

    def __init__(self, features: Sequence[str], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.old = -3 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
        shift = torch.tensor([0.5, -0.5, 0.0, 0.0, -0.2, 0.2])[:, None]  # of whole responses
        self.policy = (self.old + 0.3 * noise(6, 5) + shift).clamp(max=-0.02)
        self.mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
        self.advantages = noise(6, 5 if "turns" in features else 1)
        self.factors = torch.ones(6, 5, dtype=torch.float64)
        self.reference, self.entropy = self.old + 0.3 * noise(6, 5), noise(6, 5).square()
        if "factors" in features:
            self.factors = 2 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
            self.factors[0, 1] = self.factors[3, 0] = 0.0  # dropped tokens
        if "masked" in features:
            self.old[0, 3], self.old[5, 0] = -torch.inf, torch.nan
            self.mask[3, 1] = False
        if "empty" in features:
            self.mask[2] = False
        for values in (self.old, self.policy, self.factors, self.reference, self.entropy):
            values[~self.mask] = torch.nan
        has_branches = "branches" in features
        self.samples = [[0, 1], [2], [3, 4, 5]] if has_branches else [[row] for row in ROWS]
        self.prompts = PROMPT_OF_SAMPLE[has_branches]
        self.parts = [[0], [1, 2, 5], [3, 4]] if "micro_batches" in features else [list(ROWS)]
        self.terms: dict[str, Any] = {}
        if "terms" in features:
            kl = {"reference": "initial", "coefficient": 0.5, "estimator": ESTIMATORS[seed % len(ESTIMATORS)]}
            self.terms = {"kl": kl, "entropy_bonus": 0.1}

    def kept(self, config: AlgorithmConfig) -> torch.Tensor:
        has_ratio = config.loss in RATIO_LOSSES or (self.terms and config.kl.estimator == "unbiased")
        return self.mask & self.old.isfinite() if has_ratio else self.mask


DIVERGENCE = {"delta_high": 0.05, "cap": 1.1, "kl_tau": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo_clip": {"cliprange_high": 0.3, "dual_clip": 1.3},
    **{name: {"cliprange_high": 0.3} for name in ("gspo", "luspo", "cispo", "gmpo")},
    "dppo_tv": {"loss_options": {"delta": 0.1, **DIVERGENCE}},
    "dppo_kl": {"loss_options": {"delta": 0.01, **DIVERGENCE}},
    "ipo": {"loss_options": {"delta": 0.1, "cap": 1.1, "kl_tau": 0.3}},
    "sapo": {"loss_options": {"tau": 2.0, "tau_negative": 0.5}},
    "vespo": {"loss_options": {"k": 1.0, "decay": 2.0, "k_negative": 0.5, "decay_negative": 1.5}},
}

Result = tuple[float, torch.Tensor, int]  # the loss, its gradient, the number of clipped tokens


def fast_gradient(config: AlgorithmConfig, batch: Batch) -> Result:
    """Compute by the package, part by part."""
    objective, aggregation = Objective.from_config(config), config.loss_aggregation
    counts = batch.kept(config).sum(dim=1)
    row_tokens = torch.zeros(6, dtype=torch.int64)
    for sample, rows in enumerate(batch.samples):
        own = [sample]
        if aggregation == "prompt_mean":
            own = [s for s, prompt in enumerate(batch.prompts) if prompt == batch.prompts[sample]]
        row_tokens[rows] = counts[[row for s in own for row in batch.samples[s]]].sum()
    num_samples, num_prompts = len(batch.samples), len(set(batch.prompts))
    denominator = loss_denominator(aggregation, num_samples, int(counts.sum()), MAX_TOKENS, num_prompts)
    total, sums = 0.0, Counter[str]()
    leaves = [tensor.clone().requires_grad_() for tensor in (batch.policy, batch.entropy)]
    for rows in batch.parts:
        policy, entropy = (leaf[rows] for leaf in leaves)
        loss, of_part = policy_gradient_step(
            policy, batch.mask[rows], objective=objective, denominator=denominator,
            advantages=batch.advantages[rows], old_log_probs=batch.old[rows], weights=batch.factors[rows],
            reference_log_probs=batch.reference[rows], entropy=entropy, row_tokens=row_tokens[rows],
        )  # fmt: skip
        loss.backward()
        total += loss.item()
        assert not any(value.requires_grad for value in of_part.values())
        sums.update({name: value.item() for name, value in of_part.items()})
    assert sums["num_tokens"] == counts.sum()
    kept = [tensor[batch.kept(config)] for tensor in (batch.policy, batch.reference)]
    for estimator in ("k1", "k3"):
        assert sums[f"kl_{estimator}_sum"] == pytest.approx(kl_estimate(*kept, estimator).sum().item())
    slopes = [torch.zeros(6, 5) if leaf.grad is None else leaf.grad for leaf in leaves]
    assert not any(slope[~batch.kept(config)].any() for slope in slopes)
    return total, torch.stack(slopes), sums["num_clipped"]


def loop_gradient(config: AlgorithmConfig, batch: Batch) -> Result:
    """Compute by a loop over samples, rows and tokens."""
    leaves = [tensor.clone().requires_grad_() for tensor in (batch.policy, batch.entropy)]
    policy, entropy = leaves
    advantages, kept = batch.advantages.expand(6, 5), batch.kept(config)
    per_sample, num_clipped = [], 0
    for rows in batch.samples:
        losses: list[Any] = []
        for row in rows:
            places = [t for t in range(5) if kept[row, t]]
            values = list(policy[row]), batch.old[row].tolist(), advantages[row].tolist()
            of_row, clipped = slow_loss(config, *values, places)
            num_clipped += clipped
            for t in places:
                loss = batch.factors[row, t].item() * of_row[t]
                if batch.terms:
                    of_others = batch.reference[row, t].item(), batch.old[row, t].item()
                    loss = loss + 0.5 * slow_kl(config.kl.estimator, policy[row, t], *of_others)
                    loss = loss - 0.1 * entropy[row, t]
                losses.append(loss)
        per_sample.append(losses)
    total = slow_total(config, per_sample, batch.prompts, MAX_TOKENS)
    slopes = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), torch.stack([torch.zeros(6, 5) if s is None else s for s in slopes]), num_clipped


def compare(loss: str, aggregation: str, features: Sequence[str], seed: int) -> int:
    """Compare loss and gradient; return the number of clipped tokens, which is the same, too."""
    batch, low = Batch(features, seed), clip_range(loss, 0.2)
    bare = low if loss in ("gspo", "luspo") else {}  # their own range of 3e-4 clips every token
    given = [bare, low, low | OPTIONS.get(loss, {})][seed % 3]
    config = AlgorithmConfig(loss=loss, aggregation=aggregation, **given, **batch.terms)
    total, slope, num_clipped = fast_gradient(config, batch)
    expected_total, expected, expected_clipped = loop_gradient(config, batch)
    assert expected.norm() > 1e-3  # otherwise any gradient would pass
    case = f"{loss}, {aggregation}, {features}, seed {seed}"
    assert relative_difference(slope, expected) < 1e-6, case
    assert total == pytest.approx(expected_total, rel=1e-6, abs=1e-9), case
    assert num_clipped == expected_clipped, case
    return num_clipped


@pytest.mark.parametrize("loss", LOSSES)
def test_a_sample_of_combinations_of_a_loss(loss: str) -> None:
    """Each feature is there and not there with each aggregation; a third has no options, a third all."""
    drawn, num_clipped = random.Random(loss), 0
    chosen = drawn.sample(SUBSETS, len(AGGREGATIONS))
    others = [[name for name in FEATURES if name not in features] for features in chosen]
    for place, (aggregation, features) in enumerate(zip(2 * AGGREGATIONS, [*chosen, *others], strict=True)):
        num_clipped += compare(loss, aggregation, features, 30 * drawn.randrange(10) + place)
    assert (num_clipped > 0) == (loss in set(RATIO_LOSSES) - {"unclipped", "sapo", "vespo"})


@pytest.mark.campaign
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_all_combinations_of_a_loss(loss: str, aggregation: str) -> None:
    for seed, features in enumerate(SUBSETS):
        compare(loss, aggregation, features, seed)


# ---- whole updates: episodes with branches, turns and plain responses in one batch, some tokens masked ----

LAYOUTS = {
    "packed": {"micro_batch_tokens": 4096},
    "packed, several micro-batches": {"micro_batch_tokens": 40},
    "packed, one sequence each": {"micro_batch_tokens": 1},
    "padded, several micro-batches": {"share_prompts": "never", "micro_batch_tokens": 60},
}
TOP = {"token_selection": "top_entropy", "selection_options": {"share": 0.4}}
TAUGHT = {"teacher": "somewhere", "engine": "torch", "coefficient": 0.5}
BAND = {"old_log_probs": "proximal", "off_policy_correction": "mask_band", "correction_band": (0.8, 1.2)}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "mask_band": {"algorithm": BAND},
    "truncate_sequence": {
        "algorithm": {"old_log_probs": "proximal", "off_policy_correction": "truncate_sequence"}
    },
    "mask_product, opsm and a KL": {
        "algorithm": {
            "off_policy_correction": ("mask_product", "opsm"), "correction_band": (0.5, 1.5),
            "correction_options": {"delta": 0.0},
            "kl": {"coefficient": 0.1, "reference": "initial", "estimator": "unbiased"},
        }
    },
    "mask_geometric, veto and entropy": {
        "algorithm": {
            "off_policy_correction": ("mask_geometric", "veto"), "correction_band": (0.9, 1.1),
            "correction_options": {"threshold": 0.6}, "entropy_bonus": 0.05,
        }
    },
    "top_entropy": {"algorithm": {**TOP, **BAND}},
    "teacher": {"distillation": TAUGHT},
    "teacher alone": {"distillation": {**TAUGHT, "use_reward": False}},
}  # fmt: skip
UPDATES = list(itertools.product(LAYOUTS, FACTORS))


def config_of(base: Config, loss: str, layout: str, factor: str, seed: int) -> Config:
    algorithm = {"loss": loss, "prompts_per_step": 3, "samples_per_prompt": 3, **clip_range(loss, 0.2)}
    algorithm["aggregation"] = AGGREGATIONS[seed % len(AGGREGATIONS)]
    sampling = {"temperature": 0.7, "min_tokens": 2} if seed % 2 else {}
    algorithm |= FACTORS[factor].get("algorithm", {})
    distillation = FACTORS[factor].get("distillation", {})
    model = {"implementation": "grpo_ray" if seed % 3 == 0 else "transformers"}
    sections = {"learner": LAYOUTS[layout], "distillation": distillation, "sampling": sampling, "model": model}
    return changed(base, algorithm=algorithm, **sections)


def batch_of(model: torch.nn.Module, config: Config, seed: int) -> tuple[list[ScoredGroup], list[list[Turn]]]:
    """Return a random batch for both sides, with the configuration's teacher and selection of tokens."""
    groups, samples = random_batch(seed, model, config)
    if config.distillation.teacher is not None:
        groups = teach(groups, samples, seed)
    if config.algorithm.token_selection == "top_entropy":
        turns = [turn for own in samples for turn in own]
        with torch.no_grad():
            found = rows_of_turns(model, config, turns)
        possible = [[row[row.isfinite()] for row in found[id(turn)]] for turn in turns]
        entropies = [[-float((row.exp() * row).sum()) for row in own] for own in possible]
        bound = np.quantile(np.concatenate(entropies), 0.6)
        for turn, own in zip(turns, entropies, strict=True):
            turn.weights = [float(entropy >= bound) for entropy in own]
    return groups, samples


def check_update(base: Config, tiny_model: TinyModel, loss: str, layout: str, factor: str, seed: int) -> None:
    """Compare the gradient of a whole batch's update, computed as a step does, and its loss."""
    config, reference = config_of(base, loss, layout, factor, seed), None
    learner = Learner(str(tiny_model(own=config.model.implementation == "grpo_ray")), config, ENDS)
    groups, samples = batch_of(learner.model, config, seed)
    assert any(len({turn.sequence for turn in turns}) > 1 for turns in samples)
    passes, sequences = learner._forward_backward, sequences_of(groups)
    if passes.selects_tokens:
        sequences = list(passes.with_selection(passes.with_proximal(learner.model, sequences)))
    if learner._reference is not None:
        reference = learner._reference.model
        perturb(reference, 1, 0.05)
        sequences = passes.with_reference(reference, sequences)
    expected_loss, expected, _ = slow_gradient(learner.model, config, samples, reference)
    sums = learner.accumulate_gradient(sequences)
    case = f"{loss}, {layout}, {factor}, {config.algorithm.aggregation}, seed {seed}"
    assert expected.norm() > 1e-3, case
    assert relative_difference(gradient(learner), expected) < 1e-5, case
    assert sums["loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6), case
    assert sums["trained_tokens"] == sum(len(turn.reply) for turns in samples for turn in turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "update"), zip(LOSSES, itertools.cycle([0, 9, 18, 27, 4, 13, 22, 31]), strict=False)
)
def test_some_updates_with_a_loss(loss: str, update: int, tiny_config: Config, tiny_model: TinyModel) -> None:
    """Every layout and every factor is there."""
    check_update(tiny_config, tiny_model, loss, *UPDATES[update], random.Random(loss).randrange(100))


@pytest.mark.campaign
@pytest.mark.parametrize(("layout", "factor"), UPDATES)
@pytest.mark.parametrize("loss", LOSSES)
def test_all_updates_with_a_loss(
    loss: str, layout: str, factor: str, tiny_config: Config, tiny_model: TinyModel
) -> None:
    check_update(tiny_config, tiny_model, loss, layout, factor, 100 + UPDATES.index((layout, factor)))
