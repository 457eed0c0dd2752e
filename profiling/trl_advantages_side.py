"""TRL's side of compare_trl_advantages.py: its trainers' advantages, loss and gradient, without grpo_ray.

    python trl_advantages_side.py JOB.json RESULT.json

Each case builds its trainer and calls its `_generate_and_score_completions`, which computes rewards and
advantages, and then its `_compute_loss` on the result. Only sampling and the model are replaced: the
completions, their log-probabilities and the rewards are the job's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trl_losses_side import make_trainer


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Return the advantages, the loss and its gradient of each case."""
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in job["tensors"].items()}
    return {name: _case(job, case, tensors) for name, case in job["cases"].items()}


def _case(job: dict[str, Any], case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = tensors["mask"].bool()
    is_rloo = case["trainer"] == "RLOOTrainer"
    trainer = make_trainer(
        job, case, [_column(rewards) for rewards in case["rewards"]] + _overlong(case), len(mask)
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    policy = tensors["policy"].clone().requires_grad_()
    given = {"current": tensors["old"]}  # of the model: before the update, then in it

    def log_probs(model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        found = given["current"] if model is trainer.model else tensors["reference"]
        return found, torch.zeros_like(found), None

    trainer._get_per_token_logps_and_entropies = log_probs
    ids = [[5] * int(length) for length in mask.sum(dim=1)]
    prompts, texts = [[5]] * len(ids), [""] * len(ids)
    sampled = (prompts, ids, texts) if is_rloo else (prompts, ids, None, texts, None, {}, None, [])
    trainer._generate = lambda _: sampled
    scored = trainer._generate_and_score_completions([{"prompt": "1"} for _ in ids])
    if is_rloo:  # of one ratio per response: at the first update, where it is 1
        policy = tensors["old"].clone().requires_grad_()
    else:
        scored["old_per_token_logps"] = tensors["old"]
    given["current"] = policy
    loss = trainer._compute_loss(trainer.model, scored)
    (gradient,) = torch.autograd.grad(loss, policy)
    return {"advantages": scored["advantages"].tolist(), "loss": loss.item(), "gradient": gradient.tolist()}


def _column(rewards: list[float | None]) -> Any:
    def given(completions: list[str], **_: Any) -> list[float | None]:
        return rewards

    return given


def _overlong(case: dict[str, Any]) -> list[Any]:
    """Return TRL's own punishment of overlong completions, if the case has one."""
    if case["overlong"] is None:
        return []
    from trl.rewards import get_soft_overlong_punishment

    return [get_soft_overlong_punishment(*case["overlong"])]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compute(json.loads(Path(sys.argv[1]).read_text()))))
