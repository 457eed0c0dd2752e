"""Builders of messages and Learners, and a slow reference for logprobs."""

import csv
import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from grpo_ray.config import Config
from grpo_ray.config.losses import loss_record
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer
from grpo_ray.engines.base import Engine
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.snapshot import as_tensor, unpack_weights
from grpo_ray.types import (
    Completion,
    PromptItem,
    RolloutGroup,
    SamplingSettings,
    ScoredGroup,
    TrainBatch,
    Verdict,
)
from grpo_ray.watch.metrics_catalog import METRICS

ENDS = (0, 17)
MakeLearner = Callable[..., Learner]
"""The fixture `make_learner`, of conftest.py or the file's own."""
TinyModel = Callable[..., Path]
"""The fixture `tiny_model(tied=True, hidden_size=32, own=False)`, which returns a model's folder."""
CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPUS = int(os.environ.get("GRPO_RAY_TEST_GPUS", "0"))
TEST_ENGINE = {"num_gpus": GPUS, "kv_cache_gib": 0.05 if GPUS == 0 else 0.5, "gpu_memory_utilization": 0.2}
"""The `generator` section of tests with vLLM: on a CPU, or with GRPO_RAY_TEST_GPUS=1 on a GPU."""
ROUNDING = 1e-4 if GPUS == 0 else 2e-2  # of vLLM's float32, in nats: its kernels for GPUs multiply in TF32
# A test before may have used CUDA in this process, which a fork cannot then.
os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} if GPUS else {}


class Time:
    """A clock that a test sets."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def make_completion(
    token_ids: Sequence[int], logprobs: Sequence[float] | None = None, versions: int | Sequence[int] = 0,
    text: str = "", finish_reason: str = "stop",
) -> Completion:  # fmt: skip
    """Make a completion; `versions` is one for all tokens, or one per token."""
    length = len(token_ids)
    return Completion(
        text=text,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array([-1.0] * length if logprobs is None else logprobs, dtype=np.float32),
        versions=np.broadcast_to(np.array(versions, dtype=np.int32), (length,)).copy(),
        finish_reason=finish_reason,
    )


def respond(answer: str) -> str:
    """Return a response with an answer in the tags that `r1_zero` reads."""
    return f" I think so. </think> <answer> {answer} </answer>"


def make_item(
    group_id: int = 0, prompt_token_ids: Sequence[int] = (1, 2), truth: str = "", num_cuts: int = 0
) -> PromptItem:
    return PromptItem(group_id, f"prompt {group_id}", tuple(prompt_token_ids), truth, num_cuts)


def make_group(
    item: PromptItem, completions: Sequence[Completion], rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
) -> ScoredGroup:  # fmt: skip
    """Make a scored group; rewards default to 0, and advantages to the rewards."""
    r = np.array([0.0] * len(completions) if rewards is None else rewards, dtype=np.float32)
    a = r if advantages is None else np.array(advantages, dtype=np.float32)
    return ScoredGroup(r, 0 * r, r, a, rollout=RolloutGroup(item, tuple(completions), "generator-0"))


def simple_group(group_id: int, versions: int | list[int] = 0, has_signal: bool = True) -> ScoredGroup:
    """Make a group of two responses of three tokens, with rewards 1 and 0; without signal both are 0."""
    completions = [make_completion([5, 6, 7], versions=versions)] * 2
    return make_group(make_item(group_id), completions, [has_signal, 0], [has_signal, -float(has_signal)])


def parts(group: ScoredGroup, metric: str = "advantage") -> tuple[RolloutGroup, Verdict]:
    """Take a scored group apart, for `TrajectoryBuffer.put`."""
    of_verdict = {field.name: getattr(group, field.name) for field in fields(Verdict) if field.name != "facts"}
    return group.rollout, Verdict(**of_verdict, facts=group.facts_for(metric))


def schedule_config(**sections: Any) -> Config:
    """Make a configuration of groups of two responses, for what needs no model."""
    sections["algorithm"] = {"samples_per_prompt": 2, **sections["algorithm"]}
    return Config.model_validate({"model": {"path": "m"}, "task": {"kind": "sorting"}, **sections})


def make_buffer(
    rollouts: Path | None = None, checkpoint: Path | None = None, *, size: int = 2, max_bytes: int = 2**30,
    masks_old: bool = False, num_replayed: int = 0, replay: dict[str, Any] | None = None, seed: int = 0,
) -> TrajectoryBuffer:  # fmt: skip
    """Make a buffer with batches of `size` fresh groups and `num_replayed` earlier ones."""
    prompts = size + num_replayed
    config = schedule_config(
        run={"seed": seed},
        algorithm={"num_steps": 100, "prompts_per_step": prompts},
        buffer={"max_gib": max_bytes / 2**30, "replay": {"frac": num_replayed / prompts, **(replay or {})}},
        episodes={"over_age": "mask" if masks_old else "wait"},
    )
    return TrajectoryBuffer(config, rollouts, checkpoint)


def make_scorer(reward: Any = "exact_match", **sections: Any) -> Scorer:
    """Make a Scorer of answers to one task, with these sections of the configuration."""
    task = {"kind": "sorting", "reward": reward}
    return Scorer(schedule_config(**{"task": task, "algorithm": {}, **sections}))


def same_groups(actual: Sequence[ScoredGroup], expected: Sequence[ScoredGroup]) -> bool:
    """Compare every field, and every bit of every array, -0.0 and nan included."""
    return [_plain(group) for group in actual] == [_plain(group) for group in expected]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return type(value), value


def make_settings(**changes: object) -> SamplingSettings:
    settings = {"num_samples": 1, "temperature": 1.0, "top_p": 1.0, "min_tokens": 0, "max_tokens": 8}
    return SamplingSettings(**{**settings, **changes})  # type: ignore[arg-type]


def rows_of(
    model: PreTrainedModel, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0,
    min_tokens: int = 0, end_token_ids: Sequence[int] = (),
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Compute the log-distributions `[vocab]` that each response's tokens were drawn from, in one pass.

    The padding comes after a row's own tokens, which attend to none of it.
    """
    texts = [([int(token) for token in (*prompt, *response)], len(prompt)) for prompt, response in pairs]
    width = max(len(text) for text, _ in texts)
    ids = torch.tensor([text + [0] * (width - len(text)) for text, _ in texts])
    logits, result = model(input_ids=ids, use_cache=False).logits.float() / temperature, []
    for own, (text, start) in zip(logits, texts, strict=True):
        rows = own[start - 1 : len(text) - 1].clone()
        rows[:min_tokens, list(end_token_ids)] = -torch.inf
        result.append(list(torch.log_softmax(rows, dim=1)))
    return result


