"""The TrajectoryBuffer without Ray: batches, room, a checkpoint's groups, and files on a full disk."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import make_completion, make_group, make_item, same_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, rollout_metrics
from grpo_ray.telemetry.metrics_catalog import check_names
from grpo_ray.telemetry.rollout_log import read_groups, read_rollouts, write_rollouts
from grpo_ray.telemetry.rollout_writer import RolloutWriter
from grpo_ray.types import BatchFacts, RolloutGroup, ScoredGroup, TrainBatch

PLENTY = 2**30


def simple_group(group_id: int, versions: int | list[int] = 0) -> ScoredGroup:
    return make_group(make_item(group_id), [make_completion([5, 6, 7], versions=versions)] * 2, [1, 0], [1, -1])


async def is_done(*tasks: asyncio.Task) -> list[bool]:
    """Which have ended, once everything that can go on has."""
    await asyncio.sleep(0.05)
    return [task.done() for task in tasks]


# ---- batches ----


@pytest.mark.parametrize("arrival", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_batches_are_in_group_order_whatever_the_arrival(arrival: tuple[int, ...]) -> None:
    async def run() -> list[tuple[TrainBatch, BatchFacts]]:
        buffer = TrajectoryBuffer(2, PLENTY)
        for group_id in arrival:
            await buffer.put(simple_group(group_id))
        return [await buffer.take(step, oldest_version=0) for step in (0, 1)]

    batches = asyncio.run(run())
    assert [[group.group_id for group in batch.groups] for batch, _ in batches] == [[0, 1], [2, 3]]
    assert [facts.group_ids for _, facts in batches] == [(0, 1), (2, 3)]
    assert [facts.metrics["buffer/groups"] for _, facts in batches] == [2.0, 0.0]
    assert all(facts.rejected_items == () for _, facts in batches)


def test_take_waits_for_the_slowest_group() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(2, PLENTY)
        taken = asyncio.create_task(buffer.take(0, oldest_version=0))
        for group_id in (1, 2, 3):  # the batch after is whole already; it does not overtake
            await buffer.put(simple_group(group_id))
            await asyncio.sleep(0.01)
            assert not taken.done()
        await buffer.put(simple_group(0))
        batch, facts = await asyncio.wait_for(taken, 5)
        assert [group.group_id for group in batch.groups] == [0, 1]
        assert facts.metrics["buffer/groups"] == 2.0

    asyncio.run(run())


def test_group_that_comes_twice_is_refused() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(1, PLENTY)
        await buffer.put(simple_group(4))
        with pytest.raises(ValueError, match="group 4 came twice"):
            await buffer.put(simple_group(4))

    asyncio.run(run())


def test_stale_groups_are_rejected_and_the_rest_stay() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(3, PLENTY)
        await buffer.put(simple_group(3, versions=4))
        await buffer.put(simple_group(4, versions=[4, 3, 5]))  # one token too old
        await buffer.put(simple_group(5, versions=5))
        batch, facts = await buffer.take(1, oldest_version=4)
        assert batch.groups == ()
        assert facts.group_ids == ()
        assert [item.group_id for item in facts.rejected_items] == [4]

        again = asyncio.create_task(buffer.take(1, oldest_version=4))
        await asyncio.sleep(0.01)
        assert not again.done()
        await buffer.put(simple_group(4, versions=5))
        batch, facts = await asyncio.wait_for(again, 5)
        assert [group.group_id for group in batch.groups] == [3, 4, 5]
        assert batch.groups[1].rollout.oldest_version == 5
        assert facts.rejected_items == ()

    asyncio.run(run())


def test_oldest_version_is_over_all_completions() -> None:
    completions = [make_completion([1, 2], versions=[3, 4]), make_completion([1], versions=2)]
    assert make_group(make_item(), completions).rollout.oldest_version == 2


def test_rollout_metrics_by_hand() -> None:
    first = ScoredGroup(
        RolloutGroup(
            make_item(0),
            (make_completion([1] * 4), make_completion([1] * 10, finish_reason="length")),
            "generator-0",
        ),
        rewards=np.array([1, 0], np.float32),
        format_rewards=np.array([1, 1], np.float32),
        answer_rewards=np.array([1, 0], np.float32),
        advantages=np.array([0.7, -0.7], np.float32),
    )
    second = ScoredGroup(
        RolloutGroup(make_item(1), (make_completion([1] * 3), make_completion([1] * 3)), "generator-1"),
        rewards=np.array([0, 0], np.float32),
        format_rewards=np.array([1, 0], np.float32),
        answer_rewards=np.array([0, 0], np.float32),
        advantages=np.zeros(2, np.float32),
    )
    metrics = rollout_metrics([first, second])
    assert metrics == {
        "reward/mean": 1 / 4,
        "reward/format": 3 / 4,
        "reward/answer": 1 / 4,
        "reward/errors": 0.0,
        "rollout/response_tokens/mean": (4 + 10 + 3 + 3) / 4,
        "rollout/response_tokens/max": 10.0,
        "rollout/truncated_frac": 1 / 4,
        "rollout/zero_variance_groups": 1.0,
    }
    assert check_names(metrics) == []


def test_taken_batches_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(2, PLENTY, tmp_path)
        for group_id in (3, 2, 1, 0):
            await buffer.put(simple_group(group_id, versions=group_id // 2))
        await buffer.take(0, oldest_version=0)
        _, facts = await buffer.take(1, oldest_version=0)
        assert facts.write_error is None
        assert await buffer.flush() is None

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    rows = read_rollouts(tmp_path / "step-000002.parquet")
    assert [(row["step"], row["group_id"], row["sample"], row["min_version"]) for row in rows] == [
        (2, 2, 0, 1),
        (2, 2, 1, 1),
        (2, 3, 0, 1),
        (2, 3, 1, 1),
    ]


# ---- groups that never come ----


def test_group_set_aside_is_not_waited_for() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(3, PLENTY)
        await buffer.put(simple_group(0))
        taken = asyncio.create_task(buffer.take(0, oldest_version=0))
        await buffer.put(simple_group(2))
        assert await is_done(taken) == [False]
        await buffer.set_aside(1)
        batch, facts = await asyncio.wait_for(taken, 5)
        assert [group.group_id for group in batch.groups] == list(facts.group_ids) == [0, 2]

        await buffer.put(simple_group(1))  # it comes after all: nobody has a use for it
        for group_id in (4, 5, 3):  # one of them is here already
            if group_id == 4:
                await buffer.put(simple_group(4))
            await buffer.set_aside(group_id)
        assert await buffer.group_ids() == ()
        batch, facts = await asyncio.wait_for(buffer.take(1, oldest_version=0), 5)
        assert (batch, facts.group_ids, facts.rejected_items) == (TrainBatch(()), (), ())
        assert (facts.metrics["buffer/groups"], facts.metrics["buffer/bytes"]) == (0.0, 0.0)

    asyncio.run(run())


def test_stale_groups_are_found_beside_one_that_is_set_aside() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(2, PLENTY)
        await buffer.set_aside(0)
        await buffer.put(simple_group(1, versions=2))
        _, facts = await buffer.take(0, oldest_version=3)
        assert [item.group_id for item in facts.rejected_items] == [1]

    asyncio.run(run())


def test_group_that_comes_after_its_batch_is_refused() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(1, PLENTY)
        await buffer.put(simple_group(0))
        await buffer.take(0, oldest_version=0)
        with pytest.raises(ValueError, match="group 0 came after its batch was taken"):
            await buffer.put(simple_group(0))

    asyncio.run(run())


# ---- room ----


def test_bytes_of_a_group_by_hand() -> None:
    group = make_group(make_item(0, [1, 2, 3]), [make_completion([5, 6], text="ab"), make_completion([7])])
    arrays = 4 * 2 * 4 + 3 * 3 * 4  # four of [G], three a token, 4 bytes each
    assert group.num_bytes == arrays + len("prompt 0") + len("ab") + 3 * 8


def test_groups_wait_outside_while_there_is_no_room() -> None:
    async def run() -> None:
        size = simple_group(0).num_bytes
        buffer = TrajectoryBuffer(2, max_bytes=3 * size)
        for group_id in (5, 6, 7):
            await buffer.put(simple_group(group_id))
        later = [asyncio.create_task(buffer.put(simple_group(g))) for g in (2, 3, 4)]
        assert await is_done(*later) == [False, False, False]
        for group_id in (1, 0):  # the next batch comes in all the same
            await asyncio.wait_for(buffer.put(simple_group(group_id)), 5)
        assert await buffer.group_ids() == (0, 1, 5, 6, 7)
        _, facts = await buffer.take(0, oldest_version=0)
        assert facts.metrics["buffer/bytes"] == 3 * size
        assert await is_done(*later) == [True, True, False]  # the batch after, and no more
        await buffer.take(1, oldest_version=0)
        assert await is_done(*later) == [True, True, True]
        assert await buffer.group_ids() == (4, 5, 6, 7)

    asyncio.run(run())


def test_take_lets_its_own_batch_in() -> None:
    """A resumed buffer does not know which step comes next before it is asked."""

    async def run() -> None:
        buffer = TrajectoryBuffer(2, max_bytes=1)
        puts = [asyncio.create_task(buffer.put(simple_group(g))) for g in (80, 81, 82)]
        assert await is_done(*puts) == [False, False, False]
        _, facts = await asyncio.wait_for(buffer.take(40, oldest_version=0), 5)
        assert facts.group_ids == (80, 81)
        assert await is_done(*puts) == [True, True, True]

    asyncio.run(run())


def test_waiting_group_that_is_set_aside_is_let_go() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(1, max_bytes=1)
        put = asyncio.create_task(buffer.put(simple_group(9)))
        assert await is_done(put) == [False]
        await buffer.set_aside(9)
        assert await is_done(put) == [True]
        assert await buffer.group_ids() == ()

    asyncio.run(run())


@settings(max_examples=50, deadline=None)
@given(
    order=st.permutations(range(12)),
    max_groups=st.integers(0, 12),
    prompts_per_step=st.integers(1, 4),
    aside=st.sets(st.integers(0, 11)),
)
def test_no_size_and_no_order_stops_the_buffer(
    order: list[int], max_groups: int, prompts_per_step: int, aside: set[int]
) -> None:
    async def run() -> list[int]:
        buffer = TrajectoryBuffer(prompts_per_step, max_groups * simple_group(0).num_bytes)

        async def produce(group_id: int) -> None:
            await (buffer.set_aside(group_id) if group_id in aside else buffer.put(simple_group(group_id)))

        puts = [asyncio.create_task(produce(group_id)) for group_id in order]
        trained: list[int] = []
        for step in range(12 // prompts_per_step):
            _, facts = await asyncio.wait_for(buffer.take(step, oldest_version=0), 5)
            trained += facts.group_ids
            held = await buffer.group_ids()
            extra = [group_id for group_id in held if group_id >= (step + 2) * prompts_per_step]
            assert len(extra) <= max_groups
        await asyncio.wait_for(asyncio.gather(*puts), 5)
        return trained

    num_trained = 12 // prompts_per_step * prompts_per_step
    assert asyncio.run(run()) == [group_id for group_id in range(num_trained) if group_id not in aside]


def test_take_that_is_given_up_loses_nothing() -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(2, PLENTY)
        await buffer.put(simple_group(0))
        taken = asyncio.create_task(buffer.take(0, oldest_version=0))
        assert await is_done(taken) == [False]
        taken.cancel()
        await buffer.put(simple_group(1))
        _, facts = await asyncio.wait_for(buffer.take(0, oldest_version=0), 5)
        assert facts.group_ids == (0, 1)

    asyncio.run(run())


# ---- a checkpoint's groups ----


def test_captured_groups_come_back(tmp_path: Path) -> None:
    path = tmp_path / "groups.parquet"
    groups = {g: simple_group(g, versions=[g, g, g + 1]) for g in (4, 2, 5, 3, 6)}

    async def write() -> None:
        buffer = TrajectoryBuffer(2, PLENTY)
        for group in groups.values():
            await buffer.put(group)
        assert await buffer.capture() == (2, 3, 4, 5, 6)
        await buffer.take(1, oldest_version=0)  # what happens after the capture does not matter
        await buffer.put(simple_group(7))
        await buffer.write_captured(path)

    async def read() -> None:
        buffer = TrajectoryBuffer(2, PLENTY, groups_path=path)
        assert await buffer.group_ids() == (2, 3, 4, 5, 6)
        batch, facts = await buffer.take(1, oldest_version=0)
        assert same_groups(batch.groups, (groups[2], groups[3]))
        assert facts.metrics["buffer/bytes"] == sum(groups[g].num_bytes for g in (4, 5, 6))
        with pytest.raises(ValueError, match="group 6 came twice"):
            await buffer.put(groups[6])

    asyncio.run(write())
    assert same_groups(read_groups(path), tuple(groups[g] for g in (2, 3, 4, 5, 6)))
    asyncio.run(read())


def test_empty_buffer_can_be_captured(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(2, PLENTY)
        assert await buffer.capture() == ()
        await buffer.write_captured(tmp_path / "groups.parquet")
        resumed = TrajectoryBuffer(2, PLENTY, groups_path=tmp_path / "groups.parquet")
        assert await resumed.group_ids() == ()

    asyncio.run(run())


def test_captured_groups_that_cannot_be_written_are_an_oserror(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = TrajectoryBuffer(1, PLENTY)
        await buffer.put(simple_group(0))
        await buffer.capture()
        with pytest.raises(OSError, match="missing"):
            await buffer.write_captured(tmp_path / "missing" / "groups.parquet")

    asyncio.run(run())


# ---- files ----


def test_disk_that_fills_up_and_is_freed(tmp_path: Path) -> None:
    """The folder is a file's limit away from full; in a process of its own, as the limit stays."""
    script = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_trajectory_buffer import PLENTY, TrajectoryBuffer, simple_group

