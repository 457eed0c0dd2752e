"""Sharded tensors in checkpoints: written and read by any number of ranks with torch.distributed.checkpoint.

The files are safetensors, each with one rank's shards and their places in the whole tensors: reading one runs
no code, as unpickling would.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Placement

from grpo_ray.models.sharded import sharded_like, whole
from grpo_ray.policy.ranks import Ranks

Tensors = dict[str, Tensor]
Shards = dict[str, tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]]
"""By name a sharded tensor's placements, shape and strides."""

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)  # it warns of a run without a group


def shards_of(tensors: Mapping[str, Tensor]) -> Shards:
    """Return the layout of those tensors that are sharded."""
    return {n: (t.placements, t.shape, t.stride()) for n, t in tensors.items() if isinstance(t, DTensor)}


def gathered_weights(parts: Tensors, shards: Shards, dtype: torch.dtype, ranks: Ranks) -> Tensors:
    """Cast the weights, and gather them in the first rank's host memory; other ranks return nothing.

    Tied weights stay one tensor.
    """
    gathered: dict[int, Tensor] = {}
    for name, part in parts.items():
        if id(part) not in gathered:
            cast = part.to(dtype) if part.is_floating_point() else part
            tensor = whole(_global({name: cast}, shards, ranks)[name])
            gathered[id(part)] = tensor if ranks.is_first else part  # the others keep no whole model
    return {name: gathered[id(part)] for name, part in parts.items()} if ranks.is_first else {}


def write_shards(parts: Tensors, shards: Shards, folder: Path, ranks: Ranks) -> None:
    """Write all ranks' parts of the tensors to a folder on a disk that they share.

    Raises:
        OSError: one of the ranks could not write, on every rank; RuntimeError: it had another error.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(_global(parts, shards, ranks), storage_writer=writer, process_group=ranks.writing)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise (OSError if isinstance(cause, OSError) else RuntimeError)(f"rank {rank}: {cause}") from error


def read_shards(folder: Path, like: Callable[[str], Tensor | None]) -> Tensors:
    """Read what `write_shards` wrote, whatever the number of ranks was.

    Args:
        like: the sharded weight that a name belongs to, which its tensor is sharded like.
    """
    reader = HuggingFaceStorageReader(str(folder))
    tensors: Tensors = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        empty = torch.empty(saved.size, dtype=saved.properties.dtype)  # type: ignore[union-attr]
        tensors[name] = sharded_like(empty, like(name))
    load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return tensors


def _global(parts: Tensors, shards: Shards, ranks: Ranks) -> Tensors:
    """Return this rank's parts, on the host, as parts of the whole tensors."""
    tensors: Tensors = dict(parts)
    for name in parts.keys() & shards.keys():
        placements, shape, stride = shards[name]
        tensors[name] = DTensor.from_local(
            parts[name], ranks.writing_mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return tensors
