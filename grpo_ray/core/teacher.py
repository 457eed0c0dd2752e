"""Teacher: the logprobs that another model assigns to the policy's tokens."""

import numpy as np

from grpo_ray.engines.base import TeacherEngine
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.types import RolloutGroup, ScoredGroup
from grpo_ray.watch.stage_clock import ClockedActor, StageClock


class Teacher(ClockedActor):
    """A model that is not trained, as an actor; its engine is ready once it is made."""

    def __init__(self, name: str, engine: TeacherEngine) -> None:
        self.name = name
        self._engine = engine
        self._clock = StageClock(("look_up",), rest="wait_for_groups")

    async def look_up(self, group: RolloutGroup) -> tuple[np.ndarray, int]:
        """Return the group's `teacher_logprobs`, as in ScoredGroup, and the number of tokens that have one.

        Every branch of an episode is a sequence of its own, so each token is judged in its own context.

        Raises:
            ValueError: a logprob is not finite.
        """
        none = np.zeros(len(group.completions), np.float32)
        sequences = sequences_of([ScoredGroup(none, none, none, none, rollout=group)])
        with self._clock.stage("look_up", f"group {group.item.group_id}"):
            found = np.concatenate([np.empty(0), *await self._engine.logprobs(sequences)])
        if not np.isfinite(found).all():
            raise ValueError(f"{self.name} has no finite logprob for a token of group {group.item.group_id}")
        is_sampled = np.concatenate([completion.mask for completion in group.completions])
        logprobs = np.zeros(len(is_sampled), np.float32)
        logprobs[is_sampled] = found
        return logprobs, len(found)

    async def shutdown(self) -> None:
        await self._engine.shutdown()
