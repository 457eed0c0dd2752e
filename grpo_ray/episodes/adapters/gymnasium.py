"""An environment of Gymnasium as an episode: observations become messages, and replies become actions."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_ray.episodes.adapters import required
from grpo_ray.episodes.outcome import EpisodeEnded, Outcome
from grpo_ray.episodes.runner import EpisodeFn
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example


def gymnasium_episode(
    make: str | Callable[[], Any], show: Callable[[Any], str], read_action: Callable[[str], Any], *,
    malformed: str | None = None, malformed_reward: float = 0.0, in_thread: bool = False,
) -> EpisodeFn:  # fmt: skip
    """Return an episode function that plays an environment until it terminates or truncates.

    The environment is made anew for each episode and reset with `example.seed`, so a group's episodes begin in
    the same state. The first message is the example's question and the first observation. The reward is the sum
    of the environment's; each turn has that of its step. An episode at a limit keeps its rewards.

    Args:
        make: id of a registered environment, or a function that makes one.
        show: returns the text that the model is shown of an observation.
        read_action: returns the action that a reply stands for, or None if it stands for none.
        malformed: message after a reply without an action, which takes no step; None: the episode ends.
        malformed_reward: reward of a turn without an action.
        in_thread: run the environment in threads, since it takes long enough to hold up other episodes.

    Raises:
        ImportError: `make` is an id, and Gymnasium is not installed.
    """
    new = partial(required("gymnasium").make, make) if isinstance(make, str) else make

    async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs) if in_thread else function(*args, **kwargs)

    async def episode(session: Session, example: Example) -> Outcome:
        environment = await call(new)
        rewards: list[float] = []
        num_malformed, is_over = 0, False
        try:
            observation, _ = await call(environment.reset, seed=example.seed)
            text = "\n".join(part for part in (example.question, show(observation)) if part)
            messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
            while not is_over:
                reply = await session.chat(messages)
                action = read_action(reply.text)
                if action is None:
                    num_malformed += 1
                    rewards.append(malformed_reward)
                    is_over, text = malformed is None, malformed or ""
                else:
                    observation, reward, terminated, truncated, _ = await call(environment.step, action)
                    rewards.append(float(reward))
                    is_over, text = terminated or truncated, show(observation)
                messages += [reply.message, {"role": "user", "content": text}]
        except EpisodeEnded:
            pass
        finally:
            await call(environment.close)
        return Outcome(sum(rewards), tuple(rewards), {"num_malformed": float(num_malformed)})

    return episode
