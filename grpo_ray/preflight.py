"""Everything a run can get wrong, checked before anything expensive starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo_ray.config import Config
from grpo_ray.policy.loading import (
    check_hub_model,
    check_lengths,
    check_local_model,
    end_token_ids,
    is_local,
    load_tokenizer,
    max_positions,
)
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_ledger import PromptLedger, make_items
from grpo_ray.tasks.prompts import load_template
from grpo_ray.types import PromptItem, SamplingSettings

WarmupProgress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class TaskData:
    """The task's examples and template, read and checked."""

    train: Sequence[Example]
    validation: Sequence[Example]
    template: str
    longest_prompt: int | None = None  # tokens; None for a hub's model, whose tokenizer is not here yet


@dataclass(frozen=True)
class Prepared:
    """What the actors and the controller start from."""

    model_path: str
    ledger: PromptLedger
    validation: Sequence[PromptItem]
    end_token_ids: tuple[int, ...]
    longest_prompt: int  # tokens
    max_model_len: int  # tokens


def check_files(config: Config) -> TaskData:
    """Read the task, and the model if it is here; seconds, and without Ray.

    Raises:
        ValueError: names the field or file, what is wrong with it, and the fix.
    """
    if config.model.tiny is not None and config.task.kind != "sorting":
        raise ValueError(
            "model.tiny: its warm-up knows only the task `sorting`; set model.path for a task from files"
        )
    if config.model.path is not None and is_local(config.model.path):
        check_local_model(config.model.path)
    train, validation = load_examples(config.task, config.run.seed)
    task = TaskData(train, validation, load_template(config.task.prompt))
    if config.model.path is None or is_local(config.model.path):
        task = replace(task, longest_prompt=_check_fit(config, task))
    return task


def prepare(config: Config, task: TaskData, progress: WarmupProgress | None = None) -> Prepared:
    """Find, fetch or build the model.

    Raises:
        ValueError: the hub does not give the model, or it is too short for the prompts and
            `sampling.max_tokens`.
    """
    if config.model.tiny is not None:
        from grpo_ray.policy.tiny import tiny_model_folder

        model_path = str(tiny_model_folder(config, progress))
    else:
        assert config.model.path is not None
        model_path = config.model.path
        if not is_local(model_path):
            check_hub_model(model_path)
    longest = _check_fit(config, task) if task.longest_prompt is None else task.longest_prompt
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    return Prepared(
        model_path=model_path,
        ledger=PromptLedger(task.train, task.template, tokenizer, config.run.seed),
        validation=make_items(task.validation, task.template, tokenizer),
        end_token_ids=end_token_ids(model_path, tokenizer),
        longest_prompt=longest,
        max_model_len=config.generator.max_model_len or longest + config.sampling.max_tokens,
    )


def _check_fit(config: Config, task: TaskData) -> int:
    """The longest prompt of train and validation, in tokens, after making sure that it fits the model."""
    if config.model.tiny is not None:
        from grpo_ray.policy.tiny import tiny_tokenizer

        tokenizer = tiny_tokenizer(config)
        positions: int | None = config.model.tiny.max_position_embeddings
    else:
        assert config.model.path is not None
        path, trust = config.model.path, config.model.trust_remote_code
        tokenizer, positions = load_tokenizer(path, trust), max_positions(path, trust)
    items = make_items([*task.train, *task.validation], task.template, tokenizer)
    longest = max(len(item.prompt_token_ids) for item in items)
    check_lengths(longest, config.sampling.max_tokens, positions, "the model's positions")
    limit = config.generator.max_model_len
    check_lengths(longest, config.sampling.max_tokens, limit, "generator.max_model_len")
    return longest


def sampling_settings(config: Config, ends: tuple[int, ...], num_samples: int) -> SamplingSettings:
    """The configured sampling, for training and evaluation alike."""
    sampling = config.sampling
    return SamplingSettings(
        num_samples=num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        end_token_ids=ends,
    )
