"""A mixture with an episode and a reward that tell the secrets they see; its driver has those of `DRIVERS`."""

import os

import small_episodes

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example

DRIVERS = {
    "TOOL_KEY": "of the tool",
    "GRADER_KEY": "of the grader",
    "OTHER_KEY": "of nothing in the run",
    "HF_TOKEN": "of the hub",
}
SECRETS = (*DRIVERS, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LISTED, UNLISTED, PROC = 10.0, 1000.0, 100_000.0  # of a reward


def seen(listed: str) -> float:
    """Return what this process sees: LISTED for the value of `listed`, UNLISTED for each other secret."""
    others = [name for name in SECRETS if name != listed and name in os.environ]
    value = LISTED * (os.environ.get(listed) == DRIVERS[listed]) + UNLISTED * len(others)
    try:
        with open("/proc/self/environ") as file:
            return value + PROC * bool(file.read())
    except PermissionError:
        return value


def seen_by_a_child(listed: str) -> float:
    pipe, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(end, str(seen(listed)).encode())
        os._exit(0)
    os.close(end)
    os.waitpid(pid, 0)
    with os.fdopen(pipe) as file:
        return float(file.read())


async def spy(session: Session, example: Example) -> Outcome:
    reply = await session.chat([{"role": "user", "content": example.question}])
    metrics = {"seen": seen("TOOL_KEY"), "seen_by_a_child": seen_by_a_child("TOOL_KEY")}
    return Outcome(small_episodes.value(reply.text), metrics=metrics)


def grade(response: str, ground_truth: str) -> float:
    """Return `seen`, and up to 1 more, so that there is something to learn."""
    return seen("GRADER_KEY") + small_episodes.value(response)
