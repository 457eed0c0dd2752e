"""Log-probabilities and gradients of one step on the device, against a plain float32 step on the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_page.shapes import SHAPES, build_model, make_batch
from gpu_page.steps import LearnerStep, PlainStep, step_config
from grpo_ray.learning.sequences import TrainSequence

CPU = torch.device("cpu")
LENGTHS = (96, 80, 1, 64, 33, 96, 7, 50, 96, 20, 65, 12)  # three groups of four
PROMPT_TOKENS, SAMPLES = 48, 4


def compare_all(device: torch.device, attentions: Sequence[str], shape: str = "small") -> list[dict[str, Any]]:
    """Compare each attention with and without shared prompts, in float32 and bfloat16, and a plain step."""
    sequences = make_batch(SHAPES[shape].vocab_size, PROMPT_TOKENS, LENGTHS, SAMPLES)
    reference = PlainStep(build_model(shape, CPU, is_plain=True), CPU, torch.float32, 10**6)
    expected = reference.log_probs(sequences)
    reference.forward_backward(sequences)
    found = []
    for dtype in ("float32", "bfloat16"):
        plain = build_model(shape, CPU, is_plain=True).to(device)
        step = PlainStep(plain, device, getattr(torch, dtype), 10**6)
        found.append(_distance(step, "plain transformers", dtype, sequences, expected, reference.gradients()))
        for attention in attentions if dtype == "bfloat16" else ("sdpa",):
            for share in ("never", "auto"):
                way = f"Learner, {'shared' if share == 'auto' else 'repeated'} prompts, {attention}"
                try:
                    ours = _learner_step(shape, device, dtype, attention, share)
                    found.append(_distance(ours, way, dtype, sequences, expected, reference.gradients()))
                except (RuntimeError, ValueError, ImportError) as error:  # a kernel that is missing or fails
                    failure = f"{type(error).__name__}: {str(error)[:200]}"
                    found.append({"way": way, "dtype": dtype, "kernel": "", "error": failure})
    return found


def _learner_step(shape: str, device: torch.device, dtype: str, attention: str, share: str) -> LearnerStep:
    config = step_config(
        device,
        [
            f"model.dtype={dtype}",
            f"model.attention={attention}",
            f"learner.share_prompts={share}",
            "algorithm.loss=reinforce_with_baseline",  # PlainStep's loss
        ],
    )
    return LearnerStep(build_model(shape, CPU).to(device), config, device)


def _distance(
    step: LearnerStep | PlainStep, way: str, dtype: str, sequences: Sequence[TrainSequence],
    expected: Sequence[Tensor], gradients: dict[str, Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Return the distance of one way from the reference."""
    found = torch.cat(step.log_probs(sequences))
    differences = (found - torch.cat(list(expected))).abs()
    step.forward_backward(sequences)
    squared = {
        name: (gradient.float().cpu() - gradients[name]).square().sum()
        for name, gradient in step.gradients().items()
    }
    assert squared.keys() == gradients.keys()
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    relative = float(sum(squared.values())) ** 0.5 / norm
    return {
        "way": way,
        "dtype": dtype,
        "logprob_max": float(differences.max()),  # nats
        "logprob_mean": float(differences.mean()),
        "gradient": relative,  # norm of the difference relative to the norm
        "kernel": (step.kernel if isinstance(step, LearnerStep) else None) or "",  # of the Learner's attention
        "error": "",
    }