async def main():
    buffer = TrajectoryBuffer(1, PLENTY, Path(sys.argv[1]))
    async def step(k):
        await buffer.put(simple_group(k))
        batch, facts = await buffer.take(k, 0)
        assert facts.group_ids == (k,)
        return facts.write_error
    assert await step(0) is None and await buffer.flush() is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    assert await step(1) is None  # it is being tried
    error = await buffer.flush()
    assert "step-000002.parquet" in error and "File too large" in error, error
    assert "1 batches wait in memory" in error
    error = await step(2)
    assert "step-000002.parquet" in error, error
    assert "2 batches wait" in await buffer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "2 batches wait" in await step(3)
    assert await buffer.flush() is None
    assert await step(4) is None
    await buffer.flush()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    names = [f"step-{step:06d}.parquet" for step in range(1, 6)]
    assert sorted(os.listdir(tmp_path)) == names
    assert [read_rollouts(tmp_path / name)[0]["group_id"] for name in names] == [0, 1, 2, 3, 4]


def test_batches_beyond_the_memory_are_dropped_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"  # it does not exist yet: every write fails

    async def run() -> None:
        writer = RolloutWriter(folder, max_bytes=2 * simple_group(0).num_bytes)
        for step in range(1, 6):
            await writer.room()
            writer.add(step, (simple_group(step),))
            await writer.flush()
        assert writer.error is not None
        assert "step-000004.parquet" in writer.error
        assert "2 batches wait in memory; 3 older ones are lost" in writer.error
        folder.mkdir()
        assert await writer.flush() is None

    asyncio.run(run())
    assert sorted(os.listdir(folder)) == ["step-000004.parquet", "step-000005.parquet"]


