"""The whole objective: what it needs and what it refuses, and a coefficient that follows the entropy."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    changed,
    flat_weights,
    gradient,
    make_batch,
    relative_difference,
    written,
)

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig, Correction
from grpo_ray.config.losses import LOSS_RECORDS, LossType
from grpo_ray.learning.log_probs import ResponseLogProbs
from grpo_ray.learning.microbatch import collate_padded
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    SELECTIONS,
    Objective,
    check_algorithm,
    policy_gradient_step,
)
from grpo_ray.objectives.checking import acts_without_advantage
from grpo_ray.objectives.inputs import parameters_of, uses_ratio
from grpo_ray.objectives.losses import loss_function
from grpo_ray.objectives.objective import EntropyBonus
from grpo_ray.run.preparation import WITH_OPTIONS, check_files
from grpo_ray.types import TrainBatch

pytestmark = pytest.mark.usefixtures("own_module")


def example() -> dict[str, torch.Tensor]:
    names = ("policy_log_probs", "response_mask", "old_log_probs", "weights", "reference_log_probs", "entropy")
    return {name: torch.ones(2, 3) for name in names} | {"advantages": torch.ones(2, 1)}


def full(loss_type: LossType) -> Objective:
    """Return an objective with every term."""
    return Objective(loss_type, kl_coefficient=0.5, entropy_bonus=0.1)


def test_distances_are_summed_in_float64() -> None:
    _, sums = policy_gradient_step(**example(), objective=full("grpo_clip"))
    assert sums["kl_k1_sum"].dtype == sums["kl_k3_sum"].dtype == torch.float64


def test_nan_at_a_live_token_is_not_hidden():
    for name in ("policy_log_probs", "weights", "reference_log_probs", "entropy", "advantages"):
        tensors = example()
        tensors[name][0, 0] = torch.nan
        loss, _ = policy_gradient_step(**tensors, objective=full("gspo"), denominator=6.0)
        assert loss.isnan(), name


def test_an_unbiased_kl_without_a_coefficient_needs_no_old_log_probs():
    assert not Objective("reinforce_with_baseline", kl_estimator="unbiased").needs_old_log_probs


def test_an_argument_that_is_missing_or_of_another_shape_is_named():
    for name in [name for name in example() if name not in ("advantages", "policy_log_probs")]:
        tensors = example()
        tensors[name] = tensors[name][:1]
        with pytest.raises(ValueError, match=f"{name} has shape"):
            policy_gradient_step(**tensors, objective=full("cispo"), denominator=6.0)
    for name in ("reference_log_probs", "entropy"):  # what the loss itself needs: test_losses.py
        with pytest.raises(ValueError, match=f"needs {name}"):
            policy_gradient_step(**{**example(), name: None}, objective=full("gspo"), denominator=6.0)


def test_a_constant_weight_stays() -> None:
    bonus = EntropyBonus(AlgorithmConfig(entropy_bonus=0.1))
    bonus.observe(0.0)
    assert bonus.weight == 0.1
    assert bonus.state() == {}
    bonus.restore({"entropy_coefficient": 0.5, "entropy_is_low": 1.0})
    assert bonus.weight == 0.1


def test_an_adapted_weight_by_hand() -> None:
    config = AlgorithmConfig(entropy_bonus=0.1, entropy_target=0.5, entropy_step=0.04, entropy_bonus_max=0.16)
    bonus, weights = EntropyBonus(config), []
    for entropy in (0.4, 0.5, 0.3, 0.6, None, 0.9, 0.9, 0.9, float("nan"), 0.9, 0.2):
        weights.append(bonus.weight)
        bonus.observe(entropy)
    # The coefficient: 0.1, 0.14, 0.16, 0.16, 0.12, 0.12, 0.08, 0.04, 0, 0, 0.04.
    assert weights == pytest.approx([0, 0.14, 0.16, 0.16, 0, 0, 0, 0, 0, 0, 0])
    assert bonus.weight == pytest.approx(0.04)
    other = EntropyBonus(config)
    other.restore(bonus.state())
    assert (other.weight, other.state()) == (bonus.weight, bonus.state())
    lower = EntropyBonus(config.model_copy(update={"entropy_bonus_max": 0.01}))
    lower.restore(bonus.state())
    assert lower.weight == 0.01


@pytest.mark.slow
def test_a_learner_follows_the_target_and_resumes(make_learner: MakeLearner, tmp_path: Path) -> None:
    """The entropy is below 6 nats: log(300) = 5.7."""
    options = {"entropy_target": 6.0, "entropy_bonus": 0.3, "entropy_step": 0.1}
    sections = {"algorithm": options, "learner": {"learning_rate": 1e-3}}
    straight, weights = make_learner(**sections), []
    for seed in range(4):
        if seed == 2:
            resumed = make_learner(checkpoint=written(straight, tmp_path / "step"), **sections)
        batch = TrainBatch(tuple(make_batch(straight, seed, versions=seed)))
        weights.append(straight.train_step(batch).metrics["loss/entropy_bonus"])
        if seed >= 2:
            assert resumed.train_step(batch).metrics["loss/entropy_bonus"] == weights[-1]
    assert torch.equal(flat_weights(straight.model), flat_weights(resumed.model))
    assert weights == pytest.approx([0.0, 0.4, 0.5, 0.6])


def test_with_a_target_the_entropy_is_that_of_all_tokens_the_bonus_acts_on(make_learner: MakeLearner) -> None:
    """Two of the four groups have no advantage; without a target the metric leaves them out."""
    found = {}
    for target in (None, 5.0):
        learner = make_learner(algorithm={"entropy_target": target})
        groups = make_batch(learner)
        with torch.no_grad():
            batch = collate_padded(sequences_of(groups))
            _, entropies = ResponseLogProbs(learner._config.sampling, ENDS)(learner.model, batch)
        mask = batch.advantage_mask if target is None else batch.response_mask
        found[target] = learner.train_step(TrainBatch(tuple(groups))).metrics
        assert found[target]["policy/entropy/exact"] == pytest.approx(entropies[mask].mean().item(), rel=1e-5)
    assert found[None]["throughput/trained_tokens"] == found[5.0]["throughput/trained_tokens"]
    assert found[None]["policy/entropy/exact"] != pytest.approx(found[5.0]["policy/entropy/exact"], rel=1e-5)


MODULE = "my_losses_4711"
CODE = """
from typing import Literal
import torch
from grpo_ray.objectives import CorrectionInputs, LossInputs, RatioInputs

