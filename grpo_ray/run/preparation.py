"""Checks of everything that a run needs, before anything expensive starts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.config.algorithm import MAX_ROLLOUTS
from grpo_ray.config.losses import RATIO_LOSSES
from grpo_ray.config.reward import is_own, term_weights
from grpo_ray.config.schema import idle_keys
from grpo_ray.config.task import EpisodesTaskConfig, ExamplesTaskConfig, PlainTask, field_of, parts_of
from grpo_ray.config.user_code import import_function
from grpo_ray.core.context import Prepared, PreparedServing
from grpo_ray.engines import check_engine_args
from grpo_ray.episodes.checking import check_episodes, check_template
from grpo_ray.errors import require_bitsandbytes
from grpo_ray.learning.model_files import (
    at_commit,
    check_ends,
    check_local_model,
    check_teacher,
    check_vocabulary,
    end_token_ids,
    is_local,
    load_tokenizer,
    max_positions,
    text_config,
)
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.rewards import needs_isolation
from grpo_ray.rewards.configured import check_reward
from grpo_ray.rewards.isolation.confinement import protection_here
from grpo_ray.rewards.trial import try_rewards
from grpo_ray.rewards.user_function import own_functions
from grpo_ray.run.supervised import Progress, check_sft
from grpo_ray.tasks import join_parts, load_examples, make_order
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.kinds import check_warmup
from grpo_ray.tasks.prompt_lengths import Lengths, check_cut, count_tokens, long_notices, without_long
from grpo_ray.tasks.prompt_order import PromptStream
from grpo_ray.tasks.prompts import Prompter, Prompters, TextTemplate, make_items, template_of
from grpo_ray.tasks.sources import source_names
from grpo_ray.types import StartingModel

WITH_OPTIONS = ("pass_at_k",)  # advantages that are of no use without an option


@dataclass(frozen=True, kw_only=True)
class TaskData(ExampleSets):
    """The task's examples and prompters, read and checked; parts of a mixture differ by `Example.task`.

    Notices are also about gaps in isolation.
    """

    prompters: Prompters  # for a model on the hub without a tokenizer, until `prepare`
    longest_prompt: int | None = None  # tokens; None until there is a tokenizer
    first_prompts: tuple[str, ...] = ()  # lines that show one prompt of each part, and what its truth earns

    def part(self, name: str) -> ExampleSets:
        train, validation = ([e for e in some if e.task == name] for some in (self.train, self.validation))
        return ExampleSets(train, validation)


def check_files(config: Config, examples: ExampleSets | None = None) -> TaskData:
    """Read and check the task, and the model if it is local; takes seconds, and needs no Ray.

    Args:
        examples: the task's, if they have been read already.

    Raises:
        ValueError: names the field or file, what is wrong with it, and the fix.
    """
    check_engine_args(config.generator.engine_args)
    if ":" in config.generator.engine:
        import_function(config.generator.engine, "generator.engine")
    check_engine_args(config.distillation.engine_args, "distillation")
    algorithm_notices = _check_algorithm(config)
    check_rewards(config, None)
    check_episodes(config)
    if config.learner.moments == "8bit":
        require_bitsandbytes("learner.moments", "8bit", "bfloat16")
    if (quantization := config.model.base_quantization) != "none":
        require_bitsandbytes("model.base_quantization", quantization, "none")
    if (tiny := config.model.tiny) is not None:
        check_warmup(config.task, tiny.warmup.num_steps * tiny.warmup.batch_size if tiny.warmup else 0)
    for name, path in config.models.items():
        if is_local(path):
            check_local_model(path, name)
    if examples is None:
        check_sft(config)  # not of an evaluation, which brings its examples
        algorithm_notices += idle_keys(config)
        examples = load_examples(config.task, config.run.seed)
    check_rewards(config, examples)
    per_prompt, num_prompts = config.evaluation.samples_per_prompt, len(examples.validation)
    if num_prompts * per_prompt > MAX_ROLLOUTS:
        raise ValueError(
            f"evaluation.samples_per_prompt: {per_prompt:,} responses to each of {num_prompts:,} validation "
            f"prompts are in memory together; at most {MAX_ROLLOUTS:,} may be"
        )
    prompters = {
        name: Prompter(template_of(part), None, with_facts=may_ask(part))
        for name, part in parts_of(config.task).items()
    }
    is_isolated = any(map(needs_isolation, config.rewards.values()))
    notices = examples.notices + (protection_here().notices if is_isolated else ()) + algorithm_notices
    task = TaskData(examples.train, examples.validation, notices, prompters=prompters)
    return _fit_prompts(config, task) if all(map(is_local, config.models.values())) else task


def check_rewards(config: Config, examples: ExampleSets | None) -> None:
    """Check the rewards; before the examples are read, not what functions ask their columns for."""
    for name, reward in config.rewards.items():
        field = f"{field_of(name)}.reward"
        part = parts_of(config.task)[name]
        if not isinstance(part, ExamplesTaskConfig):
            check_reward(reward, field)
            continue
        fields = part.question_field, part.answer_field
        firsts: dict[frozenset[str], Example] = {}  # the first example with each set of columns
        for example in [*examples.train, *examples.validation] if examples and may_ask(part) else ():
            if example.task == name:
                firsts.setdefault(frozenset(example.row), example)
        if not firsts:
            check_reward(reward, field, None, fields)
        for example in firsts.values():
            place = f"{example.place}: " if len(firsts) > 1 else ""
            try:
                check_reward(reward, field, [*example.row], fields)
            except ValueError as error:
                raise ValueError(f"{place}{error}") from error
        for own in own_functions(reward):
            if len({own.truth_as(columns) for columns in firsts}) > 1:
                column, lacking = next((c, firsts[row]) for row in firsts if (c := own.truth_as(row)))
                raise ValueError(
                    f"{lacking.place}: no column {column!r}, which {own.where} gets from other rows; here it "
                    "would get the ground truth. Add the column to every row, null where there is none"
                )


def with_trial(config: Config, task: TaskData) -> TaskData:
    """Try each reward on its part's first example, and note what came out of it.

    Raises:
        RunError: the grading process cannot be started.
        ValueError: a function of the user's fails.
    """
    firsts = {e.task: e for e in reversed([*task.train, *task.validation]) if e.task in config.rewards}
    items = {
        name: (prompter.item(0, firsts[name]), firsts[name].place)
        for name, prompter in task.prompters.items()
        if name in firsts and (prompter.tokenizer is not None or isinstance(prompter.template, TextTemplate))
    }
    trials, notices = try_rewards(config.rewards, items, config.scorer)
    for name, reward in config.rewards.items():
        for own in own_functions(reward):
            if name in firsts and (parameter := own.truth_as(firsts[name].row)):
                notices.append(f"{own.where}: no column is called {parameter!r}, so it is the ground truth")
    lines = tuple(line for trial in trials for line in trial.lines)
    return replace(task, notices=(*task.notices, *notices), first_prompts=lines)


def may_ask(task: PlainTask) -> bool:
    """Return True if code of the user's, a reward or an episode, may ask about an example's other columns."""
    if isinstance(task, EpisodesTaskConfig):
        return task.validation_examples is not None
    return is_own(task.reward)


def _check_algorithm(config: Config) -> tuple[str, ...]:
    """Check functions and options of the algorithm, and return notices about it.

    The functions, which need torch, are left alone if each is the package's own and none takes an option.
    """
    algorithm = config.algorithm
    names = (algorithm.advantage_kind, algorithm.loss, algorithm.token_selection, *algorithm.corrections)
    options = [
        getattr(algorithm, f"{part}_options") for part in ("advantage", "loss", "selection", "correction")
    ]
    has_own = any(":" in name or name in WITH_OPTIONS for name in names) or any(options) or algorithm.limits
    if not has_own and algorithm.loss in RATIO_LOSSES and not algorithm.corrections:
        return ()
    from grpo_ray.objectives import check_algorithm
    from grpo_ray.objectives.checking import notices_on_loss

    weights = [term_weights(reward) for reward in config.rewards.values()]
    check_algorithm(algorithm, weights + [{}] * bool(config.episode_tasks))  # an episode's reward has no terms
    return notices_on_loss(config)


VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM 0.32 computes on a CPU (`CPUAttentionBackend`); others fail at a token."""