def plain_rows(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], *args: Any
) -> list[torch.Tensor]:
    """Compute one response's log-distributions, without padding; see `rows_of`."""
    return rows_of(model, [(prompt, response)], *args)[0]


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], *args: Any
) -> torch.Tensor:
    """Compute the logprob of every response token, `[response_tokens]`, by a loop; see `plain_rows`."""
    rows = plain_rows(model, prompt, response, *args)
    return torch.stack([row[int(token)] for row, token in zip(rows, response, strict=True)])


@torch.no_grad()
def logprobs_over_kept_cache(
    models: Sequence[Any], prompt: Sequence[int], completion: Completion, settings: SamplingSettings
) -> np.ndarray:
    """Compute a response's logprobs where each version reads the keys and values that earlier ones computed."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    versions, cache, rows, start = completion.versions, DynamicCache(), [], 0
    for version in np.unique(versions):
        # The last token that a version draws is the first that the next computes.
        end = len(prompt) + int(np.flatnonzero(versions == version)[-1])
        rows.append(models[version](tokens[:, start:end], past_key_values=cache, use_cache=True).logits[0])
        start = end
    logits = torch.cat(rows)[len(prompt) - 1 :] / settings.temperature
    logits[: settings.min_tokens, list(settings.end_token_ids)] = -torch.inf
    return torch.log_softmax(logits, dim=1).gather(1, tokens[0, len(prompt) :, None].long())[:, 0].numpy()


@torch.no_grad()
def logprob_error(
    model: Any, prompt: Sequence[int], completion: Completion, settings: SamplingSettings
) -> np.ndarray:
    """Return |engine - model| of every token, `[response_tokens]`; the model computes all of them at once."""
    own = plain_logprobs(model, prompt, completion.token_ids, settings.temperature, settings.min_tokens, ENDS)
    return np.abs(own.numpy() - completion.logprobs)


async def update(engine: Engine, snapshot: WeightSnapshot) -> None:
    """Replace the engine's weights, as a Generator does."""
    await engine.stage(snapshot)
    await engine.pause()
    await engine.load()
    await engine.finish(snapshot.version)
    await engine.resume()