def spo(inputs: RatioInputs, *, cliprange: float, strength: float = 1.0):
    ratio = inputs.log_ratio.exp()
    penalty = inputs.advantages.abs() * strength / (2 * cliprange) * (ratio - 1) ** 2
    return penalty - ratio * inputs.advantages, {}

def plain(inputs: LossInputs):
    return -inputs.advantages * inputs.policy_log_probs, {}

def clip(inputs: RatioInputs, *, cliprange: float, cliprange_high: float, mode: Literal["a", "b"] = "a"):
    ratio = inputs.log_ratio.exp()
    bounded = ratio.clamp(1 - cliprange, 1 + cliprange_high)
    objective = torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    clipped = bounded * inputs.advantages < ratio * inputs.advantages
    return -objective, {"clipped": clipped, "ratio": ratio.detach()}

def anything(inputs: LossInputs, **options: float):
    return -inputs.advantages * inputs.policy_log_probs * options["scale"], {}

def mean(inputs: LossInputs): return (-inputs.advantages * inputs.policy_log_probs).mean(), {}
def bare(inputs): return inputs.policy_log_probs, {}
def nothing(): ...
def needing(inputs: RatioInputs, *, tau: float): return -inputs.log_ratio * tau, {}
def raising(inputs: RatioInputs): raise KeyError("no")
def late(inputs: LossInputs): return inputs.policy_log_probs * (torch.arange(inputs.mask.shape[1]) > 6000), {}
def rare(inputs: LossInputs): return (-25 - inputs.policy_log_probs).relu(), {}
def longer(inputs: LossInputs): return inputs.policy_log_probs * (inputs.mask.sum(1, keepdim=True) > 600), {}
def narrow(inputs: RatioInputs, *, cliprange: float = 1e-3):
    return -inputs.log_ratio.exp().clamp(max=1 + cliprange) * inputs.advantages, {}
