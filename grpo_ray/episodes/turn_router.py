"""The way of an episode's turns to the Generators: to the one with the prefix, while it is not overloaded."""

import uuid
from collections.abc import Mapping

from grpo_ray.engines.base import EngineDied
from grpo_ray.episodes.serving_time import ServingTime
from grpo_ray.episodes.turn_link import TurnClient, TurnLink
from grpo_ray.errors import ActorDied, TurnLost
from grpo_ray.types import Completion, GeneratorFailure, SamplingSettings
from grpo_ray.watch.changes import Changes

SLACK = 8  # turns by which the Generator with the prefix may be busier than the least busy one


class TurnRouter:
    """The Generators that serve, as one worker sees them. One that fails costs the turn, not the episode."""

    def __init__(self, name: str, silence_s: float) -> None:
        """
        Args:
            name: of the worker.
            silence_s: see `TurnLink`.
        """
        self._worker, self._silence_s = (name, uuid.uuid4().hex), silence_s
        self.served = ServingTime(is_serving=False)
        self._serving: dict[int, TurnLink] = {}  # by number: a replacement has another one
        self._failures: list[GeneratorFailure] = []
        self._changes = Changes()  # of the two above

    async def serve(self, serving: Mapping[int, TurnClient]) -> None:
        """Send turns to these Generators from now on."""
        known = {failure.number for failure in self._failures}
        self._serving = {
            number: self._serving.get(number) or TurnLink(client, self._worker, self._silence_s)
            for number, client in serving.items()
            if number not in known
        }
        self.served.set(bool(self._serving))
        self._changes.announce()

    async def failures(self, num_known: int) -> list[GeneratorFailure]:
        """Wait until more than `num_known` Generators have failed; return the others."""
        await self._changes.until(lambda: len(self._failures) > num_known)
        return self._failures[num_known:]

    async def sample(
        self, token_ids: tuple[int, ...], settings: SamplingSettings, preferred: int | None
    ) -> tuple[Completion, int]:
        """Sample a turn; return it, and the number of the Generator that now has its prefix.

        Args:
            preferred: the number that the episode's last turn returned.

        Raises:
            TurnLost: two Generators that had begun the turn have failed; the turn may be the cause.
        """
        num_lost = 0
        while True:
            number = await self._choose(preferred)
            link = self._serving[number]
            num_before = link.num_answers
            try:
                return await link.sample(token_ids, settings), number
            except (ActorDied, EngineDied, TimeoutError) as error:
                self._fail(number, str(error))
                num_lost += link.num_answers > num_before  # or else it was dead before it had the turn
                if num_lost == 2:
                    raise TurnLost(f"two Generators failed with one turn; the second: {error}") from error

    async def _choose(self, preferred: int | None) -> int:
        await self._changes.until(lambda: self._serving)
        least = min(self._serving, key=lambda number: self._serving[number].num_turns)
        if preferred is None or preferred not in self._serving:
            return least
        busier = self._serving[preferred].num_turns - self._serving[least].num_turns
        return preferred if busier <= SLACK else least

    def _fail(self, number: int, error: str) -> None:
        if number in self._serving:
            self._serving = {other: link for other, link in self._serving.items() if other != number}
            self.served.set(bool(self._serving))
            self._failures.append(GeneratorFailure(number, error))
            self._changes.announce()


class RoutedSampler:
    """One session's sampler."""

    def __init__(self, router: TurnRouter) -> None:
        self._router = router
        self._has_prefix: int | None = None
        self.lost: TurnLost | None = None

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        """Sample one completion."""
        try:
            completion, self._has_prefix = await self._router.sample(
                prompt_token_ids, settings, self._has_prefix
            )
        except TurnLost as lost:
            self.lost = lost
            raise
        return completion
