"""Everything an evaluation is, before anything of it is started."""

import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import make_config
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.tools.evaluation.arguments import EvaluationOptions
from grpo_ray.tools.evaluation.subject import Subject, Weights, find_subject
from grpo_ray.tools.evaluation.task_choice import choose_task
from grpo_ray.types import PromptItem


@dataclass(frozen=True)
class Plan:
    """What is asked of which weights, and how."""

    subject: Subject
    config: Config
    model_config: Config  # what a tiny model is built by: its own task, whatever is asked here
    num_samples: int
    temperature: float
    top_p: float
    limit: int | None
    folder: Path
    command: str  # to be typed again, with the folder

    @property
    def asked(self) -> dict[str, Any]:
        """What makes an evaluation the same as another, but for the prompts themselves."""
        config = self.config.model_dump(mode="json", include={"model", "task", "sampling"})
        config["sampling"] |= {
            "num_samples": self.num_samples, "temperature": self.temperature, "top_p": self.top_p,
        }  # fmt: skip
        weights = {str(w.folder or "model"): self._files_digest(w) for w in self.subject.weights}
        return {**config, "weights": weights, "seed": self.config.run.seed, "limit": self.limit}

    def _files_digest(self, weights: Weights) -> str:
        """Another when other weights were written into the folder; a model built here has none yet."""
        path = weights.folder or self.config.model.path
        files = sorted(Path(path).glob("*.safetensors")) if path is not None else []
        return _digest(repr((file.name, file.stat().st_size, file.stat().st_mtime_ns)) for file in files)

    def folder_of(self, weights: Weights) -> Path:
        """Where the results of these weights go: of several, each has a folder of its own."""
        return self.folder if len(self.subject.weights) == 1 else self.folder / step_name(weights.step)


def asked_of(plan: Plan, items: Sequence[PromptItem]) -> dict[str, Any]:
    """`plan.asked` with the prompts and ground truths, whose files may change while their names do not."""
    digest = _digest(json.dumps([item.task, item.prompt, item.ground_truth]) for item in items)
    return {**plan.asked, "prompts": f"{len(items)} of sha256 {digest}"}


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def make_plan(options: EvaluationOptions) -> Plan:
    """Raises ConfigError or RunError."""
    subject = find_subject(options.target, options.checkpoint)
    with shown_plainly():
        data = choose_task(subject.data, options.choice)
    overrides = list(options.overrides)
    if options.max_tokens is not None:
        overrides.append(f"sampling.max_tokens={options.max_tokens}")
    config = make_config(data, overrides, subject.source)
    model_config = config
    if config.model.tiny is not None:
        model_config = make_config(subject.data, _of_model(subject, options), subject.source)
    sampling = config.sampling
    temperature = sampling.temperature if options.temperature is None else options.temperature
    num_samples = options.num_samples or config.evaluation.samples_per_prompt
    if temperature == 0 and num_samples > 1:
        raise RunError(f"--n: greedy sampling (--temperature 0) gives {num_samples} equal responses; give 1")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = options.output or f"evaluations/{subject.name}-{stamp}"
    return Plan(
        subject,
        _serving(config),
        model_config,
        num_samples,
        temperature,
        sampling.top_p if options.top_p is None else options.top_p,
        options.choice.limit,
        Path(folder),
        options.command if options.output else f"{options.command} --output {shlex.quote(folder)}",
    )


def _of_model(subject: Subject, options: EvaluationOptions) -> list[str]:
    """The overrides that a tiny model is built with: none of a run, which began with what it began with."""
    if subject.is_run:
        return []
    is_replaced = options.choice.task is not None
    return [o for o in options.overrides if not (is_replaced and o.startswith("task."))]


def _serving(config: Config) -> Config:
    """Without what only training wants: no Learner, and nobody to share a device with."""
    data = config.model_dump()
    data["learner"] |= {"num_gpus": 0, "num_cpus": 0}
    data["generator"] |= {"colocated": False, "slowdown_s": 0.0}
    data["weight_sync"] |= {"transport": "object_store"}
    return Config.model_validate(data)
