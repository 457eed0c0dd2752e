"""Deltas between two versions of the weights: exact, small, and refused where they do not fit."""

import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_ray.transfer import delta
from grpo_ray.transfer.delta import apply, encode, fingerprint


def zeros(num_words: int) -> np.ndarray:
    return np.zeros(2 * num_words, np.uint8)


def restored(old: np.ndarray, payload: np.ndarray) -> np.ndarray:
    buffer = old.copy()
    apply(payload, buffer)
    return buffer


@pytest.fixture(params=[8, delta.BLOCK])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(delta, "BLOCK", request.param)
    return int(request.param)


# ---- by hand ----


def test_sparse_changes_by_hand() -> None:
    """Words 2, 3 and 260 + 3 of 400 change: by +1, by -7 and by +1000."""
    old, new = np.full(400, 100, np.uint16), np.full(400, 100, np.uint16)
    new[[2, 3, 263]] = [101, 93, 1100]
    payload = encode(old.view(np.uint8), new.view(np.uint8))
    assert payload is not None
    assert payload[:12].view(np.uint32).tolist() == [4, 3, 1]  # bytes of positions, changes, literals
    positions, codes, literals = payload[12:16], payload[16:18], payload[18:]
    assert positions.tolist() == [2, 0, 255, 4]  # 259 unchanged words before the last: 255 and 4
    assert codes.tolist() == [2 | 13 << 4, 15]  # +1 and -7 in zigzag order; a literal
    assert literals.view(np.uint16).tolist() == [2000]  # +1000 in zigzag order
    assert restored(old.view(np.uint8), payload).view(np.uint16).tolist() == new.tolist()


def test_dense_changes_are_a_bit_per_word() -> None:
    old, new = zeros(32), zeros(32)
    new.view(np.uint16)[:5] = 1
    payload = encode(old, new)
    assert payload is not None
    assert payload[:12].view(np.uint32).tolist() == [4, 5, 0]
    assert payload[12:16].tolist() == [0b11111000, 0, 0, 0]
    assert payload[16:].tolist() == [2 | 2 << 4, 2 | 2 << 4, 2]
    assert np.array_equal(restored(old, payload), new)


def test_no_weights_at_all() -> None:
    assert encode(zeros(0), zeros(0)) is None  # nothing is shorter than nothing


def test_whole_is_cheaper_if_every_word_changes_at_random() -> None:
    random = np.random.default_rng(0)
    old, new = random.integers(0, 256, (2, 4096), np.uint8)
    assert encode(old, new) is None


def test_differences_wrap_around() -> None:
    """From 0 to 2^16 - 1 it is one step down: half a byte, not a literal."""
    old, new = zeros(64), zeros(64)
    new.view(np.uint16)[0], old.view(np.uint16)[63] = 65535, 65535
    payload = encode(old, new)
    assert payload is not None
    assert payload[:12].view(np.uint32).tolist() == [2, 2, 0]
    assert payload[12:].tolist() == [0, 62, 1 | 2 << 4]
    assert np.array_equal(restored(old, payload), new)


# ---- any bytes ----

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
@given(two_versions())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_applied_delta_is_exact(block: int, versions: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = versions
    payload = encode(old, new)
    if payload is None:
        return
    assert payload.nbytes < new.nbytes
    payload.flags.writeable = False  # as Ray's object store returns it
    assert np.array_equal(restored(old, payload), new)


# ---- refusals ----


def test_buffers_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="between buffers of 4 and 6 bytes"):
        encode(zeros(2), zeros(3))
    with pytest.raises(ValueError, match="a delta of 3 bytes, which is not a multiple of 2"):
        encode(np.zeros(3, np.uint8), np.ones(3, np.uint8))


@pytest.mark.parametrize("num_words", [0, 100, 400 + delta.BLOCK])
def test_payload_for_another_size_is_refused(num_words: int) -> None:
    old, new = zeros(400), zeros(400)
    new.view(np.uint16)[[7, 300]] = 1
    payload = encode(old, new)
    assert payload is not None
    with pytest.raises(ValueError, match=r"does not fit|is cut off|contradicts itself"):
        apply(payload, zeros(num_words))


def test_payload_that_is_cut_off_is_refused() -> None:
    old = np.arange(99, dtype=np.uint16)
    payload = encode(old.view(np.uint8), (old + np.uint16(1)).view(np.uint8))
    assert payload is not None
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
    payload = encode(old.view(np.uint8), new.view(np.uint8))
    assert payload is not None
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


# ---- fingerprints ----


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
