"""The target of a preflight: an environment or a reward as an episode function, with all that it needs."""

import asyncio
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.config.reward import Reward, RewardTerm, named_terms
from grpo_ray.config.task import ReasoningGymTaskConfig
from grpo_ray.config.user_code import import_function, importable
from grpo_ray.episodes.adapters import required
from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.episodes.adapters.trl import trl_episode
from grpo_ray.episodes.adapters.verifiers import VerifiersEpisodes
from grpo_ray.episodes.limits import Limits
from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.runner import EpisodeFn, load_episode
from grpo_ray.episodes.session import Session
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer, train_tokenizer
from grpo_ray.rewards.answer_formats import written
from grpo_ray.rewards.base import About
from grpo_ray.rewards.configured import Graded, GroupReward, check_reward, weighted_sum
from grpo_ray.rewards.grader import about_of
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.tasks import load_examples, parts_of
from grpo_ray.tasks.examples import Example, ExampleSets
from grpo_ray.tasks.files import Fields, read_examples
from grpo_ray.tasks.prompts import ChatTemplate, Prompter, PromptTemplate, template_of
from grpo_ray.tasks.sources import Source

Solve = Callable[[list[dict[str, Any]], Example], str]
"""(messages so far, example) to the next right reply: `solve` in the module of an environment."""
REPLY_TOKENS, MAX_TURNS = 256, 12  # of a reply and of an episode, if no configuration says otherwise


@dataclass(frozen=True)
class Subject:
    """The environment or reward that is played."""

    name: str
    episodes: Mapping[str, EpisodeFn]  # by `Example.task`
    examples: Sequence[Example]
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]
    modules: tuple[ModuleType, ...] = ()  # of the user's
    is_reward: bool = False
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    solve: Solve | None = None
    settings: EpisodesConfig = field(default_factory=lambda: EpisodesConfig(max_turns=MAX_TURNS))
    reply_tokens: int = REPLY_TOKENS
    notices: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        """The run's limits; an episode of a preflight has seconds, not minutes."""
        settings = self.settings
        rewards = settings.truncated_reward, settings.error_reward
        return Limits(settings.max_turns, settings.max_tokens, min(20.0, settings.max_seconds), *rewards)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the user's code."""
        return tuple({str(Path(m.__file__).resolve().parent) for m in self.modules if m.__file__})

    def right(self, example: Example) -> str:
        """Return the example's truth, written as its reward reads it."""
        reward = self.rewards.get(example.task)
        return example.ground_truth if reward is None else written(reward, example.ground_truth).strip()


def load_subject(
    target: str | None, env: str | None, template: str | None, file: str | None, seed: int,
    overrides: Sequence[str] = (),
) -> Subject:  # fmt: skip
    """Return what the command names.

    Raises:
        ConfigError: the configuration is not valid.
        RunError: there is no such file.
        ValueError: there is no such function, environment, template or example.
    """
    if (target is None) == (env is None):
        raise ValueError("give a MODULE:FUNCTION, a CONFIG, or --env NAME: exactly one of them")
    tokenizer, ends = _tokenizer(template)
    if env is not None:
        subject = _of_catalogue(env, tokenizer, ends, seed)
    elif target is not None and ":" not in target:
        return _of_config(load_config(target, overrides), target, template, seed)
    else:
        assert target is not None
        subject = _of_function(target, tokenizer, ends, file, seed)
    return dataclasses.replace(subject, examples=_own_seeds(subject.examples))


def _of_function(
    target: str, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], file: str | None, seed: int
) -> Subject:
    name = importable(target)
    found: Any = import_function(name, "TARGET")
    module = sys.modules[name.partition(":")[0]]
    examples = _examples(module, file, seed)
    common: dict[str, Any] = {
        "name": target, "examples": examples, "tokenizer": tokenizer, "end_token_ids": ends,
        "modules": (module,), "solve": getattr(module, "solve", None),
    }  # fmt: skip
    if isinstance(found, type):
        return Subject(episodes={"": trl_episode(found)}, **common)
    names = inspect.signature(found).parameters
    if inspect.iscoroutinefunction(found) and not names.keys() & {"response", "completions"}:
        return Subject(episodes={"": load_episode(name, "TARGET")}, **common)
    is_async = inspect.iscoroutinefunction(found)
    reward = (RewardTerm(reward=name, network=is_async),)
    check_reward(reward, "TARGET", [*examples[0].row])
    prompter = Prompter(ChatTemplate(), tokenizer, with_facts=True)
    return Subject(episodes={"": _graded(reward, prompter)}, is_reward=True, rewards={"": reward}, **common)


