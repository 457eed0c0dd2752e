"""A worker of a RewardPool: it gives up what it does not need, then grades line by line.

It sends the pool lines of JSON: first ["ready", its pid] or ["failed", why], then ["results", [...]] for each
line. A result is ["scores", {...}], ["ungradable", why] (the answer's doing) or ["error", why] (the
function's or the truth's). Only answers that must be graded together come in one line.
When it has died, its fork server adds ["ended", how, whether the answer did it, answers begun]; if it could
not be forked, the fork server says ["refused", why]. messages.py reads all of these.
"""

import json
import os
import socket
import traceback
from collections.abc import Mapping
from itertools import dropwhile
from mmap import mmap
from typing import Any

from grpo_ray.rewards.base import Graded, NotGraded, Result, ScoringError, Ungradable
from grpo_ray.rewards.configured import TermReward
from grpo_ray.rewards.isolation.confinement import Confinement, MappedMemory
from grpo_ray.rewards.isolation.messages import LARGEST_REWARD, is_storable, max_bytes, storable

OUT_OF_MEMORY = 99  # exit status
LONGEST_LINE, LONGEST_TRACE = 500, 1200  # characters of an error


def serve(
    channel: socket.socket, rewards: Mapping[str, TermReward], confinement: Confinement, num_begun: mmap
) -> None:
    """Grade the answers that arrive on `channel` until it is closed.

    Args:
        rewards: by task.
        num_begun: 8 bytes shared with the fork server: the number of lines begun. It shows which answer a
            worker died on, or that it died between answers.
    """
    memory = MappedMemory()
    try:
        confinement.enter()
    except (OSError, OverflowError, ValueError) as error:
        _say(channel, "failed", describe_error(error))
        return
    _say(channel, "ready", os.getpid())
    enough = memory.num_bytes() + confinement.memory_gib * 2**30 / 2
    for count, line in enumerate(channel.makefile("rb"), 1):
        num_begun[:] = count.to_bytes(8, "little")
        try:
            task, responses, truths, about = json.loads(line)
            results = rewards[task](responses, truths, about)
            messages = [_message(result, len(results)) for result in results]
        except MemoryError:  # caches may hold on to the memory, and the next answer would run out of it
            os._exit(OUT_OF_MEMORY)
        _say(channel, "results", messages)
        if memory.num_bytes() > enough:  # memory that this answer left behind must not end another one
            return


def _message(outcome: Graded, num_results: int) -> list[Any]:
    """Return what to say of a response; the results of a group must not be too long together."""
    result = result_of(outcome)
    if isinstance(result, dict):
        return ["scores", result]
    kind = "ungradable" if isinstance(result, Ungradable) else "error"
    return [kind, str(result)[: max_bytes(num_results) // (8 * num_results)]]


def result_of(outcome: Graded) -> Result:
    """Return scores that can be stored, Ungradable for the answer's doing, or the error of the grader."""
    if isinstance(outcome, dict):
        for value in outcome.values():
            if not is_storable(value):
                return ScoringError(f"the reward is {value:g}; it must be within +-{LARGEST_REWARD:g}")
        return outcome
    if isinstance(outcome, Ungradable):
        return Ungradable(storable(str(outcome)))
    if isinstance(outcome, NotGraded):
        return ScoringError(storable(str(outcome)))
    # Whatever a user's function raises is this answer's error alone.
    return ScoringError(describe_error(outcome, SANDBOX if isinstance(outcome, PermissionError) else ""))


SANDBOX = (
    "; the grader's sandbox forbids writing files, connecting and starting processes, and reads only modules "
    "and scorer.readable_paths"
)
CALLERS = tuple(
    f"grpo_ray/rewards/{file}.py" for file in ("isolation/worker", "user_function", "configured", "networked")
)


def describe_error(error: Exception, hint: str = "") -> str:
    """Return the error and its place on one line, and below it the traceback from the function on."""
    text = f"{type(error).__name__}: {str(error)[:LONGEST_LINE]}"
    frames = list(
        dropwhile(lambda frame: frame.filename.endswith(CALLERS), traceback.extract_tb(error.__traceback__))
    )
    if not frames:
        return storable(text + hint)
    trace = "".join(traceback.format_list(frames)).rstrip()
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
    return storable(f"{text} ({place}){hint}\n{trace[-LONGEST_TRACE:]}")


def _say(channel: socket.socket, kind: str, *values: Any) -> None:
    channel.sendall(json.dumps([kind, *values]).encode() + b"\n")
