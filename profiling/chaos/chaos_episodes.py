"""The guessing game with faults of an environment, which profiling/chaos/chaos.py requests by files.

`raise_in_environment` raises an error, `exit_in_environment` ends the process as a crash in a C library would,
`leave_environment` calls `sys.exit`, `block_environment` never returns from a call, `fill_environment`
takes all memory that the worker may have, and `poison_prompt` ends the process whenever one prompt is played.
`huge_tool_result` adds 4 MiB to the conversation, and `poison_text`, `poison_number` and `poison_metrics` end
the episode with what no file of rollouts can hold.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from grpo_ray.episodes import guess_number
from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example

FOREVER_S = 1e6
examples, warmup_pairs = guess_number.examples, guess_number.warmup_pairs


def triggers() -> Path:
    return Path(os.environ["GRPO_RAY_CHAOS_TRIGGERS"])


def is_requested(fault: str) -> bool:
    """Return True once per file."""
    try:
        (triggers() / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def is_poisoned(prompt: str) -> bool:
    """Return True for the first prompt that asks after the file was made, then for that one alone."""
    path = triggers() / "poison_prompt"
    with contextlib.suppress(FileNotFoundError):
        if not path.read_text():
            path.write_text(prompt)
        return path.read_text() == prompt
    return False


async def episode(session: Session, example: Example) -> Outcome:
    """Play one game, then suffer the fault that is requested."""
    if is_poisoned(f"{example.question} {example.ground_truth}"):
        os._exit(7)
    outcome = await guess_number.episode(session, example)
    if is_requested("raise_in_environment"):
        raise OSError("chaos: the environment is gone")
    if is_requested("exit_in_environment"):
        os._exit(7)
    if is_requested("leave_environment"):
        sys.exit(3)
    if is_requested("block_environment"):
        time.sleep(FOREVER_S)
    if is_requested("fill_environment"):
        taken = []
        while True:
            taken.append(bytearray(2**24))
    if is_requested("huge_tool_result"):
        await session.chat([{"role": "user", "content": "higher " * (2**22 // 7)}])
    if is_requested("poison_text"):
        raise ValueError("chaos: there is no place \ud83d")
    if is_requested("poison_number"):
        return Outcome(1e300)
    if is_requested("poison_metrics"):
        return Outcome(outcome.reward, metrics={"chaos/\ud83d": 1.0, "chaos/many": 10**30})
    return outcome
