"""The target of a preflight: an environment or a reward as an episode function, with all that it needs."""

import asyncio
import dataclasses
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.config.reward import Reward, RewardTerm, named_terms, terms_of
from grpo_ray.config.task import parts_of
from grpo_ray.config.user_code import import_function, importable
from grpo_ray.episodes.adapters.rehearsal import plain_tokenizer
from grpo_ray.episodes.adapters.trl import trl_episode
from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.runner import EpisodeFn, load_episode
from grpo_ray.episodes.session import Session
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.rewards.answer_formats import written
from grpo_ray.rewards.base import About, Graded
from grpo_ray.rewards.configured import TermReward, check_reward, summed, weighted
from grpo_ray.rewards.grader import about_of
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.dataset import check_example
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.files import Fields, facts_of, read_examples
from grpo_ray.tasks.prompts import ChatTemplate, Prompter, PromptTemplate, template_of
from grpo_ray.tasks.sources import Source
from grpo_ray.tools.preflight.command import PreflightOptions

Solve = Callable[[list[dict[str, Any]], Example], str]
"""(messages so far, example) to the next right reply: `solve` in the module of an environment."""
REPLY_TOKENS, MAX_TURNS = 256, 12  # of a reply and of an episode, if no configuration says otherwise
ANY_LENGTH = 2**31


@dataclass(frozen=True)
class Subject:
    """The environment or reward that is played."""

    name: str
    episodes: Mapping[str, EpisodeFn]  # by `Example.task`
    examples: Sequence[Example]
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]
    modules: tuple[ModuleType, ...] = ()  # of the user's
    rewards: Mapping[str, Reward] = field(default_factory=dict)  # by task; no reward: it is an environment
    settings: EpisodesConfig = field(default_factory=lambda: EpisodesConfig(max_turns=MAX_TURNS))
    reply_tokens: int = REPLY_TOKENS
    is_configured: bool = False  # else any tool calls are read
    has_chat: bool = True  # False: all prompts are texts, which no chat template writes

    @property
    def is_reward(self) -> bool:
        """True if rewards grade all replies."""
        return self.rewards.keys() >= self.episodes.keys()

    @property
    def solve(self) -> Solve | None:
        """The user's own solution, if there is one."""
        return next((module.solve for module in self.modules if hasattr(module, "solve")), None)

    @property
    def reply_end(self) -> int:
        """The token with which policies end a reply."""
        own: int = self.tokenizer.eos_token_id
        return own if own in self.end_token_ids else self.end_token_ids[0]

    def limits(self, task: str) -> EpisodesConfig:
        """Return the run's limits, with seconds instead of minutes; `max_tokens` bounds episodes alone."""
        max_tokens = ANY_LENGTH if task in self.rewards else self.settings.max_tokens
        max_seconds = min(20.0, self.settings.max_seconds)
        return self.settings.model_copy(update={"max_seconds": max_seconds, "max_tokens": max_tokens})

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple({str(Path(m.__file__).resolve().parent) for m in self.modules if m.__file__})

    def right(self, example: Example) -> str:
        """Return the example's truth, written as its reward reads it."""
        reward = self.rewards.get(example.task)
        return example.ground_truth if reward is None else written(reward, example.ground_truth).strip()


