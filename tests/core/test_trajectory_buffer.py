"""The TrajectoryBuffer without Ray: batches, its size, checkpoints, and files on a full disk."""

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from builders import (
    check_names,
    file_size_limit,
    make_buffer,
    make_completion,
    make_group,
    make_item,
    parts,
    same_groups,
    simple_group,
)

from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.records.rollout_log import read_groups, read_rollouts, read_uses, write_rollouts
from grpo_ray.types import INT_BYTES, BatchFacts, ScoredGroup, TrainBatch
from grpo_ray.watch.batch_metrics import cut_metrics, rollout_metrics
from grpo_ray.watch.rollout_writer import RolloutWriter
from grpo_ray.watch.stage_clock import StageClock


def ids(groups: tuple[ScoredGroup, ...]) -> list[int]:
    return [group.group_id for group in groups]


async def take(
    buffer: TrajectoryBuffer, step: int, *group_ids: int, dropped: Sequence[int] = ()
) -> tuple[TrainBatch, BatchFacts]:
    return await asyncio.wait_for(buffer.take(step, group_ids, dropped, 0), 120)


async def filled(groups: Iterable[ScoredGroup], *args: Any, **options: Any) -> TrajectoryBuffer:
    buffer = make_buffer(*args, **options)
    for group in groups:
        await buffer.put(*parts(group))
    return buffer


async def held(buffer: TrajectoryBuffer) -> list[int]:
    """Return the groups in the buffer, without changing them."""
    await buffer.capture(99)
    return sorted(group.group_id for group in buffer._captured[0])


async def test_group_that_arrives_twice_is_refused() -> None:
    buffer = make_buffer()
    await buffer.put(*parts(simple_group(4)))
    with pytest.raises(ValueError, match="group 4 came twice"):
        await buffer.put(*parts(simple_group(4)))
    await buffer.drop([4])  # to be sampled again
    await buffer.put(*parts(simple_group(4, versions=1)))
    assert await held(buffer) == [4]


def test_facts_of_a_group_are_the_same_from_the_scorer_and_from_the_restored_buffer(tmp_path: Path) -> None:
    completions = [make_completion([1, 2], versions=[3, 4]), make_completion([1], versions=2)]
    group, teacher = make_group(make_item(3), completions, [1, 0], [1, -1]), np.full(3, -1.0, np.float32)

    async def restored(logprobs: np.ndarray | None) -> Any:
        buffer = make_buffer()
        await buffer.put(*parts(group), logprobs)
        await buffer.capture(0)
        await buffer.write_captured(tmp_path)
        return (await make_buffer(checkpoint=tmp_path).begin([3]))[3]

    for logprobs in (None, teacher):
        _, verdict = parts(group)
        said = verdict.with_facts(group.rollout, "advantage", logprobs is not None).facts
        assert said == asyncio.run(restored(logprobs))
        assert said is not None
        assert (said.oldest_version, said.has_signal) == (2, True)
    flat = simple_group(3, has_signal=False)
    for has_teacher in (True, False):  # a teacher always teaches something
        said = parts(flat)[1].with_facts(flat.rollout, "advantage", has_teacher).facts
        assert said is not None
        assert said.has_signal == said.outcome == has_teacher


def test_rollout_metrics_by_hand() -> None:
    completions = [make_completion([1] * 4), make_completion([1] * 10, finish_reason="length")]
    first = make_group(make_item(0), completions, [1, 0], [0.7, -0.7])
    second = make_group(make_item(1), [make_completion([1] * 3)] * 2, [0, 0])
    groups = [
        replace(first, format_rewards=np.float32([1, 1]), errors={0: "too long", 1: "too large"}),
        replace(second, format_rewards=np.float32([1, 0]), errors={1: "too long"}),
    ]
    metrics = rollout_metrics(groups, num_dropped=1)
    assert metrics == {
        "reward/mean": 1 / 4,
        "reward/format": 3 / 4,
        "reward/answer": 1 / 4,
        "reward/errors": 3.0,
        "reward/ungradable": 0.0,
        "reward/baseline_variance": 0.0,  # at most one response of each group is graded
        "rollout/response_tokens/mean": (4 + 10 + 3 + 3) / 4,
        "rollout/response_tokens/max": 10.0,
        "rollout/truncated_frac": 1 / 4,
        "rollout/zero_variance_groups": 1.0,
        "rollout/dropped_groups": 1.0,
        "policy/entropy": 1.0,  # every token has logprob -1
    }
    assert check_names(metrics) == []


