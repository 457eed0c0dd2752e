"""Warm-up pairs for a tiny model: each turn of episodes that a script plays, as (transcript, reply)."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.tool_calls import make_tool_parser
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.learning.tiny_tokenizer import train_tokenizer
from grpo_ray.tasks.examples import Example, Pairs
from grpo_ray.types import Completion, SamplingSettings

MAX_TOKENS = 2**16


class _Script:
    """A sampler that answers with a function of the transcript, and keeps the pairs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reply: Callable[[str], str]) -> None:
        self._tokenizer, self._reply = tokenizer, reply
        self.pairs: Pairs = []

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        transcript = self._tokenizer.decode(list(prompt_token_ids))
        text = self._reply(transcript)
        self.pairs.append((transcript, text))
        return scripted_completion(text, self._tokenizer(text + self._tokenizer.eos_token)["input_ids"])


def scripted_completion(text: str, token_ids: Sequence[int], finish_reason: str = "stop") -> Completion:
    """Return a reply that no model sampled: its logprobs are 0."""
    zeros = np.zeros(len(token_ids), np.int32)
    return Completion(text, np.array(token_ids, np.int32), zeros.astype(np.float32), zeros, finish_reason)


def plain_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes with the plain chat of tiny models."""
    tokenizer = train_tokenizer(["any text: its tokens spell all others"], vocab_size=300)
    give_plain_chat(tokenizer)
    return tokenizer


def rehearse(
    episode: EpisodeFn, examples: Iterable[Example], reply: Callable[[str], str], num_pairs: int,
    num_played: int = 1000,
) -> Pairs:  # fmt: skip
    """Return (transcript, reply) pairs, in the plain chat of tiny models, of episodes that a script plays.

    Args:
        examples: begun again as often as needed; the episode numbered n from 0 has the seed n.
        reply: returns the next reply to a transcript, which ends with a line `>`.
        num_played: turns to play; they are repeated if more pairs are asked for.

    Raises:
        RuntimeError: an episode failed, or sampled nothing.
    """
    pairs = asyncio.run(_rehearsed(episode, examples, reply, min(num_pairs, num_played)))
    return list(islice(cycle(pairs), num_pairs))


async def _rehearsed(
    episode: EpisodeFn, examples: Iterable[Example], reply: Callable[[str], str], num_pairs: int
) -> Pairs:
    tokenizer = plain_tokenizer()
    script = _Script(tokenizer, reply)
    parser = make_tool_parser("transformers", tokenizer)
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    settings = SamplingSettings(1, 1.0, 1.0, 0, MAX_TOKENS // 2)
    stops: list[KeyboardInterrupt] = []  # of this process, which the runner takes for the episode's

    async def heard(session: Session, example: Example) -> float | Outcome:
        try:
            return await episode(session, example)
        except KeyboardInterrupt as stop:
            stops.append(stop)
            raise

    async with contextlib.aclosing(ChatServer()) as server:
        await server.start()
        for seed, example in enumerate(cycle(examples)):
            before = len(script.pairs)
            session = Session(script.sample, settings, template, EpisodesConfig(max_tokens=MAX_TOKENS), parser)
            result = await EpisodeRunner(heard, server=server).run(session, replace(example, seed=seed))
            if stops:
                raise stops[0]
            if result.reward is None or len(script.pairs) == before:
                reason = result.error or "it sampled nothing"
                raise RuntimeError(f"an episode that was played for the warm-up cannot be used: {reason}")
            if len(script.pairs) >= num_pairs:
                break
    return script.pairs[:num_pairs]
