"""The Learner's ranks as one client, which ends all of them at the first error of one."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from grpo_ray.cluster.kinds import Answer, BaseClient
from grpo_ray.cluster.remote_actor import Client
from grpo_ray.config import Config
from grpo_ray.errors import FORGED, ActorDied, DataLost, OutOfDeviceMemory, RunError
from grpo_ray.learning.ranks import WRITE_TIMEOUT, Seat
from grpo_ray.learning.rendezvous import NUM_BYTES, open_store

GRACE_S = 5.0  # for the other ranks, after the first error; those that wait for the failed one never answer


def seats_of(config: Config, host: str) -> tuple[TCPStore, list[Seat]]:
    """Return the store where the ranks find each other, to keep as long as they run, and the seat of each.

    Args:
        host: the address of this node, which all ranks reach.
    """
    learner, store = config.learner, open_store(host)
    first = Seat(
        rank=0,
        size=learner.num_ranks,
        replicas=learner.replicas,
        # A colocated rank keeps the GPU that it shares with its Generator.
        ranks_per_node=1 if config.generator.colocated else learner.num_ranks_per_node,
        host=store.host,
        port=store.port,
        start_timeout_s=config.recovery.start_timeout_s,
        collective_timeout_s=learner.collective_timeout_s,
        secret=secrets.token_bytes(NUM_BYTES),
    )
    return store, [replace(first, rank=rank) for rank in range(learner.num_ranks)]


class Crew(BaseClient):
    """Makes each call to every rank; the answer is that of the first, once all have answered.

    If a rank dies, fails while others wait for it in a collective, or has no answer long after another's, all
    are killed, because one that hangs in a collective cannot be asked to stop. Every open and later call then
    raises the same error, which names the rank, its node and the cause. An error that all ranks raise alike, or
    an OSError of some, is raised as it is: none of them waits.
    """

    def __init__(
        self, name: str, ranks: Sequence[Client], place_of: Callable[[str], str], wait_s: float
    ) -> None:
        """`place_of` returns a rank's node by its name; `wait_s` is for the answers after the first one."""
        self.name, self._ranks, self._place_of, self._wait_s = name, ranks, place_of, wait_s
        self._errors: list[tuple[int, BaseException]] = []  # of any call, with their ranks, oldest first
        self._ending: BaseException | None = None  # the error that ended the ranks

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        # The first rank writes the model alone.
        limit_s = WRITE_TIMEOUT.total_seconds() if method == "write_captured" else self._wait_s
        answers = [getattr(rank, method)(*args) for rank in self._ranks]
        if isinstance(answers[0], Answer):
            return Answer(partial(self.first_answer, answers, limit_s))
        bulk, _ = answers[0]
        return bulk, Answer(partial(self.first_answer, [facts for _, facts in answers], limit_s))

    async def first_answer(self, answers: Sequence[Awaitable[Any]], limit_s: float) -> Any:
        """Return the first rank's answer.

        Raises:
            ActorDied, OutOfDeviceMemory: all ranks were ended.
            RunError, or an actor's own error: see the class.
        """
        waits = [asyncio.ensure_future(answer) for answer in answers]
        for rank, wait in enumerate(waits):  # none is cancelled: a call of one rank alone waits for the others
            wait.add_done_callback(partial(self._note_error, rank))
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if pending and not any(wait.exception() for wait in done):
            _, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=GRACE_S)
        errors = [error for wait in waits if wait.done() and (error := wait.exception())]
        if errors or pending:
            self._raise(errors, [rank for rank, wait in enumerate(waits) if wait in pending])
        return waits[0].result()

    def _note_error(self, rank: int, wait: asyncio.Future[Any]) -> None:
        if not wait.cancelled() and (error := wait.exception()):
            self._errors.append((rank, error))

    def _raise(self, errors: list[BaseException], silent: Sequence[int]) -> NoReturn:
        if self._ending is None:
            if not silent and self._is_of_none_waiting(errors):
                self._errors = [each for each in self._errors if each[1] not in errors]
                raise errors[0]
            self._ending = self._cause(silent)
            for client in self._ranks:
                ray.kill(client.handle)
        raise self._ending

    def _is_of_none_waiting(self, errors: Sequence[BaseException]) -> bool:
        are_alike = len({(type(error), str(error)) for error in errors}) == 1
        is_own = not isinstance(errors[0], torch.OutOfMemoryError) and _kind(errors[0]) <= OWN
        is_of_all = len(errors) == len(self._ranks) and are_alike and is_own
        return is_of_all or all(isinstance(error, OSError) for error in errors)

    def _cause(self, silent: Sequence[int]) -> BaseException:
        """Return the error that all ranks end with: that of the rank which is most likely at fault."""
        unheard = [f"{self._place(rank)}: no answer" for rank in silent]
        if not self._errors:
            return ActorDied(self.name, "; ".join(unheard))
        rank, error = min(self._errors, key=lambda each: _kind(each[1]))
        if isinstance(error, RunError):
            return error
        reasons = [f"{self._place(rank)}: {_text(error)}"]
        if _kind(error) == OF_COLLECTIVE:
            reasons = [*unheard, *reasons]
        elif _kind(error) == DEATH and 2 * len(unheard) <= len(self._ranks):  # else they wait for the dead one
            reasons += unheard
        if isinstance(error, OutOfDeviceMemory):
            return OutOfDeviceMemory(self.name, "; ".join(reasons), error.num_tokens)
        return ActorDied(self.name, "; ".join(reasons))

    def _place(self, rank: int) -> str:
        name = self._ranks[rank].name
        return f"{name} on {self._place_of(name) or 'an unknown node'}"


CERTAIN, OWN, DEATH, OF_COLLECTIVE = range(4)  # from the surest cause to the surest consequence


def _kind(error: BaseException) -> int:
    """Return how likely an error is to be another rank's fault: a collective fails when a rank is gone."""
    if isinstance(error, OutOfDeviceMemory | torch.OutOfMemoryError | RunError | DataLost):
        return CERTAIN
    text = f"{type(error)} {error}".lower()  # of an actor that failed at its start there is only the text
    if FORGED in text:
        return CERTAIN
    if any(word in text for word in ("gloo", "pair closure", "nccl", "torch.distributed")):
        return OF_COLLECTIVE
    return DEATH if isinstance(error, ActorDied) else OWN


def _text(error: BaseException) -> str:
    if isinstance(error, ActorDied):
        return error.reason
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
