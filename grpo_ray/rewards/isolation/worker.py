"""A worker of a RewardPool: it gives up what it does not need, then grades line by line.

It sends the pool lines of JSON: first ["ready"] or ["failed", why], then for each answer in order
["scores", {...}] or ["error", why]. When it has died, its fork server adds ["ended", how, answers begun].
"""

import json
import os
import socket
import traceback
from collections.abc import Mapping
from mmap import mmap

from grpo_ray.rewards.base import NotGraded, RewardFn, Scores
from grpo_ray.rewards.isolation.confinement import MappedMemory, confine

OUT_OF_MEMORY = 99  # exit status
LONGEST_ERROR = 500  # characters


def serve(
    channel: socket.socket, reward_fns: Mapping[str, RewardFn], memory_gib: float, num_begun: mmap
) -> None:
    """Grade the answers that arrive on `channel` until it is closed.

    Args:
        reward_fns: by task.
        num_begun: 8 bytes shared with the fork server: the number of answers begun. It shows which answer a
            worker died on, or that it died between answers.
    """
    try:
        confine(memory_gib)
    except OSError as error:
        _say(channel, "failed", describe_error(error))
        return
    _say(channel, "ready")
    memory = MappedMemory()
    enough = memory.num_bytes() + memory_gib * 2**30 / 2
    for count, line in enumerate(channel.makefile("rb"), 1):
        num_begun[:] = count.to_bytes(8, "little")
        try:
            task, response, ground_truth = json.loads(line)
            result = try_to_grade(reward_fns[task], response, ground_truth)
        except MemoryError:  # caches may hold on to the memory, and the next answer would run out of it
            os._exit(OUT_OF_MEMORY)
        _say(channel, "error" if isinstance(result, str) else "scores", result)
        if memory.num_bytes() > enough:  # memory that this answer left behind must not end another one
            return


def try_to_grade(reward_fn: RewardFn, response: str, ground_truth: str) -> Scores | str:
    """Return the reward's scores, or the reason why there are none."""
    try:
        return reward_fn(response, ground_truth)
    except MemoryError:  # it concerns the process, not only this answer
        raise
    except NotGraded as error:  # the reward was computed, and reached no verdict
        return _storable(str(error))
    except Exception as error:  # whatever a user's function raises is this answer's error alone
        return describe_error(error)


def describe_error(error: Exception) -> str:
    """Return the last line of a traceback, with file and line."""
    text = _storable(f"{type(error).__name__}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _storable(text: str) -> str:
    """Shorten the text, and replace lone surrogates."""
    return text[:LONGEST_ERROR].encode(errors="replace").decode()


def _say(channel: socket.socket, kind: str, *values: Scores | str) -> None:
    channel.sendall(json.dumps([kind, *values]).encode() + b"\n")
