"""Seconds, utilization and peak memory of whole steps, each case in a process of its own on a GPU."""

import gc
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gpu_page.shapes import SHAPES, build_model, make_batch
from gpu_page.steps import LearnerStep, PlainStep, step_config
from grpo_ray.learning.sequences import lengths_of
from grpo_ray.watch.flops import ModelSize, num_tokens, peak_flops

GIB = 2**30
NO_CHECKPOINTING = ("false", "none")
TIMEOUT_S = 300
BYTES_PER_PARAMETER = {True: 18, False: 10}
"""Weights in float32 and bfloat16 and their gradients in float32; with an update AdamW's two moments, too."""


@dataclass(frozen=True)
class Case:
    """One workload, computed in one way."""

    model: str
    way: str  # plain, repeated or shared
    response_tokens: int
    prompt_tokens: int = 512
    num_groups: int = 1
    samples_per_prompt: int = 8
    micro_batch_tokens: int = 16_384
    dtype: str = "bfloat16"
    attention: str = "auto"
    compile: str = "false"
    checkpointing: str = "false"
    has_optimizer: bool = True
    overrides: tuple[str, ...] = ()  # further changes to the Learner's configuration
    rounds: int = 3

    @property
    def learner_overrides(self) -> list[str]:
        """The configuration of the Learner that the case stands for."""
        values = {
            "model.dtype": self.dtype,
            "model.attention": self.attention,
            "learner.share_prompts": "auto" if self.way == "shared" else "never",
            "learner.micro_batch_tokens": self.micro_batch_tokens,
            "learner.gradient_checkpointing": self.checkpointing,
        }
        if self.compile != "false":
            values["learner.compile"] = self.compile
        return [f"{name}={value}" for name, value in values.items()] + list(self.overrides)


def run_case(
    case: Case, device: torch.device, peak_tflops: float | None, command: list[str],
    memory_bytes: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; one that does not fit is measured again without the optimizer's update and state.

    On a GPU each case has a process of its own (`command` and the case), so that none inherits memory, and
    a failing kernel ends one case alone. What cannot fit is not tried.
    """
    if too_large(case, memory_bytes):
        found = {"case": asdict(case), "out_of_memory": True, "phase": "not tried: its state alone is larger"}
    else:
        found = _run(case, device, peak_tflops, command)
    if found.get("out_of_memory") and case.has_optimizer:
        smaller = replace(case, has_optimizer=False)
        found["without_optimizer"] = run_case(smaller, device, peak_tflops, command, memory_bytes)
    return found


def too_large(case: Case, memory_bytes: float) -> bool:
    """Return whether weights, gradients and optimizer state alone exceed the memory."""
    parameters = build_model(case.model, torch.device("meta")).num_parameters()
    return bool(parameters * BYTES_PER_PARAMETER[case.has_optimizer] > memory_bytes)


def _run(case: Case, device: torch.device, peak_tflops: float | None, command: list[str]) -> dict[str, Any]:
    if device.type == "cpu":
        return measure(case, device, peak_tflops)
    request = json.dumps({"case": asdict(case), "peak_tflops": peak_tflops})
    try:
        done = subprocess.run([*command, request], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"case": asdict(case), "error": f"not done after {TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"case": asdict(case), "error": " ".join(done.stderr.strip().splitlines()[-2:])[-300:]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def measure(case: Case, device: torch.device, peak_tflops: float | None) -> dict[str, Any]:
    """Measure a case here; running out of memory is a result.

    Returns:
        `case` and either `out_of_memory` and the phase it happened in, or the medians in seconds with their
        rates: `tokens_per_s` counts prompts once per group, and `mfu` model FLOPs alone (watch/flops.py).
    """
    found: dict[str, Any] = {"case": asdict(case)}
    try:
        step, found["phase"] = None, "building the model and its state"
        step = _make_step(case, device)
        found |= _timed(case, step, device, peak_tflops, found)
        del found["phase"]
    except torch.cuda.OutOfMemoryError:
        found["out_of_memory"] = True
    del step
    gc.collect()
    return found


def _make_step(case: Case, device: torch.device) -> LearnerStep | PlainStep:
    if case.way == "plain":
        model = build_model(case.model, device, is_plain=True)
        dtype = getattr(torch, case.dtype)
        return PlainStep(
            model, device, dtype, case.micro_batch_tokens, case.checkpointing not in NO_CHECKPOINTING
        )
    config = step_config(device, case.learner_overrides)
    return LearnerStep(build_model(case.model, device), config, device)


def _timed(
    case: Case, step: LearnerStep | PlainStep, device: torch.device, peak_tflops: float | None,
    found: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    lengths = [case.response_tokens] * (case.num_groups * case.samples_per_prompt)
    vocab = SHAPES[case.model].vocab_size
    sequences = make_batch(vocab, case.prompt_tokens, lengths, case.samples_per_prompt)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    passes: list[float] = []
    updates: list[float] = []
    for number in range(1 + case.rounds):  # the first compiles, tunes and makes the optimizer's state
        found["phase"] = "forward and backward"
        passed = seconds_of(lambda: step.forward_backward(sequences), device)
        found["phase"] = "update"
        updated = seconds_of(step.update, device) if case.has_optimizer else 0.0
        if number:
            passes.append(passed)
            updates.append(updated)
    model = step._model
    of_batch = lengths_of(sequences)
    passes_s, update_s = statistics.median(passes), statistics.median(updates)
    flops = ModelSize.of(model).training_flops(of_batch)
    if peak_tflops:
        peak: float | None = 1e12 * peak_tflops
    elif device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), getattr(torch, case.dtype))
    else:
        peak = None
    result: dict[str, Any] = {
        "forward_backward_s": passes_s,
        "update_s": update_s,
        "tokens_per_s": num_tokens(of_batch) / (passes_s + update_s),
        "model_tflops_per_s": flops / (passes_s + update_s) / 1e12,
        "mfu": None if peak is None else flops / (passes_s + update_s) / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
    }
    if isinstance(step, LearnerStep):
        result |= {"computed_tokens": step.sums["computed_tokens"], "kernel": step.kernel, "notes": step.notes}
    return result


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
