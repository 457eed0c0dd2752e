"""Sharded tensors in checkpoints, in the files of torch.distributed.checkpoint: read by any number of ranks.

The files are safetensors, each with one rank's shards and their places in the whole tensors: reading one runs
no code, as unpickling would.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sharded import sharded_like, whole
from grpo_ray.records.durable import sync

Tensors = dict[str, Tensor]
Shards = dict[str, tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]]
"""By name a sharded tensor's placements, shape and strides."""

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)  # it warns of a run without a group
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as does this


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
            if name in shards:
                placements, shape, stride = shards[name]
                cast = DTensor.from_local(
                    cast, ranks.writing_mesh, placements, run_check=False, shape=shape, stride=stride
                )
            tensor = whole(cast)
            gathered[id(part)] = tensor if ranks.is_first else part  # the others keep no whole model
    return {name: gathered[id(part)] for name, part in parts.items()} if ranks.is_first else {}


def write_shards(parts: Tensors, shards: Shards, folder: Path, ranks: Ranks) -> None:
    """Write all ranks' parts of the tensors to a folder on a disk that they share.

    Raises:
        OSError: one of the ranks could not write, on every rank; RuntimeError: it had another error.
    """
    mesh, mine, places = ranks.writing_mesh, Tensors(), {}
    coordinates = mesh.get_coordinate() or ()
    for name, part in parts.items():
        placements, shape, _ = shards.get(name, ((Replicate(),) * mesh.ndim, part.shape, ()))
        along = zip(coordinates, placements, strict=True)
        if any(place and isinstance(placement, Replicate) for place, placement in along):
            continue  # another rank has the same part
        _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        if part.numel() or not any(offsets):  # the first rank also writes a part without elements
            mine[name], places[name] = part.contiguous(), {"saved_offsets": list(offsets)}
    error = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"shard-{ranks.rank + 1:05d}-model-00001-of-00001.safetensors"
        path.write_bytes(
            save(mine, {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"})
        )
        sync(path)
    except Exception as failure:  # an error of one rank alone would leave the others waiting
        error = f"{'OSError' if isinstance(failure, OSError) else 'RuntimeError'} {failure}"
    for rank, of_rank in enumerate(ranks.gathered_beside(error)):
        if of_rank:
            kind, _, cause = of_rank.partition(" ")
            raise (OSError if kind == "OSError" else RuntimeError)(f"rank {rank}: {cause}")


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
    load(tensors, storage_reader=reader, no_dist=True)  # each rank reads alone: none sends the others pickles
    return tensors