def at_commits(config: Config) -> Config:
    """Return the configuration with the commit of each model on a hub; raises ValueError as `at_commit`."""
    return with_models(config, {name: at_commit(path, name) for name, path in config.models.items()})


def with_models(config: Config, models: Mapping[str, str]) -> Config:
    """Return the configuration with other values of `Config.models`."""
    teacher = models.get("distillation.teacher")
    return config.changed(model={"path": models.get("model.path")}, distillation={"teacher": teacher})


def prepare(config: Config, task: TaskData, progress: Progress | None = None) -> Prepared:
    """Find, fetch or build the model.

    Raises:
        ValueError: the hub does not provide the model, it does not fit its tokenizer, or its context is too
            short for the prompts and `sampling.max_tokens`.
    """
    serving, task = _prepare(config, task, progress)
    order = make_order(config.task, Counter(example.task for example in task.train), config.run.seed)
    return Prepared(prompts=PromptStream(task.train, task.prompters, order), **vars(serving))


def prepare_serving(config: Config, task: TaskData) -> PreparedServing:
    """Find, fetch or build the model for sampling alone; unlike in `prepare`, `task.train` may be empty."""
    return _prepare(config, task, None)[0]


def _prepare(config: Config, task: TaskData, progress: Progress | None) -> tuple[PreparedServing, TaskData]:
    model_path = config.model.path
    if model_path is None:
        from grpo_ray.run.tiny_model import tiny_model_folder

        model_path = str(tiny_model_folder(config, progress))
    at_commits(config)  # the hub has what it is asked for
    if task.longest_prompt is None:
        task = _fit_prompts(config, task)
    longest, tokenizer = task.longest_prompt, next(iter(task.prompters.values())).tokenizer
    assert longest is not None
    assert tokenizer is not None
    ends = end_token_ids(model_path, tokenizer, config.model.trust_remote_code)
    max_model_len = config.generator.max_model_len or longest + config.sampling.max_tokens
    serving = PreparedServing(
        model=StartingModel(model_path, ends, max_model_len),
        validation=make_items(task.validation, task.prompters),
        longest_prompt=longest,
        notices=task.notices,
    )
    return serving, task


