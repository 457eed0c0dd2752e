"""Running episodes: many at a time on one event loop, each to an end with a name."""

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from grpo_ray.config.episodes import GRACE_S
from grpo_ray.config.user_code import import_function
from grpo_ray.episodes.confinement import hint_for
from grpo_ray.episodes.outcome import Outcome, Status, episode_of
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.threads import EpisodeThread, RunningEpisode, SessionElsewhere
from grpo_ray.episodes.turn_router import ServingTime
from grpo_ray.records.episode_metrics import CUT, THEN_RAISED
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Episode

if TYPE_CHECKING:
    from grpo_ray.episodes.openai_server import ChatServer

EpisodeFn = Callable[[Session, Example], Awaitable[float | Outcome]]
ERROR_CHARS = 2000


def load_episode(name: str, field: str = "task.episode") -> EpisodeFn:
    """Import the episode function named `module:function`; modules of the current folder are found too.

    Raises:
        ValueError: there is no such function, its module fails, or it is not an `async def` of two arguments.
    """
    function = import_function(name, field)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{field}: {name} must be an `async def`, so that it can await session.chat")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{field}: {name} must take (session, example): {error}") from None
    return function


class EpisodeRunner:
    """A runner of one kind of episodes."""

    def __init__(
        self, episode: EpisodeFn, max_concurrent: int | None = None, server: "ChatServer | None" = None,
        served: ServingTime | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            max_concurrent: episodes that run at the same time; the others wait. None: all.
            server: gives each running session its `base_url`.
            served: the clock of the episodes' limits of time; default: one that always runs.
        """
        self._episode, self._server, self._served = episode, server, served or ServingTime()
        self._places = asyncio.Semaphore(max_concurrent or 2**31)

    async def run(self, session: Session, example: Example, thread: EpisodeThread | None = None) -> Episode:
        """Run one episode to its end; its limit of time begins when it starts.

        Errors of the episode function are in the episode, not raised. Cancelling the call cancels the episode.

        Args:
            thread: runs the episode function; default: this thread.
        """
        server = contextlib.nullcontext() if self._server is None else self._server.serving(session)
        async with self._places:
            started = time.monotonic()
            with server:
                given = session if thread is None else cast(Session, SessionElsewhere(session))
                running = RunningEpisode(_guarded(self._episode, given, example), thread)
                try:
                    if not await self._served.wait(running.done, session.limits.max_seconds):
                        session.end(Status.TRUNCATED_TIME, f"not finished after {session.limits.max_seconds} s")
                finally:
                    if not running.done.done():
                        running.cancel()
                        await asyncio.wait({running.done}, timeout=GRACE_S)
                    session.end(Status.FINISHED, "the episode has ended")  # a task left behind samples no more
            return _result(running.done, session, time.monotonic() - started)


async def _guarded(episode: EpisodeFn, session: Session, example: Example) -> float | Outcome:
    try:
        return await episode(session, example)
    except SystemExit as error:  # it would end the worker with all of its episodes
        raise RuntimeError(f"the episode called exit({error.code})") from error
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # such as KeyboardInterrupt, which would end the group's event loop
        raise RuntimeError(f"the episode raised {type(error).__name__}") from error


def _result(done: "asyncio.Future[float | Outcome]", session: Session, seconds: float) -> Episode:
    assert session.ended is not None
    status, reason = session.ended.status, str(session.ended)
    outcome, error = _outcome_of(done, session)
    has_returned = done.done() and not done.cancelled() and done.exception() is None
    if not done.done():
        reason += f", and ignored its cancellation for {GRACE_S} s"
    elif error is not None and (status is Status.FINISHED or (status in CUT and has_returned)):
        status = Status.CANCELLED if isinstance(error, asyncio.CancelledError) else Status.ENVIRONMENT_ERROR
        reason = _traceback(error)[-ERROR_CHARS:] + hint_for(error)
        _forget_variables(error)
    elif error is not None and status in CUT and reason not in (said := str(error)):
        reason += f"{THEN_RAISED}{type(error).__name__}: {said}"[:ERROR_CHARS]
    if status in CUT:
        outcome = outcome or Outcome(session.limits.truncated_reward)
    elif status is Status.ENVIRONMENT_ERROR and session.limits.error_reward is not None:
        outcome = Outcome(session.limits.error_reward)
    elif status is not Status.FINISHED:
        outcome = None
    error_text = "" if status is Status.FINISHED else reason
    return episode_of(session.segments, session.decode, status, outcome, seconds, error_text)


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as own:  # the error's own methods and attributes may fail
        return f"{type(error).__name__}, of which no traceback can be shown ({type(own).__name__})"


def _forget_variables(error: BaseException | None) -> None:
    """Free what the frames of an error hold, which after a MemoryError may be all memory.

    The error is in a cycle with the future that has it, so they would go only with the next garbage collection.
    """
    seen = set()
    while error is not None and id(error) not in seen:  # its contexts may be a circle
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _outcome_of(
    done: "asyncio.Future[float | Outcome]", session: Session
) -> tuple[Outcome | None, BaseException | None]:
    """Return what the episode function returned, or else the reason that it did not."""
    try:
        failure = done.exception()
        return (None, failure) if failure is not None else (_read_outcome(done.result(), session), None)
    except (Exception, asyncio.CancelledError) as error:
        return None, error


def _read_outcome(returned: object, session: Session) -> Outcome:
    """Return what an episode function returned as an outcome.

    Raises:
        ValueError: it is no number or outcome, one that `Outcome` refuses, or lacks a reward per turn.
    """
    if not isinstance(returned, Outcome):
        return Outcome(returned)  # type: ignore[arg-type]
    outcome = Outcome(returned.reward, returned.turn_rewards, returned.metrics)  # its metrics may have changed
    num_turns = session.segments.num_turns
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != num_turns:
        raise ValueError(f"{len(outcome.turn_rewards)} turn_rewards for {num_turns} sampled turns")
    return outcome