def test_take_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = _hold_writing(monkeypatch)

    async def run() -> None:
        buffer = TrajectoryBuffer(1, PLENTY, tmp_path)
        for step in range(3):
            await buffer.put(simple_group(step))
            await asyncio.wait_for(buffer.take(step, oldest_version=0), 5)
        flushed = asyncio.create_task(buffer.flush())
        assert await is_done(flushed) == [False]
        assert os.listdir(tmp_path) == []
        may_write()
        assert await asyncio.wait_for(flushed, 5) is None
        assert len(os.listdir(tmp_path)) == 3

    asyncio.run(run())


def test_take_waits_for_a_slow_disk_once_too_much_is_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = _hold_writing(monkeypatch)

    async def run() -> None:
        buffer = TrajectoryBuffer(1, simple_group(0).num_bytes, tmp_path)
        for step in range(3):
            await buffer.put(simple_group(step))
            taken = asyncio.create_task(buffer.take(step, oldest_version=0))
            assert await is_done(taken) == [step < 2]
        may_write()
        await asyncio.wait_for(taken, 5)
        await buffer.flush()
        assert len(os.listdir(tmp_path)) == 3

    asyncio.run(run())


def test_mistake_in_writing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr("grpo_ray.telemetry.rollout_writer.write_rollouts", broken)

    async def run() -> None:
        buffer = TrajectoryBuffer(1, PLENTY, tmp_path)
        for step in range(2):
            await buffer.put(simple_group(step))
        await buffer.take(0, oldest_version=0)
        await asyncio.sleep(0.05)
        with pytest.raises(TypeError, match="a mistake"):
            await buffer.take(1, oldest_version=0)
        assert await buffer.group_ids() == (1,)

    asyncio.run(run())


def _hold_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Rollouts are written only after the returned function has been called."""
    import threading

    allowed = threading.Event()

    def write(*args: object) -> None:
        assert allowed.wait(30)
        write_rollouts(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("grpo_ray.telemetry.rollout_writer.write_rollouts", write)
    return allowed.set
