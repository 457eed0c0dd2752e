"""The TrajectoryBuffer without Ray: batches, its size, checkpoints, and files on a full disk."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    changed,
    file_size_limit,
    make_buffer,
    make_completion,
    make_group,
    make_item,
    parts,
    same_groups,
    simple_group,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, buffer_arguments
from grpo_ray.config import Config
from grpo_ray.telemetry.batch_metrics import cut_metrics, rollout_metrics
from grpo_ray.telemetry.metrics_catalog import check_names
from grpo_ray.telemetry.rollout_log import read_groups, read_rollouts, read_uses, write_rollouts
from grpo_ray.telemetry.rollout_writer import RolloutWriter
from grpo_ray.telemetry.stage_clock import StageClock
from grpo_ray.types import INT_BYTES, BatchFacts, PutReceipt, RolloutGroup, ScoredGroup, TrainBatch

PLENTY = 2**30
KEPT = PutReceipt(is_kept=True)


async def is_done(*tasks: asyncio.Task) -> list[bool]:
    """Return for each task whether it has ended, after all tasks that can continue have done so."""
    await asyncio.sleep(0.05)
    return [task.done() for task in tasks]


def ids(groups: tuple[ScoredGroup, ...]) -> list[int]:
    return [group.group_id for group in groups]


# ---- batches ----


@pytest.mark.parametrize("arrival", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_batches_are_in_group_order_whatever_the_arrival(arrival: tuple[int, ...]) -> None:
    async def run() -> list[tuple[TrainBatch, BatchFacts]]:
        buffer = make_buffer(2)
        for group_id in arrival:
            assert await buffer.put(*parts(simple_group(group_id))) == KEPT
        return [await buffer.take(step, oldest_version=0) for step in (1, 2)]

    batches = asyncio.run(run())
    assert [ids(batch.groups) for batch, _ in batches] == [[0, 1], [2, 3]]
    assert [facts.group_ids for _, facts in batches] == [(0, 1), (2, 3)]
    assert [facts.metrics["buffer/groups"] for _, facts in batches] == [2.0, 0.0]
    for _, facts in batches:
        assert (facts.rejected_ids, facts.dropped_ids, facts.cut_ids, facts.num_slots) == ((), (), (), 0)
        assert check_names(facts.metrics) == []


def test_take_waits_for_the_slowest_group() -> None:
    async def run() -> None:
        buffer = make_buffer(2)
        taken = asyncio.create_task(buffer.take(1, oldest_version=0))
        for group_id in (1, 2, 3):  # the next batch is complete already, but does not overtake
            await buffer.put(*parts(simple_group(group_id)))
            assert await is_done(taken) == [False]
        await buffer.put(*parts(simple_group(0)))
        batch, facts = await asyncio.wait_for(taken, 120)
        assert ids(batch.groups) == [0, 1]
        assert facts.metrics["buffer/groups"] == 2.0

    asyncio.run(run())


def test_look_ahead_leaves_the_slowest_group_to_the_next_batch() -> None:
    async def run() -> None:
        buffer = make_buffer(2, lookahead=2)
        taken = asyncio.create_task(buffer.take(1, oldest_version=0))
        await buffer.put(*parts(simple_group(3)))
        await buffer.put(*parts(simple_group(2)))
        assert await is_done(taken) == [False]  # 3 is beyond the window
        await buffer.put(*parts(simple_group(1)))
        batch, _ = await asyncio.wait_for(taken, 120)
        assert ids(batch.groups) == [1, 2]
        await buffer.put(*parts(simple_group(0)))
        batch, _ = await asyncio.wait_for(buffer.take(2, oldest_version=0), 120)
        assert ids(batch.groups) == [0, 3]

    asyncio.run(run())


def test_group_that_arrives_twice_is_refused() -> None:
    async def run() -> None:
        buffer = make_buffer(1)
        await buffer.put(*parts(simple_group(4)))
        with pytest.raises(ValueError, match="group 4 came twice"):
            await buffer.put(*parts(simple_group(4)))

    asyncio.run(run())


def test_stale_groups_are_rejected_and_the_rest_stay() -> None:
    async def run() -> None:
        buffer = make_buffer(3)
        await buffer.begin((3, 4, 5), next_id=6)
        await buffer.put(*parts(simple_group(3, versions=4)))
        await buffer.put(*parts(simple_group(4, versions=[4, 3, 5])))  # one token too old
        await buffer.put(*parts(simple_group(5, versions=5)))
        batch, facts = await buffer.take(2, oldest_version=4)
        assert batch.groups == ()
        assert facts.group_ids == ()
        assert facts.rejected_ids == (4,)
        assert await buffer.group_ids() == (3, 5)

        again = asyncio.create_task(buffer.take(2, oldest_version=4))
        assert await is_done(again) == [False]
        await buffer.put(*parts(simple_group(4, versions=5)))
        batch, facts = await asyncio.wait_for(again, 120)
        assert ids(batch.groups) == [3, 4, 5]
        assert batch.groups[1].rollout.oldest_version == 5
        assert facts.rejected_ids == ()

    asyncio.run(run())


def test_oldest_version_is_over_all_completions() -> None:
    completions = [make_completion([1, 2], versions=[3, 4]), make_completion([1], versions=2)]
    assert make_group(make_item(), completions).rollout.oldest_version == 2


def two_groups() -> list[ScoredGroup]:
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
        errors={0: "too long", 1: "too large"},
    )
    second = ScoredGroup(
        RolloutGroup(make_item(1), (make_completion([1] * 3), make_completion([1] * 3)), "generator-1"),
        rewards=np.array([0, 0], np.float32),
        format_rewards=np.array([1, 0], np.float32),
        answer_rewards=np.array([0, 0], np.float32),
        advantages=np.zeros(2, np.float32),
        errors={1: "too long"},
    )
    return [first, second]


def test_rollout_metrics_by_hand() -> None:
    metrics = rollout_metrics(two_groups(), num_dropped=1)
    assert metrics == {
        "reward/mean": 1 / 4,
        "reward/format": 3 / 4,
        "reward/answer": 1 / 4,
        "reward/errors": 3.0,
        "reward/ungradable": 0.0,
        # rewards 1 and 0: their sample variance, 1/2, divided by 2; rewards 0 and 0: 0
        "reward/baseline_variance": (1 / 4 + 0) / 2,
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
    mixed = make_group(
        make_item(0), [make_completion([5, 6], [-1.0, -2.0]), make_completion([7], [-0.3])], [1, 0]
    )
    solved = make_group(make_item(1), [make_completion([5, 6, 7], [-0.1, np.nan, -np.inf])] * 2, [1, 1], [0, 0])
    entropy = rollout_metrics([mixed, solved], num_dropped=1)["policy/entropy"]
    assert entropy == pytest.approx((1.0 + 2.0 + 0.3 + 0.1 + 0.1) / 5)
    blind = make_group(make_item(2), [make_completion([5, 6], [np.nan, -np.inf])] * 2)
    assert "policy/entropy" not in rollout_metrics([blind])


def test_one_response_has_no_baseline_variance() -> None:
    group = make_group(make_item(), [make_completion([5])], [1.0])
    assert rollout_metrics([group])["reward/baseline_variance"] == 0.0


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


def test_taken_batches_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = make_buffer(2, PLENTY, tmp_path)
        for group_id in (3, 2, 1, 0):
            await buffer.put(*parts(simple_group(group_id, versions=group_id // 2)))
        await buffer.take(1, oldest_version=0)
        _, facts = await buffer.take(2, oldest_version=0)
        assert facts.write_error is None
        assert await buffer.flush() is None

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    rows = read_rollouts(tmp_path / "step-000002.parquet")
    assert [(row["step"], row["use"], row["group_id"], row["sample"], row["min_version"]) for row in rows] == [
        (2, 1, 2, 0, 1),
        (2, 1, 2, 1, 1),
        (2, 1, 3, 0, 1),
        (2, 1, 3, 1, 1),
    ]


# ---- groups that are not trained ----


def test_group_set_aside_is_not_waited_for_and_another_takes_its_slot() -> None:
    async def run() -> None:
        buffer = make_buffer(3)
        await buffer.put(*parts(simple_group(0)))
        taken = asyncio.create_task(buffer.take(1, oldest_version=0))
        await buffer.put(*parts(simple_group(2)))
        assert await is_done(taken) == [False]
        assert await buffer.set_aside(1) == 0  # its own slot is not counted
        assert await is_done(taken) == [False]  # the batch keeps its size
        await buffer.put(*parts(simple_group(3)))
        batch, facts = await asyncio.wait_for(taken, 120)
        assert ids(batch.groups) == list(facts.group_ids) == [0, 2, 3]
        with pytest.raises(ValueError, match="group 1 came after it was trained, dropped or set aside"):
            await buffer.put(*parts(simple_group(1)))

    asyncio.run(run())


def test_stale_groups_are_found_after_another_was_set_aside() -> None:
    async def run() -> None:
        buffer = make_buffer(1)
        await buffer.set_aside(0)
        await buffer.put(*parts(simple_group(1, versions=2)))
        _, facts = await buffer.take(1, oldest_version=3)
        assert facts.rejected_ids == (1,)

    asyncio.run(run())


def test_group_that_arrives_after_its_batch_is_refused() -> None:
    async def run() -> None:
        buffer = make_buffer(1)
        await buffer.put(*parts(simple_group(0)))
        await buffer.take(1, oldest_version=0)
        with pytest.raises(ValueError, match="group 0 came after it was trained"):
            await buffer.put(*parts(simple_group(0)))

    asyncio.run(run())


def test_groups_without_signal_give_their_slots_to_others(tmp_path: Path) -> None:
    """With size 2 and at most 2 dropped per batch, 0 and 2 are dropped, but 4 and 5 would be too many."""

    async def run() -> None:
        buffer = make_buffer(2, PLENTY, tmp_path, max_dropped=2)
        signals = {0: False, 1: True, 2: False, 3: True, 4: False, 5: False, 6: False, 7: True}
        slots = [
            (await buffer.put(*parts(simple_group(g, has_signal=s)))).num_slots for g, s in signals.items()
        ]
        assert slots == [1, 0, 1, 0, 0, 0, 0, 0]
        assert await buffer.group_ids() == tuple(range(8))  # dropped groups are remembered until the batch
        batch, facts = await buffer.take(1, oldest_version=0)
        assert (ids(batch.groups), facts.group_ids, facts.dropped_ids) == ([1, 3], (1, 3), (0, 2))
        assert facts.num_slots == 2  # 4 and 5: the next batch may drop two more
        assert facts.metrics["rollout/dropped_groups"] == 2.0
        assert facts.metrics["rollout/zero_variance_groups"] == 2.0
        assert facts.metrics["reward/mean"] == 1 / 4  # over all groups sampled for the batch
        batch, facts = await buffer.take(2, oldest_version=0)
        assert (facts.group_ids, facts.dropped_ids, facts.num_slots) == ((6, 7), (4, 5), 0)
        with pytest.raises(ValueError, match="group 4 came after it was trained, dropped"):
            await buffer.put(*parts(simple_group(4)))
        await buffer.flush()

    asyncio.run(run())
    for step, fresh, dropped in ((1, [1, 3], [0, 2]), (2, [6, 7], [4, 5])):
        path = tmp_path / f"step-00000{step}.parquet"
        assert read_uses(path) == [1, 1, 0, 0]
        assert ids(read_groups(path)) == [*fresh, *dropped]


@pytest.mark.parametrize(("metric", "kept"), [("advantage", [0, 1, 2]), ("reward", [1, 2]), ("answer", [2])])
def test_dynamic_sampling_looks_for_the_configured_signal(
    tiny_config: Config, metric: str, kept: list[int]
) -> None:
    """All right, with an overlong one; all right, with rewards that differ by the format; one right."""
    groups = [
        replace(simple_group(0), rewards=np.float32([1, 1]), answer_rewards=np.float32([1, 1])),
        replace(simple_group(1), rewards=np.float32([1, 0.9]), answer_rewards=np.float32([1, 1])),
        replace(simple_group(2), rewards=np.float32([1, 0]), answer_rewards=np.float32([1, 0])),
    ]
    algorithm = {"prompts_per_step": 1, "dynamic_sampling_tries": 9, "dynamic_sampling_metric": metric}
    config = changed(tiny_config, algorithm=algorithm)

    async def run() -> None:
        buffer = TrajectoryBuffer(*buffer_arguments(config, None, None))
        for group in groups:
            await buffer.put(*parts(group))
        taken = [(await buffer.take(step + 1, 0))[1].group_ids for step in range(len(kept))]
        assert [group_id for ids in taken for group_id in ids] == kept

    asyncio.run(run())


def test_a_response_that_was_not_graded_gives_no_signal() -> None:
    group = replace(simple_group(0), rewards=np.float32([1, 0]), errors={1: "too slow"})
    assert not group.varies_in("reward")


def test_setting_a_group_aside_can_make_the_drop_of_another_certain() -> None:
    async def run() -> None:
        buffer = make_buffer(2, max_dropped=1)
        await buffer.put(
            *parts(simple_group(1, has_signal=False))
        )  # if 0 had no signal either, only 0 would be dropped
        assert (await buffer.group_ids(), await buffer.set_aside(0)) == ((1,), 1)

    asyncio.run(run())


def test_groups_that_arrive_too_late_are_cut_off() -> None:
    """With a lag of 1, the batch of step 2 (at version 1) may have tokens of version 0, that of step 3 not."""

    async def run() -> None:
        buffer = make_buffer(1, first_come=True, cut_max_lag=1)
        for group_id, version in ((2, 0), (0, 0), (3, 1)):
            assert await buffer.put(*parts(simple_group(group_id, versions=version))) == KEPT
        _, facts = await buffer.take(1, oldest_version=-1)
        assert (facts.group_ids, facts.cut_ids) == ((2,), ())
        _, facts = await buffer.take(2, oldest_version=0)
        assert (facts.group_ids, facts.cut_ids) == ((0,), ())  # 3 is new enough for step 3
        assert await buffer.put(*parts(simple_group(1, versions=[1, 0, 1]))) == PutReceipt(is_kept=False)
        assert await buffer.put(*parts(simple_group(4, versions=1))) == KEPT
        assert await buffer.put(*parts(simple_group(5, versions=2))) == KEPT
        _, facts = await buffer.take(3, oldest_version=1)
        assert (facts.group_ids, facts.cut_ids) == ((3,), (4,))
        assert facts.metrics["buffer/bytes"] == simple_group(5).num_bytes
        assert await buffer.group_ids() == (5,)
        for group_id in (1, 4):  # sampled again, by a newer version
            assert await buffer.put(*parts(simple_group(group_id, versions=2))) == KEPT

    asyncio.run(run())


# ---- groups that are replayed ----


def test_batch_has_its_fresh_groups_first_and_then_the_replayed_ones(tmp_path: Path) -> None:
    async def run() -> list[tuple[TrainBatch, BatchFacts]]:
        replay = {"sampling": "recent", "max_uses": 2, "max_age": 9}
        buffer = make_buffer(2, PLENTY, tmp_path, num_replayed=1, replay=replay)
        for group_id in range(8):
            await buffer.put(*parts(simple_group(group_id, versions=group_id // 2, has_signal=group_id < 4)))
        batches = [await buffer.take(step, oldest_version=0) for step in range(1, 5)]
        await buffer.flush()
        return batches

    batches = asyncio.run(run())
    # No group is drawn for its own batch; of equally recent groups the smaller id is; two uses are the limit.
    assert [ids(batch.groups) for batch, _ in batches] == [[0, 1], [2, 3, 0], [4, 5, 2], [6, 7, 4]]
    assert [facts.group_ids for _, facts in batches] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    uses = [read_uses(tmp_path / f"step-00000{step}.parquet") for step in range(1, 5)]
    assert uses == [[1, 1], [1, 1, 2], [1, 1, 2], [1, 1, 2]]
    assert [facts.metrics["reward/mean"] for _, facts in batches] == [0.5, 0.5, 0, 0]  # of fresh groups only
    assert [facts.metrics["replay/groups"] for _, facts in batches] == [2, 3, 4, 5]
    assert [facts.metrics["replay/evicted_uses"] for _, facts in batches] == [0, 1, 1, 1]
    assert check_names(batches[0][1].metrics) == []


def test_rejected_batch_draws_nothing() -> None:
    async def run() -> None:
        buffer = make_buffer(1, num_replayed=1, replay={"max_uses": 2})
        await buffer.put(*parts(simple_group(0)))
        await buffer.take(1, oldest_version=0)
        await buffer.put(*parts(simple_group(1, versions=0)))
        for _ in range(3):
            batch, facts = await buffer.take(2, oldest_version=1)
            assert (batch.groups, facts.rejected_ids) == ((), (1,))
            await buffer.put(*parts(simple_group(1, versions=0)))
        batch, _ = await buffer.take(2, oldest_version=0)
        assert ids(batch.groups) == [1, 0]

    asyncio.run(run())


# ---- the buffer's size ----


def test_bytes_of_a_group_by_hand() -> None:
    group = make_group(make_item(0, [1, 2, 3]), [make_completion([5, 6], text="ab"), make_completion([7])])
    arrays = 4 * 2 * 4 + 3 * 3 * 4  # four arrays of [G], three values per token, 4 bytes each
    assert group.num_bytes == arrays + len("prompt 0") + len("ab") + 3 * INT_BYTES


def test_groups_wait_outside_while_there_is_no_room() -> None:
    async def run() -> None:
        size = simple_group(0).num_bytes
        buffer = make_buffer(2, max_bytes=3 * size)
        for group_id in (5, 6, 7):
            await buffer.put(*parts(simple_group(group_id)))
        later = [asyncio.create_task(buffer.put(*parts(simple_group(g)))) for g in (2, 3, 4)]
        assert await is_done(*later) == [False, False, False]
        for group_id in (1, 0):  # groups of the next batch are let in all the same
            await asyncio.wait_for(buffer.put(*parts(simple_group(group_id))), 120)
        assert await buffer.group_ids() == (0, 1, 5, 6, 7)
        _, facts = await buffer.take(1, oldest_version=0)
        assert facts.metrics["buffer/bytes"] == 3 * size
        assert await is_done(*later) == [True, True, False]  # the batch after it, and no more
        await buffer.take(2, oldest_version=0)
        assert await is_done(*later) == [True, True, True]
        assert await buffer.group_ids() == (4, 5, 6, 7)

    asyncio.run(run())


def test_groups_that_come_in_do_not_wake_those_that_wait_for_room() -> None:
    """Otherwise a full buffer would look at every waiting group for every group: 40 x 20 looks here."""

    async def run() -> None:
        buffer, looks = make_buffer(40, max_bytes=1), 0
        has_room = buffer._has_room

        def look(group: ScoredGroup) -> bool:
            nonlocal looks
            looks += 1
            return has_room(group)

        buffer._has_room = look  # type: ignore[method-assign]
        later = [asyncio.create_task(buffer.put(*parts(simple_group(g)))) for g in range(40, 60)]
        assert not any(await is_done(*later))
        for group_id in range(40):
            await buffer.put(*parts(simple_group(group_id)))
        assert looks == 20 + 40
        await buffer.take(1, oldest_version=0)
        assert all(await is_done(*later))
        assert looks == 20 + 40 + 20

    asyncio.run(run())


def test_next_batch_is_let_in_however_little_room_there_is() -> None:
    async def run() -> None:
        buffer = make_buffer(2, max_bytes=1)
        await buffer.begin((80, 81, 82), next_id=83)
        puts = [asyncio.create_task(buffer.put(*parts(simple_group(g)))) for g in (80, 81, 82)]
        assert await is_done(*puts) == [True, True, False]
        _, facts = await asyncio.wait_for(buffer.take(41, oldest_version=0), 120)
        assert facts.group_ids == (80, 81)
        assert await is_done(*puts) == [True, True, True]

    asyncio.run(run())


@pytest.mark.parametrize("leaves", ["set aside", "dropped"])
def test_group_that_gets_the_slot_of_another_is_let_in(leaves: str) -> None:
    async def run() -> None:
        buffer = make_buffer(1, max_bytes=1, max_dropped=1)
        put = asyncio.create_task(buffer.put(*parts(simple_group(1))))
        assert await is_done(put) == [False]
        if leaves == "dropped":
            assert await buffer.put(*parts(simple_group(0, has_signal=False))) == PutReceipt(True, 1)
        else:
            await buffer.set_aside(0)
        assert await is_done(put) == [True]
        assert 1 in await buffer.group_ids()

    asyncio.run(run())


def test_put_that_waits_is_refused_when_its_group_is_set_aside() -> None:
    async def run() -> None:
        buffer = make_buffer(1, max_bytes=1)
        put = asyncio.create_task(buffer.put(*parts(simple_group(9))))
        assert await is_done(put) == [False]
        await buffer.set_aside(9)
        with pytest.raises(ValueError, match="group 9 came after it was trained, dropped or set aside"):
            await asyncio.wait_for(put, 120)
        assert await buffer.group_ids() == ()

    asyncio.run(run())


@settings(max_examples=50, deadline=None)
@given(
    order=st.permutations(range(12)),
    max_groups=st.integers(0, 12),
    size=st.integers(1, 4),
    lookahead=st.integers(1, 3),
    aside=st.sets(st.integers(0, 11)),
)
def test_no_size_and_no_order_stops_the_buffer(
    order: list[int], max_groups: int, size: int, lookahead: int, aside: set[int]
) -> None:
    async def run() -> list[int]:
        buffer = make_buffer(size, max_groups * simple_group(0).num_bytes, lookahead=lookahead)

        async def produce(group_id: int) -> None:
            await (
                buffer.set_aside(group_id) if group_id in aside else buffer.put(*parts(simple_group(group_id)))
            )

        puts = [asyncio.create_task(produce(group_id)) for group_id in order]
        trained: list[int] = []
        for step in range(1, 1 + (12 - len(aside)) // size):
            _, facts = await asyncio.wait_for(buffer.take(step, oldest_version=0), 120)
            trained += facts.group_ids
            left = [g for g in range(12) if g not in trained and g not in aside]
            # Groups that are yet to be set aside may still be in the window.
            extra = [g for g in await buffer.group_ids() if g not in left[: size + lookahead - 1]]
            assert len(extra) <= max_groups
        ended = [put for put in puts if put.done()]
        assert [put.exception() for put in ended] == [None] * len(ended)
        for put in puts:
            put.cancel()  # groups after the last batch may still be waiting
        return trained

    num_trained = (12 - len(aside)) // size * size
    trained = asyncio.run(run())
    assert len(trained) == len(set(trained)) == num_trained
    if lookahead == 1:
        assert trained == [group_id for group_id in range(12) if group_id not in aside][:num_trained]


def test_take_that_is_cancelled_loses_nothing() -> None:
    async def run() -> None:
        buffer = make_buffer(2)
        await buffer.put(*parts(simple_group(0)))
        taken = asyncio.create_task(buffer.take(1, oldest_version=0))
        assert await is_done(taken) == [False]
        taken.cancel()
        await buffer.put(*parts(simple_group(1)))
        _, facts = await asyncio.wait_for(buffer.take(1, oldest_version=0), 120)
        assert facts.group_ids == (0, 1)

    asyncio.run(run())


# ---- checkpoints ----


def test_captured_groups_are_restored(tmp_path: Path) -> None:
    groups = {g: simple_group(g, versions=[g, g, g + 1]) for g in (4, 2, 5, 3, 6)}

    async def write() -> None:
        buffer = make_buffer(2)
        await buffer.begin((2, 3, 4, 5, 6), next_id=7)
        for group in groups.values():
            await buffer.put(*parts(group))
        assert await buffer.capture(99) == (2, 3, 4, 5, 6)
        await buffer.take(2, oldest_version=0)  # changes after the capture do not matter
        await buffer.put(*parts(simple_group(7)))
        await buffer.write_captured(tmp_path)

    async def read() -> None:
        buffer = make_buffer(2, checkpoint=tmp_path)
        assert await buffer.group_ids() == (2, 3, 4, 5, 6)
        assert await buffer.begin((2, 3, 4, 5, 6), next_id=7) == 0
        batch, facts = await buffer.take(2, oldest_version=0)
        assert same_groups(batch.groups, (groups[2], groups[3]))
        assert facts.metrics["buffer/bytes"] == sum(groups[g].num_bytes for g in (4, 5, 6))
        with pytest.raises(ValueError, match="group 6 came twice"):
            await buffer.put(*parts(groups[6]))

    asyncio.run(write())
    assert sorted(os.listdir(tmp_path)) == ["groups.parquet", "replay.parquet"]
    assert same_groups(read_groups(tmp_path / "groups.parquet"), tuple(groups[g] for g in (2, 3, 4, 5, 6)))
    assert read_groups(tmp_path / "replay.parquet") == ()
    asyncio.run(read())


def test_dropped_groups_are_dropped_again_after_a_resume(tmp_path: Path) -> None:
    """They are reported with the next batch, so a checkpoint before it still holds them."""

    async def write() -> tuple[int, BatchFacts]:
        buffer = make_buffer(2, max_dropped=2)
        num_slots = 0
        for group_id in (0, 1, 2):
            receipt = await buffer.put(*parts(simple_group(group_id, has_signal=group_id != 1)))
            num_slots += receipt.num_slots
        assert await buffer.capture(99) == (0, 1, 2)
        await buffer.write_captured(tmp_path)
        return num_slots, (await buffer.take(1, oldest_version=0))[1]

    async def resume() -> tuple[int, BatchFacts]:
        buffer = make_buffer(2, checkpoint=tmp_path, max_dropped=2)
        num_slots = await buffer.begin((0, 1, 2), next_id=3)
        return num_slots, (await buffer.take(1, oldest_version=0))[1]

    (slots, facts), (slots_again, facts_again) = asyncio.run(write()), asyncio.run(resume())
    assert slots == slots_again == 1
    assert (facts.group_ids, facts.dropped_ids) == (facts_again.group_ids, facts_again.dropped_ids)
    assert (facts.group_ids, facts.dropped_ids) == ((0, 2), (1,))


def test_groups_to_replay_are_restored_with_their_uses(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_replayed": 2, "replay": {"max_uses": 4, "max_age": 20}, "seed": 3}

    async def run() -> None:
        buffer = make_buffer(2, **options)
        for group_id in range(12):
            await buffer.put(*parts(simple_group(group_id)))
        for step in (1, 2, 3):
            await buffer.take(step, oldest_version=0)
        await buffer.capture(99)
        await buffer.write_captured(tmp_path)
        resumed = make_buffer(2, checkpoint=tmp_path, **options)
        await resumed.begin(range(6, 12), next_id=12)
        for step in (4, 5, 6):
            (batch, facts), (again, facts_again) = [
                await each.take(step, oldest_version=0) for each in (buffer, resumed)
            ]
            assert same_groups(again.groups, batch.groups)
            assert facts_again.metrics["replay/bytes"] == facts.metrics["replay/bytes"] > 0
            assert facts_again.metrics["replay/groups"] == facts.metrics["replay/groups"]

    asyncio.run(run())
    assert sum(read_uses(tmp_path / "replay.parquet")) == 6 + 2 + 2  # six fresh uses, and two draws of two


def test_empty_buffer_can_be_captured(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = make_buffer(2)
        assert await buffer.capture(99) == ()
        await buffer.write_captured(tmp_path)
        resumed = make_buffer(2, checkpoint=tmp_path)
        assert await resumed.group_ids() == ()
        assert await resumed.begin((), next_id=8) == 0
        with pytest.raises(ValueError, match="group 7 came after it was trained"):
            await resumed.put(*parts(simple_group(7)))

    asyncio.run(run())


def test_captured_groups_that_cannot_be_written_raise_an_oserror(tmp_path: Path) -> None:
    async def run() -> None:
        buffer = make_buffer(1)
        await buffer.put(*parts(simple_group(0)))
        await buffer.capture(99)
        with pytest.raises(OSError, match="missing"):
            await buffer.write_captured(tmp_path / "missing")

    asyncio.run(run())


# ---- made from a configuration ----


def test_buffer_is_made_as_the_configuration_says(tiny_config: Config) -> None:
    def arguments(**changes: dict) -> tuple:
        data = tiny_config.model_dump()  # 3 groups per batch
        for section, fields in changes.items():
            data[section] |= fields
        return buffer_arguments(Config.model_validate(data), Path("rollouts"), Path("training"))

    queue, memory, max_bytes, rollouts, checkpoint, cut_max_lag, masks_old, metric = arguments(
        buffer={"max_gib": 0.5}
    )
    assert (vars(queue)["_size"], queue.window(), queue.batch([2, 1, 0])) == (3, [0, 1, 2], (0, 1, 2))
    assert queue.drop({0: False, 1: False}) == ()
    assert (max_bytes, rollouts, checkpoint, cut_max_lag) == (2**29, Path("rollouts"), Path("training"), None)
    assert (masks_old, metric) == (False, "advantage")
    memory.add([simple_group(0)])
    assert len(memory) == 0

    replay = {"frac": 0.34, "max_age": 3}
    queue, memory, *_ = arguments(buffer={"lookahead": 2, "replay": replay}, weight_sync={"max_lag": 2})
    assert queue.window() == [0, 1, 2]  # two fresh groups, and one may overtake
    memory.add([simple_group(0), simple_group(1)])
    assert len(memory.draw(1)) == 1

    changes = {"oversample_frac": 0.5, "dynamic_sampling_tries": 2}
    changes |= {"dynamic_sampling_metric": "answer"}
    queue, *_, cut_max_lag, _, metric = arguments(algorithm=changes, weight_sync={"max_lag": 1})
    assert (cut_max_lag, metric) == (1, "answer")
    assert queue.batch([7, 5, 9]) == (5, 7, 9)
    assert len(queue.drop(dict.fromkeys(range(20), False))) == 6


# ---- files ----


def test_disk_that_fills_up_and_is_freed(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = make_buffer(1, rollouts=tmp_path)

        async def step(k: int) -> str | None:
            await buffer.put(*parts(simple_group(k)))
            _, facts = await buffer.take(k + 1, 0)
            assert facts.group_ids == (k,)
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

    asyncio.run(main())
    names = [f"step-{step:06d}.parquet" for step in range(1, 6)]
    assert sorted(os.listdir(tmp_path)) == names
    assert [read_rollouts(tmp_path / name)[0]["group_id"] for name in names] == [0, 1, 2, 3, 4]


def test_batches_beyond_the_memory_are_dropped_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"  # it does not exist yet: every write fails

    async def run() -> None:
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

    asyncio.run(run())
    assert sorted(os.listdir(folder)) == ["step-000004.parquet", "step-000005.parquet"]


def test_take_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = _hold_writing(monkeypatch)

    async def run() -> None:
        buffer = make_buffer(1, PLENTY, tmp_path)
        for step in (1, 2, 3):
            await buffer.put(*parts(simple_group(step - 1)))
            await asyncio.wait_for(buffer.take(step, oldest_version=0), 120)
        flushed = asyncio.create_task(buffer.flush())
        assert await is_done(flushed) == [False]
        assert os.listdir(tmp_path) == []
        may_write()
        assert await asyncio.wait_for(flushed, 120) is None
        assert len(os.listdir(tmp_path)) == 3

    asyncio.run(run())


def test_take_waits_for_a_slow_disk_once_too_much_is_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = _hold_writing(monkeypatch)

    async def run() -> None:
        buffer = make_buffer(1, simple_group(0).num_bytes, tmp_path)
        for step in (1, 2, 3):
            await buffer.put(*parts(simple_group(step - 1)))
            taken = asyncio.create_task(buffer.take(step, oldest_version=0))
            assert await is_done(taken) == [step < 3]
        may_write()
        await asyncio.wait_for(taken, 120)
        await buffer.flush()
        assert len(os.listdir(tmp_path)) == 3

    asyncio.run(run())


def test_bug_in_writing_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr("grpo_ray.telemetry.rollout_writer.write_rollouts", broken)

    async def run() -> None:
        buffer = make_buffer(1, PLENTY, tmp_path)
        for group_id in range(2):
            await buffer.put(*parts(simple_group(group_id)))
        await buffer.take(1, oldest_version=0)
        assert await buffer.flush() is None
        _, facts = await buffer.take(2, oldest_version=0)
        assert facts.group_ids == (1,)
        assert facts.notes == (f"{tmp_path / 'step-000001.parquet'} is not written: TypeError: a mistake",)

    asyncio.run(run())


def _hold_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hold back the writing of rollouts until the returned function is called."""
    import threading

    allowed = threading.Event()

    def write(*args: object) -> None:
        assert allowed.wait(30)
        write_rollouts(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("grpo_ray.telemetry.rollout_writer.write_rollouts", write)
    return allowed.set
