"""TRL's side of compare_trl.py: one short run of its GRPOTrainer, in a Python that has trl and no grpo_ray.

    python trl_side.py JOB.json RESULT.json

The job's file has the model's folder, the prompts and the settings; the result's gets the seconds of each step.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

OPENING, CLOSING = "</think> <answer>", "</answer>"


def exact_match(response: str, answer: str) -> float:
    """Reward as grpo_ray's `exact_match` does, for responses to a prompt that ends in `<think>`."""
    if any(response.count(tag) != 1 for tag in ("</think>", "<answer>", CLOSING)) or OPENING not in response:
        return 0.0
    found, closing, _ = response.partition(OPENING)[2].partition(CLOSING)
    return float(bool(closing) and found.strip() == answer.strip())


def brevity(response: str, answer: str) -> float:
    """Reward as grpo_ray's `brevity` does with `free: 0` and `span: 1000`: responses get different ones."""
    return min(1.0, max(0.0, 1 - len(response) / 1000))


def last_number(response: str, answer: str) -> float:
    """Reward as grpo_ray's `last_number` does, for sums of whole numbers."""
    return float(re.findall(r"\d+", response)[-1:] == [answer])


REWARDS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match, "brevity": brevity, "last_number": last_number,
}  # fmt: skip


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job; return the seconds of each step and the mean response length of each."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["num_threads"])
    reward = REWARDS[job["reward"]]
    lengths: list[float] = []
    means: list[float] = []

    def reward_fn(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        earned = [reward(text, truth) for text, truth in zip(completions, answer, strict=True)]
        means.append(sum(earned) / len(earned))
        return earned

    class Clock(TrainerCallback):  # type: ignore[misc]  # its base has no types here
        """The time at which each step ended."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    rows = job["prompts_per_step"] * job["samples_per_prompt"]
    accumulated = rows // job["micro_batch_rows"]
    arguments: dict[str, Any] = {
        "output_dir": job["folder"],
        "max_steps": job["num_steps"],
        "num_generations": job["samples_per_prompt"],
        "per_device_train_batch_size": job["micro_batch_rows"],
        "gradient_accumulation_steps": accumulated,  # and the whole batch is sampled at once
        "max_completion_length": job["max_tokens"],
        "generation_kwargs": {"min_new_tokens": job["min_tokens"]} if job["min_tokens"] else None,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": job["schedule"],
        "warmup_steps": job["warmup_steps"],
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "loss_type": "grpo",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,  # on by default, and a third slower
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job["seed"],
    }
    config = GRPOConfig(**arguments | job["arguments"])
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
        ),
        reward_funcs=reward_fn,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p, "answer": a} for p, a in job["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock],
    )
    started = time.perf_counter()
    trainer.train()
    ends = [started, *clock.ends]
    return {
        "seconds": [later - earlier for earlier, later in pairwise(ends)],
        "response_tokens": lengths,
        "rewards": means,
    }


def main(job: Path, result: Path) -> None:
    read = json.loads(job.read_text())
    os.environ.setdefault("OMP_NUM_THREADS", str(read["num_threads"]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")}
    result.write_text(json.dumps({**train(read), "versions": versions}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