def test_entropy_is_that_of_all_sampled_tokens_and_absent_without_logprobs() -> None:
    """Groups without signal count as well; tokens without a logprob do not."""
    completions = [make_completion([5, 6], [-1.0, -2.0]), make_completion([7], [-0.3])]
    mixed = make_group(make_item(0), completions, [1, 0])
    solved = make_group(make_item(1), [make_completion([5, 6, 7], [-0.1, np.nan, -np.inf])] * 2, [1, 1], [0, 0])
    entropy = rollout_metrics([mixed, solved], num_dropped=1)["policy/entropy"]
    assert entropy == pytest.approx((1.0 + 2.0 + 0.3 + 0.1 + 0.1) / 5)
    blind = make_group(make_item(2), [make_completion([5, 6], [np.nan, -np.inf])] * 2)
    assert "policy/entropy" not in rollout_metrics([blind])


def test_the_variance_of_a_baseline_is_that_of_graded_rewards() -> None:
    """Rewards 1, 0, 1: their sample variance, 1/3, divided by 3; a fourth was not graded."""
    group = make_group(make_item(), [make_completion([5])] * 4, [1.0, 0.0, 1.0, 0.0], [0.5, -1, 0.5, 0])
    metrics = rollout_metrics([replace(group, errors={3: "too long"})])
    assert metrics["reward/baseline_variance"] == pytest.approx(1 / 9)


def test_lengths_of_groups_that_were_cut_off_before_by_hand() -> None:
    def group(group_id: int, num_cuts: int, lengths: tuple[int, ...]) -> ScoredGroup:
        item = make_item(group_id, num_cuts=num_cuts)
        return make_group(item, [make_completion([5] * length) for length in lengths])

    groups = [group(0, 0, (2, 4)), group(1, 2, (9, 11)), group(2, 1, (13, 15)), group(3, 0, (6, 4))]
    metrics = cut_metrics(groups)
    assert metrics == {"rollout/response_tokens/cut_before_ratio": pytest.approx(12 / 4)}
    assert check_names(metrics) == []
    assert cut_metrics([groups[0], groups[3]]) == {}  # no group was cut off
    assert cut_metrics([groups[1]]) == {}


# ---- groups that are not trained ----


async def test_groups_without_signal_are_recorded_with_their_batch(tmp_path: Path) -> None:
    groups = [simple_group(g, has_signal=g not in (0, 2, 4)) for g in (0, 1, 2, 3, 4, 6, 7)]
    buffer = await filled(groups, tmp_path)
    batch, facts = await take(buffer, 1, 1, 3, dropped=(0, 2))
    assert ids(batch.groups) == [1, 3]
    assert facts.metrics["rollout/dropped_groups"] == 2.0
    assert facts.metrics["rollout/zero_variance_groups"] == 2.0
    assert facts.metrics["reward/mean"] == 1 / 4  # over all groups sampled for the batch
    await take(buffer, 2, 6, 7, dropped=(4,))
    assert await held(buffer) == []
    await buffer.flush()
    for step, fresh, dropped in ((1, [1, 3], [0, 2]), (2, [6, 7], [4])):
        path = tmp_path / f"step-00000{step}.parquet"
        assert read_uses(path) == [1, 1] + [0] * len(dropped)
        assert ids(read_groups(path)) == [*fresh, *dropped]


@pytest.mark.parametrize(
    ("metric", "varies"),
    [("advantage", [True, True, True]), ("reward", [False, True, True]), ("answer", [False, False, True])],
)
def test_dynamic_sampling_looks_for_the_configured_signal(metric: str, varies: list[bool]) -> None:
    """All right, with an overlong one; all right, with rewards that differ by the format; one right."""
    groups = [
        replace(simple_group(0), rewards=np.float32([1, 1]), answer_rewards=np.float32([1, 1])),
        replace(simple_group(1), rewards=np.float32([1, 0.9]), answer_rewards=np.float32([1, 1])),
        replace(simple_group(2), rewards=np.float32([1, 0]), answer_rewards=np.float32([1, 0])),
    ]
    assert [group.facts_for(metric).has_signal for group in groups] == varies
    assert not replace(groups[2], errors={1: "too slow"}).varies_in("reward")


