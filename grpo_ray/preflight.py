"""Everything a run can get wrong, checked before anything expensive starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NoReturn

from grpo_ray.config import Config
from grpo_ray.config_task import FileTaskConfig
from grpo_ray.policy.loading import (
    check_hub_model,
    check_lengths,
    check_local_model,
    check_vocabulary,
    end_token_ids,
    is_local,
    load_tokenizer,
    max_positions,
)
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.prompt_ledger import PromptLedger, Tokenizer, make_items
from grpo_ray.tasks.prompt_lengths import Lengths, check_cut, count_tokens, cut_notices, skip_long
from grpo_ray.tasks.prompts import load_template
from grpo_ray.types import PromptItem

WarmupProgress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class TaskData:
    """The task's examples and template, read and checked."""

    train: Sequence[Example]
    validation: Sequence[Example]
    template: str
    notices: tuple[str, ...] = ()  # what was left out or cut, a line each
    longest_prompt: int | None = None  # tokens; None for a hub's model, whose tokenizer is not here yet
    max_prompt_tokens: int | None = None  # longer prompts are cut on the left; None: none is longer


@dataclass(frozen=True)
class Prepared:
    """What the actors and the controller start from."""

    model_path: str
    ledger: PromptLedger
    validation: Sequence[PromptItem]
    end_token_ids: tuple[int, ...]
    longest_prompt: int  # tokens
    max_model_len: int  # tokens
    notices: tuple[str, ...] = ()  # the task's, complete now that the tokenizer is here


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
    examples = load_examples(config.task, config.run.seed)
    task = TaskData(
        examples.train, examples.validation, load_template(config.task.prompt), notices=examples.notices
    )
    if config.model.path is None or is_local(config.model.path):
        task = _fit_prompts(config, task)
    return task


def prepare(config: Config, task: TaskData, progress: WarmupProgress | None = None) -> Prepared:
    """Find, fetch or build the model.

    Raises:
        ValueError: the hub does not give the model, or it does not fit its tokenizer, or is too short for
            the prompts and `sampling.max_tokens`.
    """
    if config.model.tiny is not None:
        from grpo_ray.policy.tiny import tiny_model_folder

        model_path = str(tiny_model_folder(config, progress))
    else:
        assert config.model.path is not None
        model_path = config.model.path
        if not is_local(model_path):
            check_hub_model(model_path)
    if task.longest_prompt is None:
        task = _fit_prompts(config, task)
    longest = task.longest_prompt
    assert longest is not None
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    cut = task.max_prompt_tokens
    return Prepared(
        model_path=model_path,
        ledger=PromptLedger(task.train, task.template, tokenizer, config.run.seed, cut),
        validation=make_items(task.validation, task.template, tokenizer, cut),
        end_token_ids=end_token_ids(model_path, tokenizer),
        longest_prompt=longest,
        max_model_len=config.generator.max_model_len or longest + config.sampling.max_tokens,
        notices=task.notices,
    )


def _tokenizer_and_positions(config: Config) -> tuple[Tokenizer, int | None]:
    """The model's tokenizer, after making sure that the two fit, and the longest sequence it was made for."""
    if config.model.tiny is not None:  # both are built to fit
        from grpo_ray.policy.tiny import tiny_tokenizer

        return tiny_tokenizer(config), config.model.tiny.max_position_embeddings
    assert config.model.path is not None
    path, trust = config.model.path, config.model.trust_remote_code
    positions = max_positions(path, trust)  # reads config.json, without which no tokenizer is found either
    tokenizer = load_tokenizer(path, trust)
    ends = end_token_ids(path, tokenizer)
    if not ends and not config.sampling.stop:
        raise ValueError(
            f"sampling.stop: neither the tokenizer of {path!r} nor its generation_config.json names an end "
            "token, so every response would run to sampling.max_tokens; give sampling.stop, "
            "or set eos_token in tokenizer_config.json"
        )
    check_vocabulary(path, tokenizer, ends, trust)
    return tokenizer, positions


def _fit_prompts(config: Config, task: TaskData) -> TaskData:
    """The task with its longest prompt known, after dealing with those that are too long."""
    tokenizer, positions = _tokenizer_and_positions(config)
    train = count_tokens(task.train, task.template, tokenizer)
    lengths = (train, count_tokens(task.validation, task.template, tokenizer))
    longest = max(chain(*lengths))
    limit = _longest_allowed(config, positions)
    if limit is None or longest <= limit:
        return replace(task, longest_prompt=longest)
    if not isinstance(config.task, FileTaskConfig) or config.task.long_prompts == "refuse":
        _refuse_long(config, task, lengths, positions)
    paths = (config.task.train_path, config.task.validation_path)
    if config.task.long_prompts == "skip":
        kept = skip_long(ExampleSets(task.train, task.validation, task.notices), lengths, limit, paths)
        longest = max(count for count in chain(*lengths) if count <= limit)
        return replace(
            task, train=kept.train, validation=kept.validation, notices=kept.notices, longest_prompt=longest
        )
    check_cut(task.template, tokenizer, limit)
    notices = task.notices + cut_notices(lengths, limit, paths)
    return replace(task, notices=notices, longest_prompt=limit, max_prompt_tokens=limit)


def _refuse_long(config: Config, task: TaskData, lengths: Lengths, positions: int | None) -> NoReturn:
    pairs = zip(chain(*lengths), [*task.train, *task.validation], strict=True)
    longest, example = max(pairs, key=lambda pair: pair[0])
    remedy = ""
    if isinstance(config.task, FileTaskConfig):
        remedy = "or set task.long_prompts to skip (left out) or truncate (cut on the left)"
    spaces = ((positions, "the model's positions"), (config.generator.max_model_len, "generator.max_model_len"))
    for space, what in spaces:
        check_lengths(longest, config.sampling.max_tokens, space, what, example.place, remedy)
    assert isinstance(config.task, FileTaskConfig)
    raise ValueError(
        f"{example.place}: the prompt has {longest} tokens, more than task.max_prompt_tokens "
        f"({config.task.max_prompt_tokens}); raise it, {remedy}"
    )


def _longest_allowed(config: Config, positions: int | None) -> int | None:
    """Tokens of the longest prompt for which there is room; None: nothing limits it."""
    spaces = [space for space in (positions, config.generator.max_model_len) if space is not None]
    limits = [space - config.sampling.max_tokens for space in spaces]
    if isinstance(config.task, FileTaskConfig) and config.task.max_prompt_tokens is not None:
        limits.append(config.task.max_prompt_tokens)
    return min(limits, default=None)
