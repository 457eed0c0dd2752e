"""The difference between two versions of the weights, as few bytes that restore the second one exactly.

After a step at a small learning rate most bfloat16 values are unchanged, and the others have mostly moved to a
neighbouring value. The bytes of any dtype are compared as words of 16 bits, in blocks of `BLOCK` words, which
threads share. A payload is a header of three uint32 per block (bytes of its positions, number of changed words,
number of literals), then each block's

- positions: one byte per changed word, the unchanged words before it, where 255 skips 255 unchanged words; or a
  bit per word, if that is shorter;
- codes: half a byte per changed word, the difference of the two words modulo 2^16 in zigzag order (1 is -1, 2
  is +1, 3 is -2 ...), or 15 for a difference beyond 7;
- literals: two bytes per code of 15, the difference.
"""

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BLOCK = 1 << 18  # words: small enough that a block's intermediate arrays stay in the cache
SKIP = 255  # a gap of as many unchanged words, and no changed one after it
LITERAL = 15  # the code of a difference that half a byte does not hold
ROWS, COLUMNS = 128, 512  # of the sums that a fingerprint is made of
WORD = np.dtype(np.uint16)


def encode(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """Return the payload that turns `old` into `new`, or None if it would be as large as `new`.

    Args:
        old, new: uint8 `[num_bytes]`, a multiple of two.

    Raises:
        ValueError: the two differ in size, or the size is odd.
    """
    if old.nbytes != new.nbytes:
        raise ValueError(f"a delta between buffers of {old.nbytes} and {new.nbytes} bytes")
    pairs = zip(_blocks(old), _blocks(new), strict=True)
    parts: list[list[np.ndarray]] = []
    num_bytes = 0
    if new.nbytes == 0:
        return None
    pool = ThreadPoolExecutor(torch.get_num_threads())
    try:
        for part in pool.map(lambda pair: _encode_block(*pair), pairs):
            parts.append(part)
            num_bytes += sum(array.nbytes for array in part)
            if num_bytes >= new.nbytes:
                return None
    finally:
        pool.shutdown(cancel_futures=True)
    headers, sections = [part[0] for part in parts], [section for part in parts for section in part[1:]]
    return np.concatenate([array.view(np.uint8) for array in (*headers, *sections)])


def apply(payload: np.ndarray, buffer: np.ndarray) -> None:
    """Turn the old bytes, uint8 `[num_bytes]`, into the new ones in place, by a payload of `encode`.

    Raises:
        ValueError: the payload is not one for a buffer of this size; the buffer may be changed in part.
    """
    blocks = list(_blocks(buffer))
    if payload.nbytes < 12 * len(blocks):
        raise ValueError(f"a delta of {payload.nbytes} bytes is cut off")
    headers = payload[: 12 * len(blocks)].copy().view(np.uint32).reshape(-1, 3).astype(np.int64)
    sizes = np.stack([headers[:, 0], -(-headers[:, 1] // 2), headers[:, 2] * WORD.itemsize], axis=1)
    bounds = np.cumsum([12 * len(blocks), *sizes.ravel()])
    if bounds[-1] != payload.nbytes:
        raise ValueError(f"a delta of {payload.nbytes} bytes does not fit {buffer.nbytes} bytes of weights")
    sections = [payload[start:end] for start, end in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(_apply_block, blocks, headers[:, 1], *(sections[kind::3] for kind in range(3))):
            pass


def fingerprint(data: np.ndarray) -> int:
    """Return 64 bits that tell versions and damaged bytes apart, in a third of the time of a memory copy.

    They are a hash of column sums, modulo 2^64, of the bytes as blocks of 128 rows of 512 words of 64 bits: one
    changed word always changes its column, and blocks in another order are another sequence of sums.
    """
    num_blocks = data.nbytes // (8 * ROWS * COLUMNS)
    blocks, rest = data[: num_blocks * 8 * ROWS * COLUMNS], data[num_blocks * 8 * ROWS * COLUMNS :]
    sums = blocks.view(np.int64).reshape(num_blocks, ROWS, COLUMNS).sum(axis=1)
    return int.from_bytes(hashlib.blake2b(sums.tobytes() + rest.tobytes(), digest_size=8).digest(), "big")


def _blocks(data: np.ndarray) -> Iterator[np.ndarray]:
    if data.nbytes % WORD.itemsize:
        raise ValueError(f"a delta of {data.nbytes} bytes, which is not a multiple of {WORD.itemsize}")
    words = data.view(WORD)
    return (words[start : start + BLOCK] for start in range(0, len(words), BLOCK))


def _encode_block(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
    """Return the block's header, positions, codes and literals."""
    is_changed = old != new
    at = np.flatnonzero(is_changed)
    differences = (new[at] - old[at]).view(np.int16)
    zigzag = ((differences << 1) ^ (differences >> 15)).view(WORD)
    positions = _gaps(at)
    if len(positions) >= -(-len(old) // 8):
        positions = np.packbits(is_changed)
    literals = zigzag[zigzag >= LITERAL]
    header = np.array([len(positions), len(at), len(literals)], np.uint32)
    return [header, positions, _joined(np.minimum(zigzag, LITERAL).astype(np.uint8)), literals]


def _apply_block(
    block: np.ndarray, num_changed: int, positions: np.ndarray, codes: np.ndarray, literals: np.ndarray
) -> None:
    if len(positions) == -(-len(block) // 8):
        at = np.flatnonzero(np.unpackbits(positions, count=len(block)))
    else:
        at = _from_gaps(positions)
    zigzag = _split(codes, num_changed)
    is_literal = zigzag == LITERAL
    if len(at) != num_changed or is_literal.sum() * 2 != len(literals) or (at[-1:] >= len(block)).any():
        raise ValueError("a delta contradicts itself")
    zigzag[is_literal] = literals.copy().view(WORD)
    differences = (zigzag >> 1).view(np.int16) ^ -(zigzag & 1).view(np.int16)
    block[at] += differences.view(WORD)


def _gaps(at: np.ndarray) -> np.ndarray:
    """Return the bytes for increasing positions: the unchanged words before each, after skips."""
    gaps = np.diff(at, prepend=-1) - 1
    long = np.flatnonzero(gaps >= SKIP)
    if len(long) == 0:
        return gaps.astype(np.uint8)
    num_skips, gaps[long] = np.divmod(gaps[long], SKIP)  # divisions are slow: of the few alone
    num_bytes = np.ones(len(gaps), np.int64)
    num_bytes[long] += num_skips
    ends = np.cumsum(num_bytes)
    found = np.full(ends[-1], SKIP, np.uint8)
    found[ends - 1] = gaps
    return found


def _from_gaps(gaps: np.ndarray) -> np.ndarray:
    is_change = gaps != SKIP
    found: np.ndarray = np.cumsum(gaps + is_change.astype(np.int64))[is_change]
    return found - 1


def _joined(codes: np.ndarray) -> np.ndarray:
    """Return two codes per byte, the first in the lower half."""
    padded = np.concatenate([codes, codes[:0] if len(codes) % 2 == 0 else np.zeros(1, np.uint8)])
    joined: np.ndarray = padded[0::2] | (padded[1::2] << 4)
    return joined


def _split(joined: np.ndarray, num_codes: int) -> np.ndarray:
    codes = np.empty(2 * len(joined), WORD)
    codes[0::2], codes[1::2] = joined & 15, joined >> 4
    return codes[:num_codes]