# ---- groups that are replayed ----


async def test_batch_has_its_fresh_groups_first_and_then_the_replayed_ones(tmp_path: Path) -> None:
    replay = {"sampling": "recent", "max_uses": 2, "max_age": 9}
    groups = [simple_group(g, versions=g // 2, has_signal=g < 4) for g in range(8)]
    buffer = await filled(groups, tmp_path, num_replayed=1, replay=replay)
    batches = [await take(buffer, step, 2 * step - 2, 2 * step - 1) for step in range(1, 5)]
    await buffer.flush()
    # No group is drawn for its own batch; of equally recent groups the smaller id is; two uses are the limit.
    assert [ids(batch.groups) for batch, _ in batches] == [[0, 1], [2, 3, 0], [4, 5, 2], [6, 7, 4]]
    uses = [read_uses(tmp_path / f"step-00000{step}.parquet") for step in range(1, 5)]
    assert uses == [[1, 1], [1, 1, 2], [1, 1, 2], [1, 1, 2]]
    assert [facts.metrics["reward/mean"] for _, facts in batches] == [0.5, 0.5, 0, 0]  # of fresh groups only
    assert [facts.metrics["replay/groups"] for _, facts in batches] == [2, 3, 4, 5]
    assert [facts.metrics["replay/evicted_uses"] for _, facts in batches] == [0, 1, 1, 1]
    assert check_names(batches[0][1].metrics) == []


# ---- the buffer's size ----


def test_bytes_of_a_group_by_hand() -> None:
    group = make_group(make_item(0, [1, 2, 3]), [make_completion([5, 6], text="ab"), make_completion([7])])
    arrays = 4 * 2 * 4 + 3 * 3 * 4  # four arrays of [G], three values per token, 4 bytes each
    assert group.num_bytes == arrays + len("prompt 0") + len("ab") + 3 * INT_BYTES


def test_captured_groups_are_restored(tmp_path: Path) -> None:
    groups = {g: simple_group(g, versions=[g, g, g + 1]) for g in (4, 2, 5, 3, 6)}

    async def write() -> None:
        buffer = await filled(groups.values())
        await buffer.capture(99)
        await take(buffer, 2, 2, 3)  # changes after the capture do not matter
        await buffer.put(*parts(simple_group(7)))
        await buffer.write_captured(tmp_path)

    async def read() -> None:
        buffer = make_buffer(checkpoint=tmp_path)
        facts = await buffer.begin((2, 3, 4, 5, 8))  # 6 was trained after all; 8 was in flight
        assert facts == {g: groups[g].facts_for("advantage") for g in (2, 3, 4, 5)}
        batch, _ = await take(buffer, 2, 2, 3)
        assert same_groups(batch.groups, (groups[2], groups[3]))
        held_bytes = sum(group.num_bytes for group in buffer._groups.values())
        assert held_bytes == sum(groups[g].num_bytes for g in (4, 5))
        with pytest.raises(ValueError, match="group 5 came twice"):
            await buffer.put(*parts(groups[5]))

    asyncio.run(write())
    assert sorted(os.listdir(tmp_path)) == ["groups.parquet", "replay.parquet"]
    assert same_groups(read_groups(tmp_path / "groups.parquet"), tuple(groups[g] for g in (2, 3, 4, 5, 6)))
    assert read_groups(tmp_path / "replay.parquet") == ()
    asyncio.run(read())


async def test_groups_to_replay_are_restored_with_their_uses(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_replayed": 2, "replay": {"max_uses": 4, "max_age": 20}, "seed": 3}
    buffer = await filled(map(simple_group, range(12)), **options)
    for step in (1, 2, 3):
        await take(buffer, step, 2 * step - 2, 2 * step - 1)
    await buffer.capture(99)
    await buffer.write_captured(tmp_path)
    resumed = make_buffer(checkpoint=tmp_path, **options)
    await resumed.begin(range(6, 12))
    for step in (4, 5, 6):
        (batch, facts), (again, facts_again) = [
            await take(each, step, 2 * step - 2, 2 * step - 1) for each in (buffer, resumed)
        ]
        assert same_groups(again.groups, batch.groups)
        assert facts_again.metrics["replay/bytes"] == facts.metrics["replay/bytes"] > 0
        assert facts_again.metrics["replay/groups"] == facts.metrics["replay/groups"]
    assert sum(read_uses(tmp_path / "replay.parquet")) == 6 + 2 + 2  # six fresh uses, and two draws of two


async def test_a_batch_that_was_taken_but_not_trained_is_not_replayed(tmp_path: Path) -> None:
    buffer = await filled(map(simple_group, range(4)), num_replayed=1)
    await take(buffer, 1, 0, 1)
    await take(buffer, 2, 2, 3)
    await buffer.capture(2)
    await buffer.write_captured(tmp_path)
    resumed = make_buffer(num_replayed=1, checkpoint=tmp_path)
    assert len(resumed._memory) == 4
    await resumed.begin([2, 3])
    assert len(resumed._memory) == 2


async def test_disk_that_fills_up_and_is_freed(tmp_path: Path) -> None:
    buffer = make_buffer(tmp_path, size=1)

    async def step(k: int) -> str | None:
        await buffer.put(*parts(simple_group(k)))
        _, facts = await take(buffer, k + 1, k)
        return facts.write_error

    assert await step(0) is None
    assert await buffer.flush() is None
    with file_size_limit(100):
        assert await step(1) is None  # it is being tried
        error = await buffer.flush() or ""
        assert "step-000002.parquet" in error
        assert "File too large" in error
        assert "1 batches wait in memory" in error
        assert "step-000002.parquet" in (await step(2) or "")
        assert "2 batches wait" in (await buffer.flush() or "")
    assert "2 batches wait" in (await step(3) or "")
    assert await buffer.flush() is None
    assert await step(4) is None
    await buffer.flush()
    names = [f"step-{step:06d}.parquet" for step in range(1, 6)]
    assert sorted(os.listdir(tmp_path)) == names
    assert [read_rollouts(tmp_path / name)[0]["group_id"] for name in names] == [0, 1, 2, 3, 4]


async def test_batches_beyond_the_memory_are_dropped_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"  # it does not exist yet: every write fails
    writer = RolloutWriter(folder, 2 * simple_group(0).num_bytes, StageClock(("write_rollouts",), "idle"))
    for step in range(1, 6):
        await writer.room()
        writer.add(step, (simple_group(step),))
        await writer.flush()
    assert writer.error is not None
    assert "step-000004.parquet" in writer.error
    assert "2 batches wait in memory; 3 older ones are lost" in writer.error
    folder.mkdir()
    assert await writer.flush() is None
    assert sorted(os.listdir(folder)) == ["step-000004.parquet", "step-000005.parquet"]


async def test_take_waits_once_too_much_is_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()

    def write(*args: Any) -> None:
        assert may_write.wait(30)
        write_rollouts(*args)

    monkeypatch.setattr("grpo_ray.watch.rollout_writer.write_rollouts", write)
    buffer = make_buffer(tmp_path, size=1, max_bytes=simple_group(0).num_bytes)
    for step in (1, 2, 3):
        await buffer.put(*parts(simple_group(step - 1)))
        taken = asyncio.create_task(take(buffer, step, step - 1))
        await asyncio.sleep(0.05)
        assert taken.done() == (step < 3)
    may_write.set()
    await asyncio.wait_for(taken, 120)
    await buffer.flush()
    assert len(os.listdir(tmp_path)) == 3


async def test_bug_in_writing_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=TypeError("a mistake"))
    monkeypatch.setattr("grpo_ray.watch.rollout_writer.write_rollouts", broken)
    buffer = await filled(map(simple_group, range(2)), tmp_path, size=1)
    await take(buffer, 1, 0)
    assert await buffer.flush() is None
    _, facts = await take(buffer, 2, 1)
    assert facts.notes == (f"{tmp_path / 'step-000001.parquet'} is not written: TypeError: a mistake",)
