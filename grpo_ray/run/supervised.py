"""Supervised steps: the Learner imitates demonstrations, before GRPO or to warm up a tiny model.

The loss is the mean negative log-likelihood of the responses' tokens, in nats: that of REINFORCE on the
demonstrations with an advantage of 1. So a step is the Learner's own, on groups of one response.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.config import AlgorithmConfig, Config, LearnerConfig, SamplingConfig
from grpo_ray.config.sampling import DistillationConfig
from grpo_ray.config.schedule import BufferConfig, WeightSyncConfig
from grpo_ray.config.task import MixtureTaskConfig
from grpo_ray.errors import shown_plainly
from grpo_ray.learning.model_files import end_token_ids, is_local, load_tokenizer, max_positions
from grpo_ray.records.durable import sync_tree
from grpo_ray.records.json_lines import JsonLines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tasks.demonstrations import Demonstration, read_demonstrations
from grpo_ray.tasks.prompts import template_of
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup, StartingModel, TrainBatch

LOGGED = ("optim/grad_norm", "optim/lr", "throughput/trained_tokens", "timing/train_s")
Progress = Callable[[int, int, float], None]
"""(step, number of steps, loss in nats per token)."""
Imitator = Callable[..., Any]
"""(name of a Learner's method, arguments) to its result, which the call waits for."""
# (configuration, model, run directory) -> a context manager: a Learner alone.
LearnerHost = Callable[[Config, StartingModel, Path], AbstractContextManager[Imitator]]


def imitating(config: Config, num_steps: int, batch_size: int, **learner: Any) -> Config:
    """Return the configuration of a Learner that imitates, with the values `learner` of its section."""
    algorithm = {"loss": "reinforce_with_baseline", "aggregation": "token_mean", "num_steps": num_steps}
    schedule = {"warmup_steps": max(1, num_steps // 10), "lr_schedule": "linear", "profile_steps": None}
    values = {**config.learner.model_dump(), **schedule, "slowdown_s": 0.0, "min_lr_ratio": 0.0, **learner}
    if num_steps == 1:  # nothing is left to decay in
        values |= {"warmup_steps": 0, "lr_schedule": "constant"}
    sections = {
        "algorithm": AlgorithmConfig.model_validate({**algorithm, "prompts_per_step": batch_size}),
        "learner": LearnerConfig.model_validate(values),
        "sampling": SamplingConfig(),  # at a temperature of 1, with every token
        "distillation": DistillationConfig(),
        "buffer": BufferConfig(),
        "weight_sync": WeightSyncConfig(),
        "generator": config.generator.model_copy(update={"colocated": False}),  # there are none yet
    }
    return config.model_copy(update=sections)


def imitate(
    learner: Imitator, demonstrations: Sequence[Demonstration], config: Config,
    progress: Progress | None = None, log: JsonLines | None = None,
) -> None:  # fmt: skip
    """Take every step of a configuration made by `imitating`, each on a batch in shuffled order."""
    num_steps = config.algorithm.num_steps
    batches = _batches(demonstrations, config.algorithm.prompts_per_step, f"{config.run.seed}/sft")
    for step, rows in enumerate(islice(batches, num_steps), 1):
        metrics = learner("train_step", _batch_of(rows, step - 1)).metrics
        if log is not None:
            own = {"step": step, "loss/nll": metrics["loss/policy"]}
            log.append(own | {name: metrics[name] for name in LOGGED})
        if progress is not None:
            progress(step, num_steps, metrics["loss/policy"])


def write_weights(learner: Imitator, folder: Path) -> None:
    """Write the model, or the adapter, into an existing folder; the optimizer's state is of no more use."""
    learner("capture")
    learner("write_captured", folder)
    shutil.rmtree(folder / "training")


def _batches(rows: Sequence[Demonstration], size: int, seed: str) -> Iterator[list[Demonstration]]:
    """Yield batches without end, of the rows in another order in every epoch."""
    endless = (row for n in count() for row in random.Random(f"{seed}/{n}").sample(rows, len(rows)))
    while True:
        yield list(islice(endless, size))


def _batch_of(rows: Sequence[Demonstration], version: int) -> TrainBatch:
    """Return a batch in which each response is the only one of its prompt, with an advantage of 1.

    The sampler's logprobs, which this loss does not use, are 0.
    """
    one = np.ones(1, np.float32)
    groups = []
    for number, (prompt, response) in enumerate(rows):
        tokens = np.array(response, np.int32)
        zeros, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), version, np.int32)
        sample = Completion("", tokens, zeros, versions, "stop")
        rollout = RolloutGroup(PromptItem(number, "", prompt, ""), (sample,), "sft")
        groups.append(ScoredGroup(one, one, one, one, rollout=rollout))
    return TrainBatch(tuple(groups))


def check_sft(config: Config) -> None:
    """Refuse supervised steps that are not possible here; raises ValueError with the field or the row."""
    if config.sft is None:
        return
    if config.learner.num_ranks > 1:
        raise ValueError(
            f"sft: supervised steps run on one rank, but learner.num_ranks is {config.learner.num_ranks}; run "
            "them with `grpo-ray sft` and one rank, and set model.path to the folder that it writes"
        )
    if config.model.tiny is not None:
        raise ValueError("sft: a tiny model has a warm-up instead (model.tiny.warmup); remove sft")
    if is_local(path := str(config.model.path)):
        demonstrations_of(config, path)


def demonstrations_of(config: Config, path: str) -> list[Demonstration]:
    """Read `sft.path` for the model at `path`; raises ValueError as `read_demonstrations`."""
    assert config.sft is not None
    trust = config.model.trust_remote_code
    tokenizer, positions = load_tokenizer(path, trust), max_positions(path, trust)
    has_prompt = not (isinstance(config.task, MixtureTaskConfig) or config.episode_tasks)
    template = template_of(config.task) if has_prompt else None  # type: ignore[arg-type]
    ends = end_token_ids(path, tokenizer, trust)
    return read_demonstrations(config.sft, template, tokenizer, ends, positions)


def after_sft(
    config: Config, prepared: Any, run: RunDirectory, host: LearnerHost, progress: Progress
) -> tuple[Config, Any]:
    """Return the configuration, and `prepared` with the model that the first step of GRPO starts from.

    With `sft` that is the model in the run's `sft` folder, or the adapter there. If it is missing, the
    supervised steps are taken first; a run that was killed in them begins them anew.
    """
    if config.sft is None:
        return config, prepared
    if not run.sft.exists():
        _take_steps(config, prepared.model, run, host, progress)
    if config.model.adapter is None:
        return config, replace(prepared, model=replace(prepared.model, path=str(run.sft.resolve())))
    adapter = config.model.adapter.model_copy(update={"path": str(run.sft.resolve())})
    return config.changed(model={"adapter": adapter}), prepared


def _take_steps(
    config: Config, model: StartingModel, run: RunDirectory, host: LearnerHost, progress: Progress
) -> None:
    assert config.sft is not None
    sft = config.sft
    with shown_plainly():
        demonstrations = demonstrations_of(config, model.path)
    imitator = imitating(config, sft.num_steps, sft.batch_size, learning_rate=sft.learning_rate)
    partial = run.path / ".sft.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with host(imitator, model, run.path.resolve()) as learner:
        imitate(learner, demonstrations, imitator, progress, JsonLines(partial / "metrics.jsonl"))
        write_weights(learner, partial.resolve())
    sync_tree(partial)
    partial.rename(run.sft)
