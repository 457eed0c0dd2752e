"""Background writer of the rollouts of each batch, which retries what a full disk refused."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from grpo_ray.records.durable import sync_files
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import step_name
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.stage_clock import StageClock

Groups = tuple[ScoredGroup, ...]

MAX_UNSYNCED = 64  # files; also with checkpoints that are far apart


class RolloutWriter:
    """A queue of batches to write; `error` says why some wait, and `notes` what is changed or left out."""

    def __init__(self, folder: Path | None, max_bytes: int, clock: StageClock) -> None:
        """Start with an empty queue.

        Args:
            folder: receives a file per batch; None: nothing is written.
            max_bytes: size of the groups that may wait in memory.
            clock: has a stage `write_rollouts`.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._clock = clock
        self._waiting: deque[tuple[Path, int, Groups, Sequence[int] | None]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._unsynced: list[Path] = []  # written, but maybe not on disk yet
        self._writing: asyncio.Task[None] | None = None
        self.error: str | None = None
        self.notes: list[str] = []

    async def room(self) -> None:
        """Wait while more than `max_bytes` are queued, as on a slow disk."""
        if self._num_bytes > self._max_bytes:
            await self._finish()

    def add(self, step: int, groups: Groups, uses: Sequence[int] | None = None) -> None:
        """Queue a step's groups and start writing; `uses` as in `write_rollouts`."""
        if self._folder is None:
            return
        self._waiting.append((self._folder / f"{step_name(step)}.parquet", step, groups, uses))
        self._num_bytes += _num_bytes(groups)
        self._start()

    async def flush(self) -> str | None:
        """Write what is queued, retrying what failed, and flush it to disk; return the resulting `error`."""
        await self._finish()
        if self._waiting:
            self._start()
            await self._finish()
        return self.error or await self._sync()

    async def _sync(self) -> str | None:
        """Flush the files since the last time: one by one they would cost a disk's whole latency per step."""
        written, self._unsynced = self._unsynced, []
        try:
            await asyncio.to_thread(sync_files, written)
        except OSError as error:
            self._unsynced = [*written, *self._unsynced]
            return f"{self._folder}: {error}"
        return None

    def _start(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _finish(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)  # a cancelled waiter does not stop the write

    async def _write(self) -> None:
        while self._waiting:
            path, step, groups, uses = self._waiting[0]
            try:
                with self._clock.stage("write_rollouts", f"step {step}, {len(groups)} groups"):
                    note = await asyncio.to_thread(write_rollouts, path, step, groups, uses)
            except OSError as error:
                while self._num_bytes > self._max_bytes:
                    self._drop_oldest()
                    self._num_dropped += 1
                dropped = f"; {self._num_dropped} older ones are lost" if self._num_dropped else ""
                self.error = f"{path}: {error}; {len(self._waiting)} batches wait in memory{dropped}"
                return
            except Exception as error:  # a mistake: it would come again, and training does not need the file
                note = f"{path} is not written: {type(error).__name__}: {error}"
                logging.warning("%s", note)  # of the last batch no later one brings the note
            else:
                self._unsynced.append(path)
            self.notes += [note] if note else []
            if len(self._unsynced) >= MAX_UNSYNCED:
                await self._sync()  # an error waits for `flush`, which tries again
            self._drop_oldest()
        self.error = None

    def _drop_oldest(self) -> None:
        _, _, groups, _ = self._waiting.popleft()
        self._num_bytes -= _num_bytes(groups)


def _num_bytes(groups: Groups) -> int:
    return sum(group.num_bytes for group in groups)