def cut_off(inputs: LossInputs): return inputs.policy_log_probs.detach(), {}
def counting(inputs: RatioInputs): return -inputs.log_ratio, {"clipped": inputs.mask.float()}
def not_finite(inputs: LossInputs): return inputs.policy_log_probs / 0, {}

def halve(inputs: CorrectionInputs, *, factor: float = 0.5, cap: float):
    weights = (inputs.ratio * factor).clamp(max=cap)
    return weights, weights >= cap

def negative(inputs: CorrectionInputs): return -inputs.ratio, inputs.mask
def across(inputs: CorrectionInputs): return inputs.ratio.mean(dim=0), inputs.mask
def alone(inputs: CorrectionInputs): return inputs.ratio
"""


def config_of(**changes: Any) -> AlgorithmConfig:
    for field in ("loss", "off_policy_correction"):
        if str(changes.get(field, "")).startswith(":"):
            changes[field] = f"{MODULE}{changes[field]}"
    return AlgorithmConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": ":spo"},
        {"loss": ":spo", "loss_options": {"strength": 2}, "cliprange": 0.1},
        {"loss": ":plain"},
        {"loss": ":clip", "loss_options": {"mode": "b"}},
        {"loss": ":anything", "loss_options": {"scale": 2.0}, "dual_clip": 3.0},
        {"loss": ":needing", "loss_options": {"tau": 1}},
        {"loss": "sapo", "loss_options": {"tau": 2, "tau_negative": 3.0}},
        {"loss": "dppo_tv", "loss_options": {"delta": 0.1}, "off_policy_correction": "mask_geometric"},
        {"loss": "dppo_tv", "loss_options": {"delta": "1e-1"}},  # as YAML 1.1 reads it without quotes
        {"loss": "reinforce_with_baseline", "off_policy_correction": ":halve"},
        {"off_policy_correction": ":halve", "correction_options": {"factor": 0.3}, "correction_cap": 1.5},
        {"off_policy_correction": "opsm", "correction_options": {"delta": 0.5}},
        {"off_policy_correction": ("veto", "mask_geometric"), "correction_options": {"threshold": 1e-3}},
    ],
    ids=str,
)
def test_what_fits_is_accepted(changes: dict[str, Any]) -> None:
    check_algorithm(config_of(**changes))


TRUNCATED = {"loss": "no_baseline", "off_policy_correction": "truncate_token"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "no_module_4711:f"}, r"algorithm\.loss: there is no module 'no_module_4711' in "),
        ({"loss": ":none"}, r"algorithm\.loss: 'my_losses_4711' has no function 'none'"),
        ({"loss": ":nothing"}, r"algorithm\.loss: my_losses_4711:nothing must take \(inputs\)"),
        ({"loss": ":bare"}, r"bare: the first parameter must be annotated with LossInputs"),
        ({"loss": ":mean"}, r"mean fails on a small batch: ValueError: the loss of .* has shape"),
        ({"loss": ":counting"}, r"counting fails on a small batch: TypeError: `clipped` must be bool"),
        ({"loss": ":raising"}, r"raising fails on a small batch: KeyError: 'no'"),
        ({"loss": ":cut_off"}, r"cut_off must return finite losses that depend on inputs\.policy_log_probs"),
        ({"loss": ":not_finite"}, r"not_finite must return finite losses that depend on inputs\."),
        ({"loss": ":needing"}, r"needing needs tau; give algorithm\.loss_options: \{tau: \.\.\.\}"),
        ({"loss": ":spo", "loss_options": {"strenght": 1}}, r"has no argument 'strenght'; it takes strength"),
        ({"loss": ":clip", "loss_options": {"mode": "c"}}, r"has mode='c': input should be 'a' or 'b'"),
        ({"loss": "sapo", "loss_options": {"tau": "x"}}, r"algorithm\.loss: sapo has tau='x': input should be"),
        ({"loss": "sapo", "loss_options": {"tau": "2"}}, r"tau='2', which is text; write it without quotes"),
        ({"loss_options": {"tau": 1}}, r"algorithm\.loss: grpo_clip has no argument 'tau'; it takes none"),
        ({"loss_options": {"cliprange": 1}}, r"loss_options: cliprange is a field .* set algorithm\.cliprange"),
        ({"off_policy_correction": "opsm"}, r"opsm needs delta; give algorithm\.correction_options: \{delta: "),
        ({"correction_options": {"delta": 1}}, "no correction in effect has an argument 'delta'; they take no"),
        ({"off_policy_correction": "veto", "correction_options": {"delta": 1}},
         r"no correction in effect has an argument 'delta'; they take threshold"),
        ({"off_policy_correction": "veto", "correction_options": {"threshold": "x"}},
         r"algorithm\.off_policy_correction: veto has threshold='x': input should be a valid number"),
        ({"off_policy_correction": "veto", "correction_options": {"band": 1}},
         r"correction_options: band is a field of its own; set algorithm\.correction_band"),
        ({"loss": "sapo", "loss_options": {"tau": 0}}, r"sapo has tau=0: input should be greater than 0"),
        ({"loss": "dppo_tv", "loss_options": {"kl_tau": -1}}, r"kl_tau=-1: input should be greater than or"),
        ({"loss": "vespo", "loss_options": {"decay": -3}}, r"decay=-3: input should be greater than 0"),
        ({"token_selection": "top_entropy", "selection_options": {"share": 20}},
         r"algorithm\.token_selection: top_entropy has share=20: input should be less than or equal to 1"),
        ({"selection_options": {"share": 0.1}}, r"token_selection is `none`, which takes none"),
        ({"token_selection": "top_entropy", "selection_options": {"low": 1}},
         r"token_selection: top_entropy has no argument 'low'; it takes share"),
        ({"token_selection": "clip_cov", "selection_options": {"low": 5.0}}, r"low is 5\.0 and high 5\.0; "),
        ({**TRUNCATED, "correction_options": {"floor": 5}},
         r"truncate_token: floor is 5, above algorithm\.correction_cap, which is 2"),
        ({**TRUNCATED, "correction_band": (0.9, 1.1)},
         r"algorithm\.correction_band: no correction in effect has a band"),
        ({"correction_cap": 7.0},
         r"algorithm\.correction_cap: no correction in effect has a cap; leave it out"),
        ({"loss": ":plain", "cliprange": 0.1}, r"loss `.*:plain` has no option 'cliprange'; it takes none"),
        ({"loss": ":spo", "cliprange_high": 0.5}, r"has no option 'cliprange_high'; it takes cliprange, str"),
        ({"loss": ":spo", "dual_clip": 3.0}, r"has no option 'dual_clip'"),
        ({"off_policy_correction": ":negative"}, r"negative must return weights of at least 0"),
        ({"off_policy_correction": ":across"}, r"the weights of a correction must be \[batch, 1\]"),
        ({"off_policy_correction": ":alone"}, r"off_policy_correction: .*:alone fails on a small batch"),
        ({"loss": ":spo", "off_policy_correction": "truncate_token"},
         r"algorithm\.loss: .*:spo: off_policy_correction weights tokens by proximal / behaviour"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(config_of(**changes))


def test_the_preflight_checks_it(tiny_config: Config) -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.loss: there is no module 'no_module_4711'"):
        check_files(changed(tiny_config, algorithm={"loss": "no_module_4711:f"}))


def test_options_and_clip_ranges_reach_the_function() -> None:
    """SPO at ratio 2 and A = 3: 3 * s / (2 eps) * 1 - 6."""
    config = config_of(loss=":spo", loss_options={"strength": 2.0}, cliprange=0.25)
    log_probs = torch.tensor([[0.0]])
    inputs = log_probs, torch.ones(1, 1, dtype=torch.bool), torch.tensor([[3.0]]), torch.tensor([[-0.6931472]])
    loss, _ = Objective.from_config(config).policy_gradient_loss(*inputs)
    assert loss.item() == pytest.approx(3 * 2 / 0.5 - 6)
    for given, bound in (({}, 1.001), ({"cliprange": 0.25}, 1.25)):  # the function's own default, or that given
        objective = Objective.from_config(config_of(loss=":narrow", **given))
        loss, _ = objective.policy_gradient_loss(*inputs)
        assert loss.item() == pytest.approx(-3 * bound)
        assert not acts_without_advantage(objective)
    assert all(acts_without_advantage(Objective(f"{MODULE}:{name}")) for name in ("late", "rare", "longer"))


def test_an_error_notes_its_place_and_a_reloaded_module_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    name, line = f"{MODULE}:raising", 1 + CODE[: CODE.index("def raising")].count("\n")
    with pytest.raises(KeyError, match="no") as caught:
        loss_function(name)(None)
    assert caught.value.__notes__ == [f"in algorithm.loss: {name} ({MODULE}.py:{line})"]
    before = loss_function(f"{MODULE}:plain")
    monkeypatch.syspath_prepend(Path.cwd())
    importlib.reload(sys.modules[MODULE])
    monkeypatch.setattr(Path, "cwd", lambda: pytest.fail("each look-up looks at files"))
    assert loss_function(f"{MODULE}:plain") is not before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "builtin"),
    [
        ({"loss": ":clip"}, {"loss": "grpo_clip"}),
        ({"loss": ":plain"}, {"loss": "reinforce_with_baseline"}),
        ({"off_policy_correction": ":halve", "correction_options": {"factor": 1.0}},
         {"off_policy_correction": "truncate_token"}),
    ],
    ids=str,
)  # fmt: skip
def test_ones_own_trains_as_a_builtin_does(own: dict, builtin: dict, make_learner: MakeLearner) -> None:
    found = []
    for options in (own, builtin):
        options = {"old_log_probs": "behaviour" if "loss" in options else "proximal", **options}
        learner = make_learner(algorithm=config_of(**options).model_dump(include=options.keys()))
        sums = learner.accumulate_gradient(sequences_of(make_batch(learner)))
        found.append((sums, gradient(learner)))
    assert found[0][0] == pytest.approx(found[1][0], nan_ok=True)
    assert relative_difference(found[0][1], found[1][1]) < 1e-6
    assert found[0][1].norm() > 0


def test_the_records_of_losses_say_what_their_functions_do() -> None:
    assert tuple(LOSS_RECORDS) == get_args(LossType) == tuple(LOSSES)
    assert tuple(CORRECTIONS) == get_args(Correction)
    for name, function in LOSSES.items():
        record, parameters = LOSS_RECORDS[name], parameters_of(function)
        assert record.has_ratio == uses_ratio(function), name
        assert (record.epsilons is not None) == ("cliprange" in parameters), name


def test_what_is_not_checked_without_options_needs_none() -> None:
    """Preflight leaves the package's own functions alone, unless they are among WITH_OPTIONS."""
    for name, function in {**ADVANTAGES, **LOSSES, **SELECTIONS}.items():
        parameters = inspect.signature(function).parameters.values()
        needed = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
        assert not needed - {"cliprange"} or name in WITH_OPTIONS, name  # a field, which has a default
