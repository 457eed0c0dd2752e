"""Loss and gradient of every objective that TRL has too, on the same tensors; see docs/lab/profiling.md.

    python profiling/compare_trl_losses.py --trl-python ~/trl/bin/python

TRL needs a Python of its own: the head of compare_trl.py has the commands. TRL's side builds its own trainer
for each case and calls its `_compute_loss` on given log-probabilities and entropies, so no model is computed on
either side.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.tiny_learner import model_folder
from compare_trl import run_trl, trl_problem
from torch import Tensor

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives import SELECTIONS, CorrectionInputs, Objective, loss_denominator, policy_gradient_step

TRL_SIDE = Path(__file__).with_name("trl_objectives_side.py")
BATCH, SEQ, MAX_TOKENS = 12, 10, 16
TOLERANCE = 1e-4  # of the loss, and of the gradients' relative difference


@dataclass(frozen=True)
class Case:
    """One objective for both sides."""

    ours: Mapping[str, Any]  # fields of `algorithm`
    trl: Mapping[str, Any]  # fields of GRPOConfig
    trainer: str = "GRPOTrainer"
    clips: Mapping[str, Any] = field(default_factory=lambda: {"cliprange": 0.2})


def _corrected(mode: str, names: Sequence[str] | str, band: Any = None, low: float | None = None) -> Case:
    """Return GRPO with importance weights of the sampler, truncated or masked at 1.5."""
    ours = {"old_log_probs": "proximal", "off_policy_correction": names, "correction_cap": 1.5}
    ours |= {"correction_band": band, "correction_options": {} if low is None else {"floor": low}}
    limits = {
        "vllm_importance_sampling_clip_min": low or (band and band[0]),
        "vllm_importance_sampling_clip_max": 1.5,
    }
    return Case(ours, {"loss_type": "grpo", "vllm_importance_sampling_mode": mode, **limits})


KL = {"reference": "initial", "coefficient": 0.3}
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "grpo": Case({}, {"loss_type": "grpo"}),
    "grpo, clip-higher": Case({"cliprange_high": 0.28}, {"loss_type": "grpo", "epsilon_high": 0.28}),
    "grpo, dual clip": Case({"dual_clip": 1.4}, {"loss_type": "grpo", "delta": 1.4}),
    "dapo": Case({"aggregation": "token_mean"}, {"loss_type": "dapo"}),
    "bnpo": Case({"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    "dr_grpo": Case({"aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "gspo": Case({"loss": "gspo"}, {"loss_type": "grpo", **SEQUENCE}),
    "luspo": Case({"loss": "luspo"}, {"loss_type": "luspo", **SEQUENCE}),
    "cispo": Case(
        {"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.5}, clips={"cliprange_high": 0.5}
    ),
    "sapo": Case({"loss": "sapo"}, {"loss_type": "sapo"}, clips={}),
    "vespo": Case({"loss": "vespo"}, {"loss_type": "vespo"}, clips={}),
    "vespo, options": Case(
        {"loss": "vespo", "loss_options": {"k": 1.5, "decay": 2.0, "k_negative": 1.0, "decay_negative": 0.5}},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 2.0,
            "vespo_k_neg": 1.0,
            "vespo_lambda_neg": 0.5,
        },
        clips={},
    ),
    "gmpo": Case({"loss": "gmpo"}, {"epsilon": 0.4}, "GMPOTrainer", clips={}),
    "KL k3": Case(
        {"kl": {**KL, "estimator": "k3"}}, {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}
    ),
    "KL unbiased": Case({"kl": {**KL, "estimator": "unbiased"}}, {"loss_type": "grpo", "beta": 0.3}),
    "entropy bonus": Case(
        {"aggregation": "token_mean", "entropy_bonus": 0.2}, {"loss_type": "dapo", "entropy_coef": 0.2}
    ),
    "top entropy": Case(
        {"token_selection": "top_entropy", "selection_options": {"share": 0.3}},
        {"loss_type": "grpo", "top_entropy_quantile": 0.3},
    ),
    "opsm": Case(
        {"off_policy_correction": "opsm", "correction_options": {"delta": 0.05}, "old_log_probs": "proximal"},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    ),
    "token_truncate": _corrected("token_truncate", "truncate_token"),
    "token_truncate, floor": _corrected("token_truncate", "truncate_token", low=0.8),
    "sequence_truncate": _corrected("sequence_truncate", "truncate_sequence"),
    "token_mask": _corrected("token_mask", "mask_band", band=(0.6, 1.5)),
    "sequence_mask": _corrected("sequence_mask", ("truncate_sequence", "mask_product"), band=(None, 1.5)),
    "sequence_mask, two-sided": _corrected(
        "sequence_mask", ("truncate_sequence", "mask_product"), band=(0.6, 1.5)
    ),
}


def make_tensors(seed: int, batch: int = BATCH) -> dict[str, Tensor]:
    """Make log-probabilities `[batch, seq]` and the rest of a batch; ragged, with both signs of advantages."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch, SEQ, generator=generator, dtype=torch.float64)

    sampler = -3 * torch.rand(batch, SEQ, generator=generator, dtype=torch.float64) - 0.5
    old = sampler + noise(0.35)
    lengths = torch.randint(1, SEQ + 1, (batch, 1), generator=generator)
    lengths[0] = SEQ  # the trainers pad to the longest
    return {
        "sampler": sampler,
        "old": old,
        "policy": old + noise(0.3),
        "reference": old + noise(0.3),
        "entropy": noise(1.0).square().float().double(),  # TRL's quantile of them is in float32
        "advantages": torch.randn(batch, generator=generator, dtype=torch.float64),
        "mask": torch.arange(SEQ) < lengths,
    }


