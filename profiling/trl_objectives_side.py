"""TRL's side of compare_trl_losses.py and compare_trl_advantages.py, in a Python without grpo_ray.

    python trl_objectives_side.py JOB.json RESULT.json

A case with rewards builds its trainer and calls its `_generate_and_score_completions`, which computes rewards
and advantages, and then its `_compute_loss` on the result; only sampling and the model are replaced. Another
case calls `_compute_loss` on the job's tensors. The weights of TRL's sampler correction are computed within its
generation, which needs vLLM; they are written down here from its documentation (GRPOConfig,
`vllm_importance_sampling_mode`). Everything else is the trainer's own code.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Return the loss and its gradients, and the advantages if rewards are given, of each case."""
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in job["tensors"].items()}
    return {
        name: (_from_rewards if "rewards" in case else _loss)(job, case, tensors)
        for name, case in job["cases"].items()
    }


def _loss(job: dict[str, Any], case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    trainer = _make_trainer(job, case)
    mask = tensors["mask"]
    policy, entropy = (tensors[name].clone().requires_grad_() for name in ("policy", "entropy"))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, entropy, None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "sampling_per_token_logps": tensors["sampler"],
        "num_items_in_batch": mask.sum(),
    }
    if mode := case["options"].get("vllm_importance_sampling_mode"):
        inputs["importance_sampling_ratio"] = _weights(mode, case["options"], tensors)
        trainer.use_vllm = True
    loss = trainer._compute_loss(trainer.model, inputs)
    gradients = torch.autograd.grad(loss, [policy, entropy], allow_unused=True)
    values = [torch.zeros_like(mask) if gradient is None else gradient for gradient in gradients]
    return {"loss": loss.item(), "policy": values[0].tolist(), "entropy": values[1].tolist()}


def _weights(mode: str, options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    log_ratio = (tensors["old"] - tensors["sampler"]) * tensors["mask"]
    ratio = (log_ratio.sum(dim=1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    low, high = (options[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (low or 0.0)) | (ratio > high), 0.0)


def _from_rewards(
    job: dict[str, Any], case: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    mask = tensors["mask"].bool()
    is_rloo = case["trainer"] == "RLOOTrainer"
    trainer = _make_trainer(
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
    grpo = prompts, ids, None, texts, None, {}, None, []  # type: ignore[var-annotated]
    sampled = (prompts, ids, texts) if is_rloo else grpo
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


def _make_trainer(job: dict[str, Any], case: dict[str, Any], rewards: Any = None, num_rows: int = 12) -> Any:
    """Build the case's trainer with its options; `rewards` are its reward functions."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library = trl
    if case["trainer"] == "GMPOTrainer":
        from trl.experimental import gmpo as library  # type: ignore[no-redef]
    trainer_class = getattr(library, case["trainer"])
    config_class = getattr(library, case["trainer"].replace("Trainer", "Config"))
    config = config_class(
        output_dir=job["folder"],
        num_generations=4,
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=1,
        max_completion_length=job["max_tokens"],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        **case["options"],
    )
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=rewards or (lambda completions, **_: [0.0] * len(completions)),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * num_rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compute(json.loads(Path(sys.argv[1]).read_text()))))