def tensors_of(snapshot: WeightSnapshot) -> dict[str, torch.Tensor]:
    return dict(unpack_weights(snapshot.specs, as_tensor(snapshot.data)))


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Add noise to every weight, biases and norms included, so that omitting one is noticed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a file of rows, of the kind that its suffix names; return its path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a model's weights; `change` changes the tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def clip_range(loss: str, low: float) -> dict[str, float]:
    """Return the field `cliprange` for the losses that have one."""
    return {"cliprange": low} if loss_record(loss).epsilons is not None else {}


def changed(config: Config, **changes: dict[str, Any]) -> Config:
    """Return the configuration with fields of its sections changed."""
    data = config.model_dump()
    for section, values in changes.items():
        data[section] |= values
    return Config.model_validate(data)


def trained_so(checkpoint: Path) -> None:
    """Make a checkpoint look whole although its files were changed, as an attacker can."""
    path = checkpoint / "training" / "state.json"
    data = json.loads(path.read_text())
    sizes = {f: (checkpoint / f).stat().st_size for f in data["files"] if (checkpoint / f).exists()}
    path.write_text(json.dumps(data | {"files": sizes, "crc32": {}, "seal": None}))


def make_batch(learner: Learner, seed: int = 0, noise: float = 0.3, versions: int = 0) -> list[ScoredGroup]:
    """Make 4 groups of 3 of various shapes, with behaviour logprobs that are the Learner's plus noise.

    Group 1 has no advantages (all rewards 1) and group 3 neither advantages nor rewards.
    """
    rng = np.random.default_rng(seed)
    all_rewards = [[1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]
    all_advantages = [[1.2, -0.6, -0.6], [0, 0, 0], [-1.1, 0.5, 0.6], [0, 0, 0]]
    groups = []
    if learner._config.algorithm.loss == "no_baseline":  # as the Scorer does
        all_advantages = all_rewards
    for group_id, (rewards, advantages) in enumerate(zip(all_rewards, all_advantages, strict=True)):
        prompt = rng.integers(20, 280, rng.integers(1, 9)).tolist()
        completions = []
        for _ in rewards:
            response = rng.integers(20, 280, rng.integers(1, 13)).tolist()
            drift = rng.normal(0, noise, len(response)).tolist()  # the Learner's logprobs are added below
            completions.append(make_completion(response, drift, versions))
        groups.append(make_group(make_item(group_id, prompt), completions, rewards, advantages))
    drawn = [(g.rollout.item.prompt_token_ids, c) for g in groups for c in g.rollout.completions]
    sampling = learner._config.sampling
    with torch.no_grad():
        pairs = [(prompt, c.token_ids) for prompt, c in drawn]
        found = rows_of(learner.model, pairs, sampling.temperature, sampling.min_tokens, ENDS)
    for (_, c), rows in zip(drawn, found, strict=True):
        c.logprobs[:] += [row[token].item() for row, token in zip(rows, c.token_ids, strict=True)]
    return groups


def train_step(learner: Learner, seed: int = 0) -> dict[str, float]:
    """Train a step on a batch of `make_batch` that was sampled by the current version; return its metrics."""
    groups = make_batch(learner, seed=seed, versions=learner.version)
    return learner.train_step(TrainBatch(tuple(groups))).metrics


def own_logprobs(learner: Learner, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    sampling = learner._config.sampling
    return plain_logprobs(learner.model, prompt, response, sampling.temperature, sampling.min_tokens, ENDS)


def gradient(learner: Learner) -> torch.Tensor:
    """Return the flat gradient of the float32 weights, 0 for those that have none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.masters.parameters]
    return torch.cat([gradient.flatten().clone() for gradient in gradients])


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def written(learner: Learner, folder: Path) -> Path:
    """Write the Learner's checkpoint to a new folder; return the folder."""
    folder.mkdir()
    learner.capture()
    learner.write_captured(folder)
    return folder


def resume(learner: Learner, folder: Path) -> Learner:
    """Make a Learner resume from a folder, with another Learner's configuration."""
    torch.manual_seed(12345)  # the process may have drawn random numbers before
    return Learner(str(folder), learner._config, ENDS, folder / "training")


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of any written file: beyond it writes fail with EFBIG (a full disk gives ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_names(metrics: Iterable[str]) -> list[str]:
    """Return the names that the catalog does not know."""
    return [name for name in metrics if not any(fnmatchcase(name, known) for known in METRICS)]