def ours(case: Case, tensors: Mapping[str, Tensor]) -> tuple[float, list[Tensor]]:
    """Return the loss and its gradients with respect to log-probabilities and entropies."""
    config = AlgorithmConfig(**{**case.clips, **case.ours})
    objective, mask = Objective.from_config(config), tensors["mask"]
    policy, entropy = (tensors[name].clone().requires_grad_() for name in ("policy", "entropy"))
    advantages, weights = tensors["advantages"][:, None], None
    if objective.corrections:
        inputs = CorrectionInputs.of(tensors["old"], tensors["sampler"], mask, advantages, policy)
        weights, _ = objective.correction_weights(inputs)
    if objective.selection != "none":
        given = policy.detach()[mask].numpy(), entropy.detach()[mask].numpy(), np.zeros(int(mask.sum()))
        chosen, _ = SELECTIONS[objective.selection](
            *given, np.random.default_rng(), **objective.selection_options
        )
        weights = torch.zeros_like(policy).index_put((mask,), torch.from_numpy(chosen).double())
    denominator = loss_denominator(objective.aggregation, BATCH, int(mask.sum()), MAX_TOKENS)
    loss, _ = policy_gradient_step(
        policy, mask, objective=objective, denominator=denominator, advantages=advantages,
        old_log_probs=tensors["old"], weights=weights, reference_log_probs=tensors["reference"],
        entropy=entropy,
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, [policy, entropy], allow_unused=True)
    return loss.item(), [torch.zeros(BATCH, SEQ) if g is None else g for g in gradients]


def run_side(python: Path, tensors: Mapping[str, Tensor], cases: Mapping[str, Any]) -> dict[str, Any]:
    """Run TRL's side with that Python; return its results by case."""
    with model_folder() as model, tempfile.TemporaryDirectory() as folder:
        job = {
            "model": model,
            "folder": folder,
            "max_tokens": MAX_TOKENS,
            "tensors": {name: tensor.tolist() for name, tensor in tensors.items()},
            "cases": cases,
        }
        return run_trl(python, job, Path(folder), TRL_SIDE)


def options_of(doc: str | None, name: str, arguments: Sequence[str] | None) -> argparse.Namespace | None:
    """Read a comparison's command line; return None, after a message, where TRL cannot run."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, metavar="PATH", help="a Python that has trl")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases with this text in their names")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random tensors")
    options = parser.parse_args(arguments)
    if problem := trl_problem(options.trl_python):
        print(f"{name}: {problem}", file=sys.stderr)
        return None
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(__doc__, "compare_trl_losses.py", arguments)
    if options is None:
        return 2
    chosen = {name: case for name, case in CASES.items() if options.case in name}
    tensors = make_tensors(options.seed)
    jobs = {name: {"trainer": case.trainer, "options": dict(case.trl)} for name, case in chosen.items()}
    theirs = run_side(options.trl_python, tensors, jobs)
    num_different = 0
    for name, case in chosen.items():
        loss, gradients = ours(case, tensors)
        expected = torch.tensor([theirs[name]["policy"], theirs[name]["entropy"]])
        apart = ((torch.stack(gradients) - expected).norm() / expected.norm()).item()
        loss_apart = abs(loss - theirs[name]["loss"]) / max(abs(theirs[name]["loss"]), 1e-3)
        is_same = max(apart, loss_apart) < TOLERANCE
        num_different += not is_same
        print(f"{name:<26} loss {loss:+.6f}  apart {loss_apart:.1e}  gradient {apart:.1e}  "
              f"{'the same' if is_same else 'DIFFERENT'}")  # fmt: skip
    print(f"{len(chosen)} cases, {num_different} different")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
