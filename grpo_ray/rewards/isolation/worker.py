"""What a worker of a RewardPool does: it gives up what it will not need, and grades a line at a time.

To the pool it says, each as a line of JSON, ["ready"] or ["failed", why], and then for each answer in its order
["scores", {...}] or ["error", why]. Its nursery adds ["ended", how, answers begun] when it has died.
"""

import json
import os
import socket
import traceback
from collections.abc import Mapping
from mmap import mmap
from typing import Any

from grpo_ray.rewards.base import NotGraded, RewardFn
from grpo_ray.rewards.isolation.confinement import MappedMemory, confine

OUT_OF_MEMORY = 99  # exit status
LONGEST_ERROR = 500  # characters


def serve(
    channel: socket.socket, reward_fns: Mapping[str, RewardFn], memory_gib: float, num_begun: mmap
) -> None:
    """Grade what comes in by `channel` until it is closed.

    Args:
        reward_fns: by task.
        num_begun: 8 bytes that are shared with the nursery; counts the answers begun, so that it is known
            for sure which one a worker died on, or that it was on none.
    """
    try:
        confine(memory_gib)
    except OSError as error:
        _say(channel, ["failed", describe(error)])
        return
    _say(channel, ["ready"])
    memory = MappedMemory()
    enough = memory.num_bytes() + memory_gib * 2**30 / 2
    for count, line in enumerate(channel.makefile("rb"), 1):
        num_begun[:] = count.to_bytes(8, "little")
        try:
            task, response, ground_truth = json.loads(line)
            verdict = try_to_grade(reward_fns[task], response, ground_truth)
        except MemoryError:  # it may lie about in caches, where the next answer would run into it
            os._exit(OUT_OF_MEMORY)
        _say(channel, verdict)
        if memory.num_bytes() > enough:  # what this answer has left in memory must not be another one's end
            return


def try_to_grade(reward_fn: RewardFn, response: str, ground_truth: str) -> list[Any]:
    """["scores", what the reward gives], or ["error", why it gives nothing]."""
    try:
        return ["scores", reward_fn(response, ground_truth)]
    except MemoryError:  # the process is in trouble, not only this answer
        raise
    except NotGraded as error:  # it has been looked at, and there is no telling
        return ["error", _storable(str(error))]
    except Exception as error:  # whatever a user's function raises is this answer's error alone
        return ["error", describe(error)]


def describe(error: Exception) -> str:
    """The last line of a traceback, with the place."""
    text = _storable(f"{type(error).__name__}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _storable(text: str) -> str:
    """Not too long, and without half a character."""
    return text[:LONGEST_ERROR].encode(errors="replace").decode()


def _say(channel: socket.socket, message: list[Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