def _of_config(config: Config, source: str, template: str | None, seed: int) -> Subject:
    if template is not None:
        tokenizer, ends = _tokenizer(template)
    elif config.model.path is None:
        tokenizer = tiny_tokenizer(config)
        ends = (tokenizer.eos_token_id,)
    else:
        try:
            tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{error}; or name another model's folder by --template") from None
        ends = end_token_ids(config.model.path, tokenizer)
    sets = load_examples(config.task, seed)
    episodes: dict[str, EpisodeFn] = {}
    for name, part in parts_of(config.task).items():
        if name in config.episode_tasks:
            episodes[name] = load_episode(config.episode_tasks[name].episode)
        else:
            reward = config.task.rewards[name]
            check_reward(reward, "task.reward", None)
            prompt: PromptTemplate = template_of(part)
            episodes[name] = _graded(reward, Prompter(prompt, tokenizer, with_facts=True))
    named = [task.episode for task in config.episode_tasks.values()]
    named += [t.reward for r in config.task.rewards.values() if not isinstance(r, str) for t in r]
    named += [r for r in config.task.rewards.values() if isinstance(r, str)]
    modules = tuple(sys.modules[n.partition(":")[0]] for n in named if ":" in n)
    return Subject(
        source, episodes, _own_seeds(sets.train), tokenizer, ends, modules, not config.episode_tasks,
        config.task.rewards, next((m.solve for m in modules if hasattr(m, "solve")), None), config.episodes,
        config.sampling.max_tokens, sets.notices,
    )  # fmt: skip


def _of_catalogue(name: str, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], seed: int) -> Subject:
    """Return an environment of another package: `reasoning_gym:NAME`, `gymnasium:ID` or `verifiers:TASKSET`."""
    package, _, own = name.partition(":")
    if package == "reasoning_gym" and own:
        task = ReasoningGymTaskConfig(name=own, num_train_prompts=32, num_validation_prompts=8)
        episode = _graded(task.reward, Prompter(ChatTemplate(), tokenizer, with_facts=True))
        return Subject(
            name, {"": episode}, load_examples(task, seed).train, tokenizer, ends,
            is_reward=True, rewards={"": task.reward},
        )  # fmt: skip
    if package == "gymnasium" and own:
        size = getattr(required("gymnasium").make(own).action_space, "n", None)
        if size is None:
            raise ValueError(
                f"--env {name}: its actions are not numbers from 0; write an episode, MODULE:FUNCTION"
            )
        episode = gymnasium_episode(own, str, partial(_action, int(size)), malformed="Reply with a number.")
        question = f"Play {own}: reply to each observation with a number from 0 to {size - 1}."
        return Subject(name, {"": episode}, [Example(question, "")] * 8, tokenizer, ends)
    if package == "verifiers" and own:
        found = VerifiersEpisodes({"taskset": {"id": own}}, num_train=64, num_validation=8)
        return Subject(name, {"": found.episode}, found.examples(seed).train, tokenizer, ends)
    raise ValueError(
        f"--env {name}: give reasoning_gym:NAME, gymnasium:ID or verifiers:TASKSET; for one of your own, "
        "MODULE:FUNCTION"
    )


def _action(size: int, text: str) -> int | None:
    found = re.search(r"\d{1,9}", text, re.ASCII)
    return int(found[0]) if found and int(found[0]) < size else None


def _graded(reward: Reward, prompter: Prompter) -> EpisodeFn:
    """Return an episode of one turn, which a reward grades in this process."""
    terms = named_terms(reward)
    functions = [UserFunction.of(term) if term.network else GroupReward((term,)) for term in terms]

    async def episode(session: Session, example: Example) -> Outcome:
        item = prompter.item(0, example)
        reply = await session.sample(item.prompt_token_ids)
        given = [reply.text], [example.ground_truth], about_of(item)
        row: list[Graded] = []
        for function in functions:
            if isinstance(function, UserFunction):
                called = function.call_group(*given) if function.takes_group else function.call(*_one(given))
                result = await called if inspect.isawaitable(called) else called
                row.append(function.read_group(result, 1)[0] if function.takes_group else function.read(result))
            else:  # a thread, as it may run an event loop of its own
                row += await asyncio.to_thread(function, *given)
        outcome = weighted_sum(terms, row)
        if isinstance(outcome, Exception):
            raise outcome
        return Outcome(outcome.get("reward", 0.0))

    return episode


def _one(given: tuple[list[str], list[str], About]) -> tuple[str, str, About]:
    (response,), (truth,), about = given
    return response, truth, about


def _tokenizer(template: str | None) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """Return the tokenizer of a model, or one of bytes with the plain chat of tiny models, and its ends."""
    if template is not None and not template.endswith(".jinja"):
        tokenizer = load_tokenizer(template, trust_remote_code=False)
        return tokenizer, end_token_ids(template, tokenizer)
    tokenizer = train_tokenizer(["any text: its tokens spell all others"], vocab_size=300)
    give_plain_chat(tokenizer)
    if template is not None:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer, (tokenizer.eos_token_id,)


def _examples(module: ModuleType, file: str | None, seed: int) -> Sequence[Example]:
    if file is not None:
        return read_examples(Source(file, (Path(file),)), Fields("question", "answer", keeps_row=True))[0]
    found: Any = getattr(module, "examples", None)
    if callable(found):
        found = found(seed)
    if isinstance(found, ExampleSets):
        found = found.train
    if not found:
        raise ValueError(
            f"{module.__name__} has no `examples`; define it (a list, or a function of a seed), or give "
            "--examples FILE"
        )
    return [e if isinstance(e, Example) else _example_of(dict(e)) for e in found]


def _example_of(row: dict[str, Any]) -> Example:
    question, truth = row.pop("question"), row.pop("answer", row.pop("ground_truth", ""))
    return Example(str(question), str(truth), facts=json.dumps({"row": row}))


def _own_seeds(examples: Sequence[Example]) -> list[Example]:
    return [dataclasses.replace(example, seed=1000 + n) for n, example in enumerate(examples)]