def load_subject(options: PreflightOptions) -> Subject:
    """Return what the command names, with the examples to play; it raises what `preflight` does."""
    is_function = ":" in options.target
    if options.examples is not None and not is_function:
        raise ValueError("--examples is for a MODULE:FUNCTION alone: a CONFIG has its own")
    if options.overrides and is_function:
        raise ValueError(f"{options.overrides[0]}: a function has no configuration to change; give a CONFIG")
    if not is_function and options.target.endswith(".py"):
        raise ValueError(f"{options.target}: give its function too, as in {options.target}:FUNCTION")
    subject = _of_function(options) if is_function else _of_config(options)
    found, number = subject.examples, options.num_examples
    chosen = [len(found) * n // number for n in range(number)] if len(found) > number else range(len(found))
    own_seeds = [dataclasses.replace(found[n], seed=1000 + n) for n in chosen]
    return dataclasses.replace(subject, examples=own_seeds)


def _of_function(options: PreflightOptions) -> Subject:
    name = importable(options.target)
    found: Any = import_function(name, "TARGET")
    module = sys.modules[name.partition(":")[0]]
    examples = _examples(module, options.examples, options.seed)
    tokenizer, ends = _tokenizer(options.template)
    own: dict[str, Any] = {}
    is_async = not isinstance(found, type) and UserFunction(found, name, {}).is_async
    if isinstance(found, type):
        episode = trl_episode(found)
    elif is_async and not inspect.signature(found).parameters.keys() & {"response", "completions"}:
        episode = load_episode(name, "TARGET")
    else:
        reward = (RewardTerm(reward=name, network=is_async),)
        check_reward(reward, "TARGET", [*examples[0].row], ("question", "answer"))
        episode = _graded(reward, Prompter(ChatTemplate(), tokenizer, with_facts=True))
        own = {"rewards": {"": reward}}
    return Subject(options.target, {"": episode}, examples, tokenizer, ends, (module,), **own)


def _of_config(options: PreflightOptions) -> Subject:
    config = load_config(options.target, options.overrides)
    model = options.template or config.model.path
    if model is None:
        tokenizer = tiny_tokenizer(config)
        ends: tuple[int, ...] = (tokenizer.eos_token_id,)
    else:
        tokenizer, ends = _tokenizer(model, config.model.trust_remote_code)
    rewards = config.rewards
    prompts: dict[str, PromptTemplate] = {}
    episodes = {name: load_episode(task.episode) for name, task in config.episode_tasks.items()}
    for name, reward in rewards.items():
        check_reward(reward, "task.reward", None)
        prompts[name] = template_of(parts_of(config.task)[name])
        episodes[name] = _graded(reward, Prompter(prompts[name], tokenizer, with_facts=True))
    named = [task.episode for task in config.episode_tasks.values()]
    named += [term.reward for reward in rewards.values() for term in terms_of(reward) if ":" in term.reward]
    return Subject(
        options.target, episodes, load_examples(config.task, options.seed).train, tokenizer, ends,
        tuple(sys.modules[name.partition(":")[0]] for name in named), rewards, config.episodes,
        REPLY_TOKENS if model and model.endswith(".jinja") else config.sampling.max_tokens,  # of bytes
        True,
        bool(config.episode_tasks) or any(isinstance(each, ChatTemplate) for each in prompts.values()),
    )  # fmt: skip


def _graded(reward: Reward, prompter: Prompter) -> EpisodeFn:
    """Return an episode of one turn, which a reward grades in this process."""
    graders = [_grader(term) for term in named_terms(reward)]

    async def episode(session: Session, example: Example) -> Outcome:
        item = prompter.item(0, example)
        reply = await session.sample(item.prompt_token_ids)
        about: About = {**about_of(item), "completions": [reply.text]}
        parts = [await grade(reply.text, example.ground_truth, about) for grade in graders]
        return Outcome(summed(parts).get("reward", 0.0))

    return episode


def _grader(term: RewardTerm) -> Callable[[str, str, About], Awaitable[Graded]]:
    """Return the function that grades a response by one term."""
    function = UserFunction.of(term) if ":" in term.reward else None
    alone = TermReward(term)

    async def grade(response: str, truth: str, about: About) -> Graded:
        if function is None or not function.is_async:  # a thread, as it may run an event loop of its own
            return (await asyncio.to_thread(alone, [response], [truth], about))[0]
        if function.takes_group:
            (outcome,) = function.read_group(await function.call_group([response], [truth], about), 1)
            return weighted(term, outcome)
        return weighted(term, function.read(await function.call(response, truth, about)))

    return grade


def _tokenizer(
    template: str | None, is_trusted: bool = False
) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """Return the tokenizer of a model, or one of bytes with the plain chat of tiny models, and its ends."""
    if template is not None and not template.endswith(".jinja"):
        try:
            tokenizer = load_tokenizer(template, is_trusted)
        except ValueError as error:
            raise ValueError(f"{error}; or name another model's folder by --template") from None
        return tokenizer, end_token_ids(template, tokenizer, is_trusted)
    tokenizer = plain_tokenizer()
    if template is not None:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer, (tokenizer.eos_token_id,)


def _examples(module: ModuleType, file: str | None, seed: int) -> Sequence[Example]:
    if file is not None:
        return read_examples(Source(file, (Path(file),)), Fields("question", "answer", keeps_row=True))[0]
    found: Any = getattr(module, "examples", None)
    try:
        found = found(seed) if callable(found) else found
        rows = [*(found.train if isinstance(found, ExampleSets) else found or ())]
    except Exception as error:  # the user's own
        raise ValueError(f"`examples` of {module.__name__} raises {type(error).__name__}: {error}") from error
    if not rows:
        raise ValueError(
            f"{module.__name__} has no `examples`; define it (a list, or a function of a seed), or give "
            "--examples FILE"
        )
    examples = [row if isinstance(row, Example) else _example_of(row) for row in rows]
    for number, example in enumerate(examples):
        check_example(example, f"examples[{number}] of {module.__name__}")
    return examples


def _example_of(row: Any) -> Example:
    if not isinstance(row, Mapping) or "question" not in row:
        raise ValueError(f"`examples`: {row!r:.80} is neither an Example nor a dict with a `question`")
    answer = next((name for name in ("answer", "ground_truth") if name in row), "question")
    truth = "" if answer == "question" else str(row[answer])
    return Example(str(row["question"]), truth, facts=facts_of(row, ("question", answer)))
