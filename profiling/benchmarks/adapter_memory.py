"""The Learner's state and its weight syncs with all weights and with an adapter, one process per case."""

import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import make_batch, make_learners, model_folder

TITLE = "the Learner's state and weight syncs: all weights, LoRA, and LoRA on a 4-bit base"
SHAPE = {  # 102 million parameters
    "hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "intermediate_size": 2304,
    "vocab_size": 24576,
}  # fmt: skip
QUICK = {"hidden_size": 64, "num_layers": 2, "intermediate_size": 128}
LORA = "model.adapter.rank=16"
CASES = {
    "all weights": [],
    "LoRA, rank 16": [LORA],
    "LoRA, rank 16, nf4 base": [LORA, "model.base_quantization=nf4"],
}
MIB = 2**20


def run(options: Options) -> list[Row]:
    rows = []
    # A new process per case has no memory that an earlier one left behind.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=None if options.quick else 1) as pool:
        for case, overrides in CASES.items():
            facts = pool.submit(measure, overrides, options.quick).result()
            seconds = facts.pop("snapshot seconds")
            rows.append(Row(case, (seconds,), next(iter(CASES)), 1, "snapshots", facts))
    return rows


def measure(overrides: list[str], quick: bool) -> dict[str, float]:
    """Train one step; return the state's MiB, the parameters that are trained, and facts of a sync."""
    torch.set_num_threads(1)
    shape = [f"model.tiny.{name}={value}" for name, value in (QUICK if quick else SHAPE).items()]
    small = [*shape, "model.dtype=bfloat16", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"]
    with model_folder(shape) as folder:
        learner: Any = make_learners(folder, {"": [*small, *overrides]}, quick=False)[""]
        learner.train_step(make_batch(learner._config, 0))
        gc.collect()
        started = time.perf_counter()
        snapshot, _ = learner.snapshot()
        seconds = time.perf_counter() - started
        learner.capture()
        captured = learner._captured
        saved = {
            tensor.data_ptr(): tensor for tensor in (*captured.weights.values(), *captured.training.values())
        }
    trained = learner.masters.parameters
    return {
        "snapshot seconds": seconds,
        "state MiB": sum(tensor.nbytes for tensor in _state(learner)) / MIB,
        "trained parameters": float(sum(parameter.numel() for parameter in trained)),
        "trained weights, bfloat16, MiB": 2 * sum(parameter.numel() for parameter in trained) / MIB,
        "sync MiB": snapshot.num_bytes / MIB,
        "checkpoint MiB": sum(tensor.nbytes for tensor in saved.values()) / MIB,
    }


def _state(learner: Any) -> list[torch.Tensor]:
    """Return all that lasts from step to step: weights, masters, gradients and moments."""
    found = [*learner.model.parameters(), *learner.masters.parameters]
    for parameter in learner.model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            found += [state.absmax, state.state2.absmax]
    found += [parameter.grad for parameter in learner.masters.parameters if parameter.grad is not None]
    found += [
        value
        for state in learner._optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    return list({tensor.data_ptr(): tensor for tensor in found}.values())
