"""A flat buffer of weights in parts: one is loaded while the next arrives, or each has memory of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_ray.transfer.messages import TensorSpec

CHUNK_BYTES = 2**30


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tensors, `specs`, with the bytes from `start` to `end` of the buffer."""

    specs: Sequence[TensorSpec]
    start: int
    end: int

    def rebased(self) -> list[TensorSpec]:
        """Return the specs with offsets in the chunk instead of the whole buffer."""
        return [replace(spec, offset_bytes=spec.offset_bytes - self.start) for spec in self.specs]


def chunks(specs: Sequence[TensorSpec], num_bytes: int, limit: int) -> Iterator[Chunk]:
    """Cut a buffer of `num_bytes` at tensor borders, into chunks of at most `limit` bytes or one tensor."""
    ends = [spec.offset_bytes for spec in specs[1:]] + [num_bytes]
    first = 0
    for place in range(len(specs)):
        start = specs[first].offset_bytes
        if place + 1 == len(specs) or ends[place + 1] - start > limit:
            yield Chunk(specs[first : place + 1], start, ends[place])
            first = place + 1