def _tokenizer_and_positions(config: Config) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Return the tokenizer, checked against the model, and the longest sequence that the model supports."""
    if config.model.tiny is not None:  # both are built to fit
        return tiny_tokenizer(config), config.model.tiny.max_position_embeddings
    assert config.model.path is not None
    path, trust = config.model.path, config.model.trust_remote_code
    if config.model.implementation == "grpo_ray":
        from grpo_ray.learning.transformer_lm import check_llama

        check_llama(path)
    positions = max_positions(path, trust)  # reads config.json, without which no tokenizer is found either
    tokenizer = load_tokenizer(path, trust)
    ends = end_token_ids(path, tokenizer, trust)
    check_ends(path, tokenizer, ends, config.sampling.stop)
    check_vocabulary(path, tokenizer, ends, trust)
    return tokenizer, positions


def _check_adapter(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    path, model, send = config.model.path, config.model, config.weight_sync.send
    if model.adapter is None:
        return
    from grpo_ray.learning.adapters import add_adapter
    from grpo_ray.learning.loading import skeleton
    from grpo_ray.run.tiny_model import tiny_skeleton
    from grpo_ray.watch.flops import EXPERT

    loading = model.trust_remote_code, model.implementation
    adapted = tiny_skeleton(config, tokenizer) if path is None else skeleton(path, *loading)
    add_adapter(adapted, model.adapter, path or "")
    if send == "adapter" and not config.generator.num_gpus and any(map(EXPERT.search, adapted.state_dict())):
        raise ValueError("weight_sync.send: vLLM's adapters of experts need a GPU; use `merged`")


def _check_engine(config: Config, positions: int | None) -> None:
    """Refuse what vLLM would refuse once its actors have started, or at the first token."""
    asked, num_gpus, tiny = config.generator.max_model_len, config.generator.num_gpus, config.model.tiny
    if config.generator.engine != "vllm":
        return
    if asked is not None and positions is not None and asked > positions:
        raise ValueError(
            f"generator.max_model_len is {asked}, but the model has {positions} positions; give at most that"
        )
    shape: Any = tiny or text_config(str(config.model.path), config.model.trust_remote_code)
    number = tiny.num_heads if tiny is not None else getattr(shape, "num_attention_heads", None)
    if not isinstance(number, int):
        return
    if num_gpus and number % num_gpus:
        raise ValueError(
            f"generator.num_gpus is {num_gpus}, but vLLM cannot divide the model's {number} attention heads "
            "by it; give a divisor, and more generator.num_generators"
        )
    size = getattr(shape, "head_dim", None) or shape.hidden_size // number
    if not num_gpus and size not in VLLM_CPU_HEADS and not hasattr(shape, "kv_lora_rank"):
        field, cure = "model.path: the size of its attention heads", "use"
        if tiny is not None:
            field = "model.tiny: hidden_size / num_heads"
            cure = f"give num_heads: {max(1, tiny.hidden_size // 32)}, or"
        raise ValueError(
            f"{field} is {size}, but vLLM's attention on a CPU supports only heads of "
            f"{', '.join(map(str, VLLM_CPU_HEADS))}; {cure} generator.engine: torch"
        )


def _fit_prompts(config: Config, task: TaskData) -> TaskData:
    """Return the task with its longest prompt known, after handling those that are too long."""
    tokenizer, positions = _tokenizer_and_positions(config)
    _check_adapter(config, tokenizer)
    _check_engine(config, positions)
    check_template(config, tokenizer)
    prompters = {name: replace(each, tokenizer=tokenizer) for name, each in task.prompters.items()}
    if len(task.train) > 100_000:  # a million takes minutes
        print(f"counting the tokens of {len(task.train):,} prompts ...", flush=True)
    fitted = {
        name: _fit_part(config, part, task.part(name), prompters[name], positions)
        for name, part in parts_of(config.task).items()
    }
    longest = max(longest for _, _, longest in fitted.values())
    check_teacher(config, tokenizer, longest)
    joined = join_parts({name: examples for name, (examples, _, _) in fitted.items()})
    return replace(
        task,
        train=joined.train,
        validation=joined.validation,
        prompters={name: prompter for name, (_, prompter, _) in fitted.items()},
        notices=task.notices + joined.notices,
        longest_prompt=longest,
    )


def _fit_part(
    config: Config, task: PlainTask, examples: ExampleSets, prompter: Prompter, positions: int | None
) -> tuple[ExampleSets, Prompter, int]:
    """Return the examples that fit, with a notice of the others, their prompter, and their longest prompt."""
    spaces = _spaces(config, positions)
    if isinstance(task, EpisodesTaskConfig):
        most = config.episodes.max_tokens  # as far as its prompts grow
        for what, space in spaces.items():
            if most > space:
                raise ValueError(
                    f"episodes.max_tokens is {most}, more than {what} ({space}); set it to at most {space}"
                )
        return examples, prompter, most - config.sampling.max_tokens
    lengths = (count_tokens(examples.train, prompter), count_tokens(examples.validation, prompter))
    longest = max(chain(*lengths))
    limits = [space - config.sampling.max_tokens for space in spaces.values()]
    if isinstance(task, ExamplesTaskConfig) and task.max_prompt_tokens is not None:
        limits.append(task.max_prompt_tokens)
    limit = min(limits, default=None)
    if limit is None or longest <= limit:
        return examples, prompter, longest
    if not isinstance(task, ExamplesTaskConfig) or task.long_prompts == "refuse":
        _refuse_long(config, task, examples, lengths, spaces, limit)
    paths = source_names(task)
    if task.long_prompts == "skip":
        sets = zip(paths, (examples.train, examples.validation), lengths, strict=True)
        train, validation = (without_long(*each, limit) for each in sets)
        kept = ExampleSets(train, validation, long_notices(lengths, limit, paths, "skipped"))
        return kept, prompter, max(count for count in chain(*lengths) if count <= limit)
    check_cut(prompter, limit)
    cut = replace(examples, notices=long_notices(lengths, limit, paths, "cut on the left"))
    return cut, replace(prompter, max_tokens=limit), limit


def _spaces(config: Config, positions: int | None) -> dict[str, int]:
    """Return the lengths in tokens that bound a prompt with its response, by what bounds it."""
    found = {"the model's positions": positions, "generator.max_model_len": config.generator.max_model_len}
    return {what: space for what, space in found.items() if space is not None}


def _refuse_long(
    config: Config, task: PlainTask, examples: ExampleSets, lengths: Lengths, spaces: Mapping[str, int],
    limit: int,
) -> NoReturn:  # fmt: skip
    pairs = zip(chain(*lengths), [*examples.train, *examples.validation], strict=True)
    longest, example = max(pairs, key=lambda pair: pair[0])
    remedy = ""
    if isinstance(task, ExamplesTaskConfig):
        choices = ["skip (left out)"] if min(chain(*lengths)) <= limit else []
        choices += ["truncate (cut on the left)"] if task.prompt != "chat" and limit > 0 else []
        remedy = f"or set task.long_prompts to {' or '.join(choices)}" if choices else ""
    max_tokens = config.sampling.max_tokens
    for what, space in spaces.items():
        if longest + max_tokens > space:
            fewer = f"set it to {space - longest} or less" if space > longest else ""
            fix = ", ".join(filter(None, (fewer, remedy if fewer else remedy.removeprefix("or "))))
            raise ValueError(
                f"sampling.max_tokens: {max_tokens} response tokens after the longest prompt ({longest} tokens"
                f"{example.place and f': {example.place}'}) do not fit {what} ({space}); {fix or 'shorten it'}"
            )
    assert isinstance(task, ExamplesTaskConfig)
    raise ValueError(
        f"{example.place}: the prompt has {longest} tokens, more than task.max_prompt_tokens "
        f"({task.max_prompt_tokens}); {', '.join(filter(None, ('raise it', remedy)))}"
    )
