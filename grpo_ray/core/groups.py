"""GroupBook: the one owner of every group's state. A plain object in the driver, without awaits.

    NEW -> IN_FLIGHT -> SCORED -> ENTERING -> BUFFERED -> IN_BATCH -> trained
             |   ^                   |           |  |         |
             v   |                   v           v  v         v
             |  WAITING <------------+-----------+  DROPPED --+-> dropped
             v
          set aside

A group without a record is NEW (its id was never given out) or gone: trained, dropped for lack of signal, or
set aside because every attempt to finish it failed. A WAITING group was lost, cut off, or refused as too old;
it is dispatched again, so no prompt of an epoch is skipped. Each move names the state that it starts from,
so no group is lost, and none is trained twice.

The buffer holds the bytes of groups that are BUFFERED, DROPPED or, until they are handed out, IN_BATCH.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from grpo_ray.config import Config
from grpo_ray.core.batch_queue import BatchQueue
from grpo_ray.core.staleness import Admission, oldest_allowed, version_trained_at
from grpo_ray.tasks.prompt_order import PromptStream
from grpo_ray.types import NO_VERSION, GroupFacts, PromptItem


class State(Enum):
    """The state of a group that was dispatched and is not gone."""

    IN_FLIGHT = "in flight"  # it is sampled and scored
    SCORED = "scored"  # it waits for room in the buffer
    ENTERING = "entering the buffer"
    BUFFERED = "buffered"
    DROPPED = "dropped"  # for lack of signal; its bytes leave with the next batch
    IN_BATCH = "in a batch"
    WAITING = "waiting"  # to be dispatched again


UNKNOWN = GroupFacts(NO_VERSION, has_signal=True, num_bytes=0, outcome=None)


@dataclass
class _Group:
    state: State
    version: int | None = None  # published when a Generator was given it; None while it waits for one
    facts: GroupFacts = UNKNOWN  # from the Scorer's verdict on
    num_cuts: int = 0


@dataclass(frozen=True)
class Batch:
    """The groups of one step, by id: `group_ids` are trained, `dropped_ids` are recorded alongside them."""

    step: int
    group_ids: tuple[int, ...]
    dropped_ids: tuple[int, ...]
    oldest_version: int  # of a token that may be trained
    late_ids: tuple[int, ...]  # groups in flight that were cut off: cancel their work
    num_refused: int  # groups refused as too old since the batch before
    num_cut: int  # groups cut off since the batch before
    num_buffered: int  # groups that the buffer holds for later batches
    num_bytes: int


class GroupBook:
    """The state of every group, the admission of new ones, and the choice of each batch."""

    def __init__(self, config: Config, prompts: PromptStream, version: int = 0) -> None:
        """`version`: the published one."""
        fresh, is_oversampled = config.fresh_per_step, config.num_oversampled > 0
        max_dropped = config.algorithm.dynamic_sampling_tries * fresh
        self._prompts, self.published_version = prompts, version
        self._queue = BatchQueue(fresh, config.buffer.lookahead, is_oversampled, max_dropped)
        self._max_lag, num_steps = config.weight_sync.max_lag, config.algorithm.num_steps
        self._admission = Admission(
            self._max_lag - config.steps_overtaken, fresh, num_steps, config.num_oversampled
        )
        self._max_bytes = int(config.buffer.max_gib * 2**30)  # beyond the groups that the next batch waits for
        self._cuts_late = is_oversampled
        masks_old = config.episodes.over_age == "mask"  # the buffer masks old tokens of episodes
        self._masked_tasks = frozenset(config.episode_tasks if masks_old else ())
        self._groups: dict[int, _Group] = {}
        self._by_state: dict[State, dict[int, bool]] = {state: {} for state in State}  # has_signal, by arrival
        self.next_id = 0  # the first group that was never dispatched
        self.given_up: set[int] = set()  # the groups that were set aside
        self.num_trained = self.num_dropped = 0
        self._num_bytes = 0  # of the groups that are ENTERING or BUFFERED
        self._oldest_kept = 0  # groups with a token of an earlier version come too late
        self.discarded: list[int] = []  # their bytes are still in the buffer
        self._batch: Batch | None = None  # chosen, and not trained yet
        self._num_refused = self._num_cut = self.num_set_aside = 0  # since the last batch

    # Admission

    def publish(self, version: int) -> None:
        """Open admission for a version that WeightSync reports as loaded by every serving Generator."""
        self.published_version = version

    @property
    def num_admissible(self) -> int:
        """Groups that may be dispatched now."""
        return self._num_new + self._num_again

    @property
    def _num_new(self) -> int:
        return max(0, self._admission.limit(self.published_version) - self.next_id)

    @property
    def _num_again(self) -> int:
        """Waiting groups, or 0 while the published version is too old for the next batch."""
        return len(self._by_state[State.WAITING]) if self.published_version >= self._oldest_kept else 0

    def admit(self, max_groups: int) -> list[PromptItem]:
        """Move up to `max_groups` groups into flight, waiting ones first; return their prompts."""
        again = sorted(self._by_state[State.WAITING])[: min(self._num_again, max_groups)]
        self._move(again, State.WAITING, State.IN_FLIGHT)
        new = range(self.next_id, self.next_id + min(self._num_new, max_groups - len(again)))
        for group_id in new:
            self._groups[group_id] = _Group(State.IN_FLIGHT)
            self._put_into(State.IN_FLIGHT, group_id)
        self.next_id += len(new)
        return [self._prompts.item(group_id, self._groups[group_id].num_cuts) for group_id in (*again, *new)]

    # One group

    def sampling(self, group_id: int) -> None:
        """Note that a Generator has been given the group, under the published version."""
        self._checked([group_id], State.IN_FLIGHT)
        self._groups[group_id].version = self.published_version

    def scored(self, group_id: int, facts: GroupFacts) -> None:
        """Note the Scorer's verdict; from here on the group is not cut off, and it waits for room."""
        self._move([group_id], State.IN_FLIGHT, State.SCORED)
        self._groups[group_id].facts = facts

    def enter(self, group_id: int) -> bool:
        """Let a scored group into the buffer if there is room, or the next batch waits for it."""
        self._checked([group_id], State.SCORED)
        num_bytes = self._num_bytes + self._groups[group_id].facts.num_bytes
        if num_bytes > self._max_bytes and not self._queue.is_awaited(group_id):
            return False
        self._move([group_id], State.SCORED, State.ENTERING)
        return True

    def buffered(self, group_id: int) -> bool:
        """Note that the buffer has the group; one that came too late is cut off.

        Returns:
            True if groups left the order of batches, so that others may have room now.
        """
        self._move([group_id], State.ENTERING, State.BUFFERED)
        is_late = self._is_too_old(group_id, self._oldest_kept)
        if is_late:
            self._count_cuts([group_id])
            self._discard([group_id])
        return self._settle() or is_late

    def lost(self, group_ids: Iterable[int]) -> None:
        """Let groups that were lost on their way into the buffer wait to be dispatched again."""
        self._move(group_ids, State.ENTERING, State.WAITING)

    def set_aside(self, group_id: int) -> None:
        """Give up a group that could not be finished; another one gets its slot."""
        self._leave([group_id], State.IN_FLIGHT)
        self.given_up.add(group_id)
        self.num_set_aside += 1
        self._queue.leave([group_id])
        self._admission.extra_slots += 1
        self._settle()

    # Batches

    def batch(self, step: int) -> Batch | None:
        """Choose the batch of `step`; None while it is not complete.

        A group with a token older than `max_lag` is refused, counted, and dispatched again.
        """
        group_ids = self._queue.batch(self._by_state[State.BUFFERED])
        if group_ids is None:
            return None
        oldest = oldest_allowed(version_trained_at(step), self._max_lag)
        if refused := [group_id for group_id in group_ids if self._is_too_old(group_id, oldest)]:
            self._num_refused += len(refused)
            self._discard(refused)
            return None
        dropped_ids = tuple(sorted(self._by_state[State.DROPPED]))
        self._move(group_ids, State.BUFFERED, State.IN_BATCH)
        self._move(dropped_ids, State.DROPPED, State.IN_BATCH)
        self._queue.train(group_ids)
        late_ids = self._cut_late(step + 1) if self._cuts_late else ()
        self._settle()
        counts = self._num_refused, self._num_cut, self.num_in(State.BUFFERED), self._num_bytes
        self._num_refused = self._num_cut = self.num_set_aside = 0
        self._batch = Batch(step, group_ids, dropped_ids, oldest, late_ids, *counts)
        return self._batch

    def _cut_late(self, step: int) -> tuple[int, ...]:
        """Cut off the groups that would be too old for the batch of `step`; return those in flight."""
        oldest = self._oldest_kept = oldest_allowed(version_trained_at(step), self._max_lag)
        active = {g: self._groups[g].version for g in self._by_state[State.IN_FLIGHT] if not self._keeps_old(g)}
        sampled = [g for g, version in active.items() if version is not None and version < oldest]
        waiting = [g for g, version in active.items() if version is None and self.published_version < oldest]
        buffered = [g for g in self._by_state[State.BUFFERED] if self._is_too_old(g, oldest)]
        self._count_cuts([*buffered, *sampled])
        self._discard(buffered)
        # Those that wait for a Generator, too: they would get the room that the others leave.
        self._move([*sampled, *waiting], State.IN_FLIGHT, State.WAITING)
        return *sampled, *waiting

    def trained(self, step: int) -> None:
        """Note that the Learner has trained the batch of `step`, and report its outcomes to the stream."""
        batch, self._batch = self._batch, None
        assert batch is not None, "no batch was taken"
        assert batch.step == step, f"step {batch.step} is in training"
        done = [*batch.group_ids, *batch.dropped_ids]
        outcomes = {group: self._groups[group].facts.outcome for group in done}
        self._prompts.order.observe({group: known for group, known in outcomes.items() if known is not None})
        self._leave(done, State.IN_BATCH)
        self.num_trained += len(batch.group_ids)
        self.num_dropped += len(batch.dropped_ids)

    def take_discarded(self) -> list[int]:
        """Return the groups that the buffer must discard before they may be dispatched again."""
        discarded, self.discarded = self.discarded, []
        return discarded

    # Counts

    def num_in(self, *states: State) -> int:
        """Return the number of groups in these states."""
        return sum(len(self._by_state[state]) for state in states)

    def ids_in(self, state: State) -> tuple[int, ...]:
        return tuple(sorted(self._by_state[state]))

    @property
    def unfinished(self) -> frozenset[int]:
        """Groups that were dispatched and are not gone."""
        return frozenset(self._groups)

    def metrics(self) -> dict[str, float]:
        """Return the step metrics of the stream of prompts, and the number of groups set aside."""
        return {**self._prompts.order.metrics(), "rollout/set_aside_groups": float(len(self.given_up))}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values, which `load_state_dict` restores.

        A batch that is chosen but not trained counts as buffered: a resumed run samples it again.
        """
        buffered = (State.BUFFERED, State.DROPPED, State.IN_BATCH)
        in_flight = (State.IN_FLIGHT, State.SCORED, State.ENTERING)
        return {
            **self._prompts.state_dict(),
            "next_group_id": self.next_id,
            "in_flight": sorted(g for state in in_flight for g in self._by_state[state]),
            "buffered": sorted(g for state in buffered for g in self._by_state[state]),
            "waiting": list(self.ids_in(State.WAITING)),
            "cuts": [[group_id, group.num_cuts] for group_id, group in self._groups.items() if group.num_cuts],
            "set_aside": sorted(self.given_up),
            "num_trained": self.num_trained,
            "num_dropped": self.num_dropped,
        }

    def load_state_dict(self, saved: Mapping[str, Any], held: Mapping[int, GroupFacts]) -> None:
        """Restore a new book at the checkpoint's version; the stream of prompts has been restored before.

        Args:
            held: the groups that the buffer holds, by id; every other unfinished group waits.
        """
        assert not self._groups, "the book is in use"
        unfinished = {*saved["waiting"], *saved["in_flight"], *saved["buffered"]}
        self.next_id = saved["next_group_id"]
        self.given_up = set(saved["set_aside"])
        self.num_trained, self.num_dropped = saved["num_trained"], saved["num_dropped"]
        cuts = dict(saved.get("cuts", ()))  # an earlier release kept none
        num_gone = self.num_trained + self.num_dropped + len(self.given_up)
        self._admission.extra_slots += num_gone - self.published_version * self._admission.fresh_per_step
        self._queue.begin(unfinished, self.next_id)
        for group_id in sorted(unfinished):
            state = State.BUFFERED if group_id in held else State.WAITING
            self._groups[group_id] = _Group(state, None, held.get(group_id, UNKNOWN), cuts.get(group_id, 0))
            self._put_into(state, group_id)
        if self._cuts_late:  # what reached the buffer after the last cut
            self._cut_late(self.published_version + 1)
        self._settle()

    # Moves

    def _checked(self, group_ids: Iterable[int], source: State) -> list[int]:
        """Return the ids as a list; raises ValueError if one is in another state, or is listed twice."""
        ids = list(group_ids)
        wrong = {g for g in ids if g not in self._groups or self._groups[g].state is not source}
        if len(set(ids)) < len(ids):
            wrong |= {g for g in ids if ids.count(g) > 1}
        if wrong:
            raise ValueError(f"groups {sorted(wrong)} are not {source.value} (or listed twice)")
        return ids

    def _move(self, group_ids: Iterable[int], source: State, target: State) -> None:
        """Move groups to another state; all of them, or none if one is in another state."""
        for group_id in self._checked(group_ids, source):
            group = self._groups[group_id]
            self._take_from(group_id, group)
            group.state = target
            if target in (State.WAITING, State.IN_FLIGHT):
                group.version, group.facts = None, UNKNOWN
            self._put_into(target, group_id)

    def _leave(self, group_ids: Iterable[int], source: State) -> None:
        """Remove the records of groups that are done."""
        ids = self._checked(group_ids, source)
        for group_id in ids:
            self._take_from(group_id, self._groups.pop(group_id))
        self._prompts.order.forget(ids)

    def _put_into(self, state: State, group_id: int) -> None:
        facts = self._groups[group_id].facts
        self._by_state[state][group_id] = facts.has_signal
        self._num_bytes += facts.num_bytes if state in (State.ENTERING, State.BUFFERED) else 0

    def _take_from(self, group_id: int, group: _Group) -> None:
        del self._by_state[group.state][group_id]
        self._num_bytes -= group.facts.num_bytes if group.state in (State.ENTERING, State.BUFFERED) else 0

    def _count_cuts(self, group_ids: Sequence[int]) -> None:
        """Count the cut of groups that come too late for the next batch."""
        for group_id in group_ids:
            self._groups[group_id].num_cuts += 1
        self._num_cut += len(group_ids)

    def _discard(self, group_ids: Sequence[int]) -> None:
        self.discarded += group_ids
        self._move(group_ids, State.BUFFERED, State.WAITING)

    def _settle(self) -> bool:
        """Drop groups without signal, which give their slots to others; return True if there were any."""
        dropped = self._queue.drop(self._by_state[State.BUFFERED])
        self._move(dropped, State.BUFFERED, State.DROPPED)
        self._admission.extra_slots += len(dropped)
        return bool(dropped)

    def _is_too_old(self, group_id: int, oldest_version: int) -> bool:
        return self._groups[group_id].facts.oldest_version < oldest_version and not self._keeps_old(group_id)

    def _keeps_old(self, group_id: int) -> bool:
        return bool(self._masked_tasks) and self._prompts.task(group_id) in self._masked_tasks
