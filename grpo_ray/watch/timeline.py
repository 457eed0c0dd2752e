"""timeline.json: every actor's activity over time, for https://ui.perfetto.dev or chrome://tracing.

Format: Chrome's "Trace Event Format", an array of events. An actor is a row (tid) of consecutive turns without
a gap (complete events, `X`); spans that may overlap, such as rollouts, have tracks of their own (async events,
`b` and `e`). Times are microseconds since the epoch, so that actors on different machines line up.
"""

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from grpo_ray.records.durable import replacing
from grpo_ray.watch.metrics_catalog import RANK
from grpo_ray.watch.stage_clock import Span, StageTimes

MAX_BYTES = 64 * 2**20  # beyond it the older half is dropped
BEGIN, SEPARATOR, END = b"[\n", b",\n", b"\n]\n"
LONGEST_EVENT = 64 * 2**10  # bytes

Event = dict[str, Any]
ROWS = ("driver", "learner", "buffer", "scorer", "weight_sync")  # from the top; then the Generators
SCORERS = 10_000  # the first row of several Scorers, below every Generator
RANKS = 20_000  # the first row of several ranks of the Learner, which viewers draw at the Learner's place
TEACHERS = 30_000  # below the Scorers
ENVIRONMENTS = 40_000


class Timeline:
    """Appends events. The file is a whole JSON array after each append; a truncated last event is repaired."""

    def __init__(self, path: Path, run_name: str, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._run_name, self._max_bytes = path, run_name, max_bytes
        self._named: set[str] = set()  # rows
        self._ids = count(1)
        self._end: int | None = None  # offset of the next event; None: not known, read the file

    def append(self, times: Mapping[str, StageTimes]) -> str | None:
        """Write the actors' turns and spans; return why they could not be written and are lost."""
        events = [event for name, each in times.items() for event in self._events(name, each)]
        if not events:
            return None
        try:
            self._write([json.dumps(event, separators=(",", ":")).encode() for event in events])
        except OSError as error:
            self._end = None
            return f"{self._path}: {error}; a part of the timeline is lost"
        return None

    def _events(self, actor: str, times: StageTimes) -> Iterator[Event]:
        where = {"pid": 1, "tid": row_of(actor)}
        if actor not in self._named:
            self._named.add(actor)
            yield {"ph": "M", "name": "process_name", **where, "args": {"name": self._run_name}}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": actor}}
            # From the top; rows of the same place are drawn in the order of their names.
            place = row_of("learner" if RANK.fullmatch(actor) else actor)
            yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": place}}
        for turn in times.turns:
            start, end = _microseconds(turn)
            event = {"ph": "X", "cat": "stage", "name": turn.name, **where, "ts": start, "dur": end - start}
            yield {**event, "args": {"what": turn.label}} if turn.label else event
        for span in times.spans:
            start, end = _microseconds(span)
            # One name for all spans of an actor: viewers give every name a track.
            event = {"cat": span.name, "name": f"{span.name} ({actor})", "id": next(self._ids), **where}
            yield {"ph": "b", **event, "ts": start, "args": {"what": span.label}}
            yield {"ph": "e", **event, "ts": end}

    def _write(self, lines: list[bytes]) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if self._end is None:
                self._end = _end_of_events(descriptor)
            start = BEGIN if self._end == 0 else SEPARATOR
            data = start + SEPARATOR.join(lines) + END
            if os.pwrite(descriptor, data, self._end) < len(data):
                raise OSError("the disk is full")
            self._end += len(data) - len(END)
            os.ftruncate(descriptor, self._end + len(END))
        finally:
            os.close(descriptor)
        if self._end > self._max_bytes:
            self._drop_older_half()

    def _drop_older_half(self) -> None:
        """Drop the older half of the events, except those that name the rows."""
        lines = self._path.read_bytes().removeprefix(BEGIN).removesuffix(END).split(SEPARATOR)
        half = len(lines) // 2
        kept = [line for line in lines[:half] if line.startswith(b'{"ph":"M"')] + lines[half:]
        with replacing(self._path, fsync=False) as partial:
            partial.write_bytes(BEGIN + SEPARATOR.join(kept) + END)
        self._end = None


def row_of(actor: str) -> int:
    """Return the actor's row, which is the same in every process that resumes a run."""
    if actor in ROWS:
        return ROWS.index(actor) + 1
    kind, _, index = actor.rpartition("-")
    firsts = {"learner": RANKS, "scorer": SCORERS, "teacher": TEACHERS, "environment": ENVIRONMENTS}
    return int(index) + firsts.get(kind, len(ROWS) + 1)


def _microseconds(span: Span) -> tuple[int, int]:
    return round(span.start * 1e6), round(span.end * 1e6)


def _end_of_events(descriptor: int) -> int:
    """Return the offset after the last whole event, or 0; a process killed while writing leaves half of one."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - LONGEST_EVENT)
    tail = os.pread(descriptor, LONGEST_EVENT, begin)
    last = max(tail.rfind(b"}" + SEPARATOR), tail.rfind(b"}" + END))
    return begin + last + 1 if last >= 0 else 0
