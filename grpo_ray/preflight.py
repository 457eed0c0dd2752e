"""Everything a run can get wrong, checked before anything expensive starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.policy.loading import (
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
    """Read the task and look at the model's folder; seconds, and without Ray.

    Raises:
        ValueError: names the field or file, what is wrong with it, and the fix.
    """
    if config.model.path is not None and is_local(config.model.path):
        check_local_model(config.model.path)
    if config.model.tiny is not None and config.task.kind != "sorting":
        raise ValueError(
            "model.tiny: its warm-up knows only the task `sorting`; set model.path for a task from files"
        )
    train, validation = load_examples(config.task, config.run.seed)
    return TaskData(train, validation, load_template(config.task.prompt))


def prepare(config: Config, task: TaskData, progress: WarmupProgress | None = None) -> Prepared:
    """Find (or build) the model, and check that prompts and responses fit it.

    Raises:
        ValueError: the model cannot be read, or is too short for the prompts and `sampling.max_tokens`.
    """
    if config.model.tiny is not None:
        from grpo_ray.policy.tiny import tiny_model_folder

        model_path = str(tiny_model_folder(config, progress))
    else:
        assert config.model.path is not None
        model_path = config.model.path
    trust = config.model.trust_remote_code
    try:
        tokenizer = load_tokenizer(model_path, trust)
        positions = max_positions(model_path, trust)
    except OSError as error:
        raise ValueError(
            f"model.path: {model_path!r} is neither a folder here nor a model the hub gave us: {error}"
        ) from error
    ledger = PromptLedger(task.train, task.template, tokenizer, config.run.seed)
    validation = make_items(task.validation, task.template, tokenizer)
    longest = longest_prompt(task, tokenizer)
    max_model_len = config.generator.max_model_len or longest + config.sampling.max_tokens
    check_lengths(longest, config.sampling.max_tokens, positions)
    check_lengths(longest, config.sampling.max_tokens, max_model_len)
    return Prepared(
        model_path, ledger, validation, end_token_ids(model_path, tokenizer), longest, max_model_len
    )


def longest_prompt(task: TaskData, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the longest rendered prompt of train and validation, in tokens."""
    items = make_items([*task.train, *task.validation], task.template, tokenizer)
    return max(len(item.prompt_token_ids) for item in items)


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
