"""Deltas between two versions of the weights, and weights that are kept to apply them to."""

import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import Killed, make_config, train, train_twice, until
from safetensors.torch import load_file

from grpo_ray.config.model import AdapterConfig
from grpo_ray.engines.vllm_engine import ServedAdapter
from grpo_ray.records.adapter_files import FILE
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit
from grpo_ray.transfer import delta, kept_weights
from grpo_ray.transfer.delta import apply, encode, fingerprint
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.sender import Packer
from grpo_ray.transfer.snapshot import check_snapshot, pack_weights


def zeros(num_words: int) -> np.ndarray:
    return np.zeros(2 * num_words, np.uint8)


def encoded(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the delta between two arrays of words or bytes."""
    return encode(old.view(np.uint8), new.view(np.uint8))


def restored(old: np.ndarray, payload: np.ndarray) -> np.ndarray:
    buffer = old.copy()
    apply(payload, buffer)
    return buffer


def test_sparse_changes_by_hand() -> None:
    """Words 2, 3 and 260 + 3 of 400 change: by +1, by -7 and by +1000."""
    old, new = np.full(400, 100, np.uint16), np.full(400, 100, np.uint16)
    new[[2, 3, 263]] = [101, 93, 1100]
    payload = encoded(old, new)
    assert payload[:12].view(np.uint32).tolist() == [4, 3, 1]  # bytes of positions, changes, literals
    positions, codes, literals = payload[12:16], payload[16:18], payload[18:]
    assert positions.tolist() == [2, 0, 255, 4]  # 259 unchanged words before the last: 255 and 4
    assert codes.tolist() == [2 | 13 << 4, 15]  # +1 and -7 in zigzag order; a literal
    assert literals.view(np.uint16).tolist() == [2000]  # +1000 in zigzag order
    assert restored(old.view(np.uint8), payload).view(np.uint16).tolist() == new.tolist()


def test_dense_changes_are_a_bit_per_word() -> None:
    old, new = zeros(32), zeros(32)
    new.view(np.uint16)[:5] = 1
    payload = encoded(old, new)
    assert payload[:12].view(np.uint32).tolist() == [4, 5, 0]
    assert payload[12:16].tolist() == [0b11111000, 0, 0, 0]
    assert payload[16:].tolist() == [2 | 2 << 4, 2 | 2 << 4, 2]
    assert np.array_equal(restored(old, payload), new)


def test_whole_is_cheaper_if_every_word_changes_at_random() -> None:
    old, new = np.random.default_rng(0).integers(0, 256, (2, 4096), np.uint8)
    assert encode(old, new) is None
    assert encode(zeros(0), zeros(0)) is None  # nothing is shorter than nothing


def test_differences_wrap_around() -> None:
    """From 0 to 2^16 - 1 it is one step down: half a byte, not a literal."""
    old, new = zeros(64), zeros(64)
    new.view(np.uint16)[0], old.view(np.uint16)[63] = 65535, 65535
    payload = encoded(old, new)
    assert payload[:12].view(np.uint32).tolist() == [2, 2, 0]
    assert payload[12:].tolist() == [0, 62, 1 | 2 << 4]
    assert np.array_equal(restored(old, payload), new)


STRANGE = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7FFF, 0x0001]  # signed zeros, infinities, NaNs


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num_words = draw(st.integers(1, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random.integers(0, 2**16, num_words).astype(np.uint16)
    new = old.copy()
    is_changed = random.random(num_words) < draw(st.sampled_from([0, 0.002, 0.01, 0.1, 0.4, 1]))
    reach = draw(st.sampled_from([1, 7, 8, 300]))
    new[is_changed] += random.integers(-reach, reach + 1, is_changed.sum()).astype(np.uint16)
    for value in draw(st.lists(st.sampled_from(STRANGE), max_size=5)):
        new[random.integers(num_words)] = value
    return old.view(np.uint8), new.view(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, delta.BLOCK])
@given(versions=two_versions())
@settings(max_examples=200)
def test_applied_delta_is_exact(block: int, versions: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = versions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK", block)
        payload = encode(old, new)
        if payload is None:
            return
        assert payload.nbytes < new.nbytes
        payload.flags.writeable = False  # as Ray's object store returns it
        assert np.array_equal(restored(old, payload), new)


def test_buffers_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="between buffers of 4 and 6 bytes"):
        encode(zeros(2), zeros(3))
    with pytest.raises(ValueError, match="a delta of 3 bytes, which is not a multiple of 2"):
        encode(np.zeros(3, np.uint8), np.ones(3, np.uint8))


@pytest.mark.parametrize("num_words", [0, 100, 400 + delta.BLOCK])
def test_payload_for_another_size_is_refused(num_words: int) -> None:
    old, new = zeros(400), zeros(400)
    new.view(np.uint16)[[7, 300]] = 1
    payload = encoded(old, new)
    with pytest.raises(ValueError, match=r"does not fit|is cut off|contradicts itself"):
        apply(payload, zeros(num_words))


def test_payload_that_is_cut_off_is_refused() -> None:
    old = np.arange(99, dtype=np.uint16)
    payload = encoded(old, old + np.uint16(1))
    for num_bytes in range(payload.nbytes):
        with pytest.raises(ValueError, match=r"is cut off|does not fit"):
            apply(payload[:num_bytes], old.view(np.uint8))


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(0, 7))
@settings(max_examples=200)
def test_flipped_bit_writes_nothing_outside_and_is_refused_or_seen(place: int, bit: int) -> None:
    """A payload's own CRC-32 finds it first; without one, the result's fingerprint does."""
    random = np.random.default_rng(1)
    old = random.integers(0, 2**16, 600).astype(np.uint16)
    new = old + (random.random(600) < 0.1) * random.integers(1, 20, 600).astype(np.uint16)
    payload = encoded(old, new)
    damaged = payload.copy()
    damaged[place % payload.nbytes] ^= 1 << bit
    assert zlib.crc32(damaged.data) != zlib.crc32(payload.data)
    buffer = old.view(np.uint8).copy()
    try:
        apply(damaged, buffer)
    except ValueError:
        return
    is_exact = np.array_equal(buffer, new.view(np.uint8))
    assert is_exact == (fingerprint(buffer) == fingerprint(new.view(np.uint8)))


WHOLE_BLOCKS = 2 * 8 * delta.ROWS * delta.COLUMNS


@pytest.mark.parametrize("num_bytes", [0, 2, 4096, WHOLE_BLOCKS, WHOLE_BLOCKS + 66])
def test_any_changed_byte_changes_the_fingerprint(num_bytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    assert fingerprint(data) == fingerprint(data.copy())
    assert 0 <= fingerprint(data) < 2**64
    for place in np.linspace(0, num_bytes - 1, min(num_bytes, 40), dtype=int):
        changed = data.copy()
        changed[place] ^= 128
        assert fingerprint(changed) != fingerprint(data)


def test_blocks_in_another_order_have_another_fingerprint() -> None:
    """Sums of whole columns would be the same."""
    data = np.random.default_rng(0).integers(0, 256, 2**21, dtype=np.uint8)
    for size in (2**19, 2**20):
        swapped = np.concatenate([data[size : 2 * size], data[:size], data[2 * size :]])
        assert fingerprint(swapped) != fingerprint(data)


SENT = "weight_sync/sent_frac"


def whole(version: int, step: float = 2**-7) -> WeightSnapshot:
    """Return a version in which every 50th of 2,048 bfloat16 values has moved on by `step`."""
    values = torch.linspace(1.0, 1.9, 2048)  # no padding, which holds anything
    values[::50] += version * step
    return replace(pack_weights([("w", values)], version, torch.bfloat16), is_kept=True)


def difference(version: int = 2) -> WeightSnapshot:
    """Return a version as its difference from the one before it."""
    sender = KeptWeights()
    assert sender.delta_to(whole(version - 1)) is None  # nothing is kept yet
    return sender.delta_to(whole(version))


def receiver() -> KeptWeights:
    kept = KeptWeights()
    kept.receive(whole(1))
    return kept


def test_delta_describes_itself() -> None:
    found = difference()
    assert (found.version, found.delta.base_version, found.is_kept) == (2, 1, True)
    assert found.num_bytes == found.delta.num_bytes == whole(2).num_bytes
    assert found.data.nbytes < 0.05 * found.num_bytes
    assert found.checksum == zlib.crc32(found.data.data)
    assert found.specs == whole(2).specs
    check_snapshot(found)


def test_both_sides_advance_alike_in_memory_that_is_reused() -> None:
    sizes: list[int] = []
    sender, kept = KeptWeights(), KeptWeights(lambda size: sizes.append(size) or np.empty(size, np.uint8))
    first = kept.receive(whole(0))
    for version in range(1, 5):
        message = sender.delta_to(whole(version)) or whole(version)
        assert (message.delta is None) == (version == 1)
        assert kept.receive(message) is first
        assert np.array_equal(first, whole(version).data)
        assert kept.version == sender.version == version
    kept.receive(replace(whole(8), data=np.zeros(64, np.uint8)))
    assert sizes == [whole(1).num_bytes, 64]


def test_whole_is_sent_where_it_is_smaller_or_of_another_size() -> None:
    sender, random = KeptWeights(), np.random.default_rng(0)
    sender.delta_to(whole(1))
    noise = replace(whole(2), data=random.integers(0, 256, whole(2).num_bytes, np.uint8))
    assert sender.delta_to(noise) is None
    assert sender.delta_to(replace(noise, version=3)) is not None  # from the noise
    assert sender.delta_to(replace(whole(4), data=np.zeros(64, np.uint8))) is None
    assert sender.version == 4


def test_delta_from_another_version_is_refused_and_the_kept_one_stays() -> None:
    kept = receiver()
    text = "version 3 came as its difference from version 2, but version 1 is kept here"
    with pytest.raises(ValueError, match=text):
        kept.receive(difference(3))
    assert kept.version == 1
    assert np.array_equal(kept.receive(difference(2)), whole(2).data)


def test_other_bytes_under_the_base_s_version_are_found_and_a_whole_heals_them() -> None:
    kept = KeptWeights()
    kept.receive(whole(1, step=2**-6))  # another run's version 1, say
    with pytest.raises(ValueError, match="version 2 was not restored from version 1"):
        kept.receive(difference(2))
    assert kept.version is None
    with pytest.raises(ValueError, match="but nothing is kept here"):
        kept.receive(difference(2))
    kept.receive(whole(2))
    assert np.array_equal(kept.receive(difference(3)), whole(3).data)


def test_update_that_is_interrupted_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes may be those of the next version."""

    def interrupted(payload: np.ndarray, buffer: np.ndarray) -> None:
        buffer[0] ^= 1
        raise MemoryError

    kept, message = receiver(), difference(2)
    monkeypatch.setattr(kept_weights, "apply", interrupted)
    with pytest.raises(MemoryError):
        kept.receive(message)
    assert kept.version is None
    monkeypatch.undo()
    with pytest.raises(ValueError, match="but nothing is kept here"):
        kept.receive(message)


def test_adapter_that_came_as_a_delta_is_written_as_a_whole_one() -> None:
    served = ServedAdapter(AdapterConfig(rank=8))
    name = "base_model.model.q_proj.lora_A.weight"
    try:
        for message in (whole(1), difference(2)):
            served.stage(replace(message, specs=(replace(message.specs[0], name=name),)))
            written = load_file(served._folder / FILE)[name]
            assert torch.equal(written.view(torch.uint8), torch.from_numpy(whole(message.version).data))
    finally:
        served.close()


def test_a_packer_compares_with_the_version_before_and_lets_the_whole_go() -> None:
    packer: Any = object.__new__(Packer)
    packer._kept, packer._ranks = KeptWeights(), SimpleNamespace(is_first=True)
    for version in (1, 2):
        packer._whole = whole(version)
        found, share = packer.delta()
        assert packer._whole is None
        assert (found is None, share == 1.0) == (version == 1, version == 1)
    assert share == found.data.nbytes / whole(2).num_bytes < 0.05


SMALL_UPDATES = ["model.dtype=bfloat16", "learner.learning_rate=1e-5", "weight_sync.max_lag=0"]


def tokens(run: RunDirectory) -> list[tuple[Any, ...]]:
    rows = [row for step in range(1, 9) for row in read_rollouts(run.rollouts_path(step))]
    return [(row["group_id"], row["sample"], *row["token_ids"], *row["logprobs"]) for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache", "any_reward")
def test_runs_with_deltas_sample_the_same_tokens_and_replaced_generators_get_the_whole(tmp_path: Path) -> None:
    without, run = (RunDirectory(tmp_path / name) for name in ("without", "run"))
    config = make_config(*SMALL_UPDATES, "weight_sync.delta=true")
    train(make_config(*SMALL_UPDATES, "weight_sync.delta=false"), without.path)

    async def kill_a_generator_then_the_driver(actors: Any, controller: Any) -> None:
        await until(lambda: controller.version >= 3)
        actors.generators["generator-0"].die()
        await until(lambda: controller.version >= 5)
        raise Killed

    train_twice(config, run.path, kill_a_generator_then_the_driver)
    for each in (without, run):
        assert audit(each).problems == []
    assert tokens(run) == tokens(without)
    assert all(SENT not in row for row in read_metrics(without.metrics_path))
    # A step that ended in its checkpoint has no metrics of its sync.
    shares = [row[SENT] for row in read_metrics(run.metrics_path) if SENT in row]
    assert shares[0] == 1
    parts = [share for share in shares if share != 1]
    assert len(shares) - len(parts) == 2  # the first version of each process
    assert 0.01 < max(parts) < 0.5
    assert min(parts) > 0
