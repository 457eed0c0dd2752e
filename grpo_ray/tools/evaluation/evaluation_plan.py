"""The plan of an evaluation, complete before anything is started."""

import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import make_config
from grpo_ray.config.user_code import import_from
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.records.resumable_folder import ResumableFolder
from grpo_ray.records.run_files import step_name
from grpo_ray.run.machine import on_this_machine
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.input_digests import input_digests
from grpo_ray.tools.evaluation.subject import Subject, Weights, choose_task, find_subject
from grpo_ray.tools.look import EvaluationOptions
from grpo_ray.tools.trust import IGNORED, code_in, code_of_base, is_ignored, refuse_code
from grpo_ray.types import PromptItem


@dataclass(frozen=True)
class EvaluationPlan:
    """The weights to evaluate, the prompts, the sampling settings and the folder."""

    subject: Subject
    config: Config  # with the temperature and top_p of the options, which training would refuse
    model_config: Config  # builds a tiny model, which keeps its own task whatever task is evaluated
    num_samples: int
    limit: int | None
    folder: ResumableFolder
    command: str  # as typed, with the folder, to resume
    is_local: bool

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that two starts of one evaluation have in common, except for the prompts themselves."""
        sections = {"model", "task", "sampling"} | ({"episodes"} if self.config.episode_tasks else set())
        config = self.config.model_dump(mode="json", include=sections)
        config["sampling"]["num_samples"] = self.num_samples
        weights = {str(w.folder or "model"): self._files_digest(w) for w in self.subject.weights}
        return {**config, "weights": weights, "seed": self.config.run.seed, "limit": self.limit}

    def _files_digest(self, weights: Weights) -> str:
        """Return a digest that changes when the weights in the folder change; a tiny model has none yet."""
        path = weights.folder or self.config.model.path
        files = sorted(Path(path).glob("*.safetensors")) if path is not None else []
        return _digest(repr((file.name, file.stat().st_size, file.stat().st_mtime_ns)) for file in files)

    def definition_with(self, items: Sequence[PromptItem], examples: Sequence[Example]) -> dict[str, Any]:
        """Return the definition with digests: contents of files and of reward modules may change."""
        inputs = input_digests(self.config, {}, [], examples)
        digest = _digest(json.dumps([item.task, item.prompt, item.ground_truth]) for item in items)
        return {**self.definition, "prompts": f"{len(items)} of sha256 {digest}", "inputs": inputs}

    def folder_of(self, weights: Weights) -> Path:
        """Return the folder for the results of these weights; each of several has its own."""
        path = self.folder.path
        return path if len(self.subject.weights) == 1 else path / step_name(weights.step)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def plan_evaluation(options: EvaluationOptions) -> EvaluationPlan:
    """Return the plan for these options.

    Raises:
        ConfigError, RunError: the options, the configuration, the run or the model; says what to change.
    """
    with shown_plainly():
        subject = _with_trust(find_subject(options.target, options.checkpoint), options)
        data = choose_task(subject.data, options)
    overrides = list(options.overrides)
    if options.max_tokens is not None:
        overrides.append(f"sampling.max_tokens={options.max_tokens}")
    if options.local and make_config(data, overrides, subject.source).generator.engine == "vllm":
        overrides.append("generator.engine=torch")
    config, notice = on_this_machine(make_config(data, overrides, subject.source), options.local)
    if notice is not None:
        subject = replace(subject, notices=(*subject.notices, notice))
    if (adapter := config.model.adapter) is not None and adapter.path is not None:
        initial = Weights(0, Path(adapter.path))
        subject = replace(subject, weights=tuple(w if w.folder else initial for w in subject.weights))
    model_config = config
    if config.model.tiny is not None:
        of_model = make_config(subject.data, _of_model(subject, options), subject.source)
        model_config = on_this_machine(of_model)[0]
    if options.run_reward_code:
        import_from(Path(subject.source).resolve().parent / "given")  # of a run that Python began
    if not (subject.is_own or options.run_reward_code):
        typed = [options.reward or "", *options.overrides]
        refuse_code(code_in(config), typed)
        if any(w.folder is None or w.is_adapter for w in subject.weights):  # a tiny base has its own task
            refuse_code(code_of_base(model_config), typed)
    num_samples = options.num_samples or config.evaluation.samples_per_prompt
    if options.temperature == 0 and num_samples > 1:
        raise RunError(f"--n: greedy sampling (--temperature 0) gives {num_samples} equal responses; give 1")
    asked = {"temperature": options.temperature, "top_p": options.top_p}
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = config.sampling.model_copy(update=given)  # not validated: training would refuse these values
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = options.output or f"evaluations/{subject.name}-{stamp}"
    results = ResumableFolder(Path(folder), "evaluation.json", "evaluation", "give another --output")
    return EvaluationPlan(
        subject, _serving(config).model_copy(update={"sampling": sampling}), model_config, num_samples,
        options.limit, results, _again(subject, options, folder), options.local,
    )  # fmt: skip


def _again(subject: Subject, options: EvaluationOptions, output: str) -> str:
    """Return what resumes the evaluation, with the checkpoint, as the run may go on, and the folder."""
    is_chosen = options.checkpoint is not None or not subject.is_run
    folder = None if is_chosen else subject.weights[0].folder
    more = {"checkpoint": folder.name} if folder and folder.name != Path(options.target).name else {}
    more |= {} if options.output else {"output": output}
    if not options.typed.startswith("grpo-ray"):  # a call from Python
        return options.typed + " with " * bool(more) + ", ".join(f"{k}={v!r}" for k, v in more.items())
    return options.typed + "".join(f" --{name} {shlex.quote(value)}" for name, value in more.items())


def _with_trust(subject: Subject, options: EvaluationOptions) -> Subject:
    """Return the subject with the command line's word on the model's code; the user's own file has one, too."""
    model = subject.data.get("model")
    if not isinstance(model, dict) or (subject.is_own and not options.trust_remote_code):
        return subject
    data = {**subject.data, "model": {**model, "trust_remote_code": options.trust_remote_code}}
    ignored = (IGNORED,) if is_ignored(model, options.trust_remote_code) else ()
    return replace(subject, data=data, notices=(*subject.notices, *ignored))


def _of_model(subject: Subject, options: EvaluationOptions) -> list[str]:
    """Return the overrides for building a tiny model; none for a run, because its model is fixed."""
    if subject.is_run:
        return []
    return [o for o in options.overrides if options.task is None or not o.startswith("task.")]


def _serving(config: Config) -> Config:
    """Return the configuration for serving alone: without a Learner, and without sharing its device."""
    data = config.model_dump()
    data["learner"] |= {"num_gpus": 0, "num_cpus": 0}
    data["generator"] |= {"colocated": False, "slowdown_s": 0.0}
    data["distillation"] |= {"teacher": None}
    # Nothing is trained, so no function of the run's own is imported.
    data["algorithm"] |= {"loss": "grpo_clip", "loss_options": {}}
    data["algorithm"] |= {"off_policy_correction": "none", "correction_options": {}}
    for limit in config.algorithm.limits:
        del data["algorithm"][limit]
    data["algorithm"] |= {"advantage": "raw", "advantage_options": {}, "advantage_scale": "group", "kl": {}}
    data["weight_sync"] |= {"transport": "object_store", "send": "merged"}  # folders of whole models, too
    return Config.model_validate(data)
