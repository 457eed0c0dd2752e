"""A tool's long result in a worker: the longest time for which its loop does nothing else.

Each case is one turn of a session, behind a first one, with a `max_tokens` of 4,096 or more. A result that
cannot fit is refused; another becomes tokens, and the reply is sampled at once if they fit. A timer on the same
loop is late by the longest step.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import model_folder
from benchmarks.turns import take_turns
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.limits import Limits
from grpo_ray.episodes.outcome import EpisodeEnded
from grpo_ray.episodes.session import Session
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.plain_chat import TEMPLATE
from grpo_ray.types import Completion, SamplingSettings

TITLE = "a tool's long result: the longest step of a worker's loop"
TICK_S = 0.002
WORDS = ("the", "file", "line", "error", "42", "/usr/lib", "x", "data,", "value;\n", "0x7f")
REPLY = Completion(
    "a reply", np.array([30, 0], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop"
)


class Sampler:
    """A Generator that takes no time."""

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        return REPLY


def run(options: Options) -> list[Row]:
    sizes = {"8 kB": 2**13} if options.quick else {"64 kB": 2**16, "1 MiB": 2**20, "4 MiB": 2**22}
    steps: dict[str, list[float]] = {}
    cases: dict[str, Callable[[], object]] = {}
    chars: dict[str, int] = {}
    with model_folder() as folder:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = TEMPLATE
        template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
        for name, size in sizes.items():
            for room, max_tokens in (("", 4096), (", max_tokens 131,072", 2**17)):
                case = f"{name}{room}"
                chars[case], steps[case] = size, []
                cases[case] = partial(_turn, template, size, max_tokens, steps[case])
        seconds = take_turns(cases, options.rounds or (1 if options.quick else 3))
    return [
        Row(
            case,
            seconds[case],
            work=chars[case],
            unit="characters",
            facts={"longest step ms, median": 1e3 * float(np.median(steps[case][1:]))},
        )
        for case in cases
    ]


def _turn(template: ChatTemplate, num_chars: int, max_tokens: int, steps: list[float]) -> None:
    """Play two turns; note the longest step of the second."""
    rng = random.Random(len(steps))  # another text each time: a template remembers the tokens of texts
    text = " ".join(rng.choices(WORDS, k=num_chars // 4))[:num_chars]
    steps.append(asyncio.run(_longest_step(template, text, max_tokens)))


async def _longest_step(template: ChatTemplate, text: str, max_tokens: int) -> float:
    session = Session(Sampler(), SamplingSettings(1, 1.0, 1.0, 0, 32), template, Limits(max_tokens=max_tokens))
    messages = [{"role": "user", "content": "What is in the file?"}]
    messages += [(await session.chat(messages)).message, {"role": "tool", "content": text}]
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            longest = max(longest, time.perf_counter() - asked - TICK_S)

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(2 * TICK_S)
    with contextlib.suppress(EpisodeEnded):
        await session.chat(messages)
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return longest
