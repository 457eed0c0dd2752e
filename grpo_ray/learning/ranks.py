"""The Learner's processes, its ranks: how they meet, what they exchange, and how they share a model.

The weights, their gradients and the optimizer's state are sharded by FSDP2 (`fully_shard`; Zhao et al. 2023,
PyTorch FSDP): a block's weights are gathered when it computes and released afterwards, and its gradients are
summed into the shards. Each rank computes a share of the batch (`deal`) with the whole batch's denominator,
so that the sum of the ranks' gradients is the gradient of one rank.
"""

import base64
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from grpo_ray.learning.policy_model import PolicyModel, blocks_of
from grpo_ray.learning.quantization import is_quantized
from grpo_ray.learning.rendezvous import NUM_BYTES, SignedStore, prove

T = TypeVar("T")
WRITE_TIMEOUT = timedelta(hours=1)  # for the slowest disk among the ranks'


@dataclass(frozen=True)
class Seat:
    """One rank's place among the others, and where they meet."""

    rank: int
    size: int
    replicas: int
    ranks_per_node: int
    host: str  # of a TCPStore that outlives the ranks
    port: int
    start_timeout_s: float
    collective_timeout_s: float
    secret: bytes = field(repr=False)  # of these ranks alone; it proves that a process is one of them


class Ranks:
    """The ranks as one of them sees them. A Learner of one rank has no process group, and exchanges nothing."""

    def __init__(self, seat: Seat | None = None, device: torch.device | None = None) -> None:
        """Join the others.

        Raises:
            RuntimeError: one of them did not come within `start_timeout_s`, or another process is in its place.
        """
        self.rank, self.size = (seat.rank, seat.size) if seat else (0, 1)
        self.time = CollectiveTime()
        if seat is None:
            return
        there = TCPStore(seat.host, seat.port, timeout=timedelta(seconds=seat.start_timeout_s))
        store = SignedStore(there, seat.secret)
        store.set(f"here/{seat.rank}", "")  # a process group would only wait for as long as a collective
        store.wait([f"here/{rank}" for rank in range(seat.size)])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(seat))
        on_gpu = device is not None and device.type == "cuda"
        if on_gpu:
            _take_gpu(store, seat)
        self._store, self._num_waits = store, 0
        limit = timedelta(seconds=seat.collective_timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=seat.rank, world_size=seat.size,
            timeout=limit,
        )  # fmt: skip
        self._kind = "cuda" if on_gpu else "cpu"
        self._numbers = torch.arange(seat.size).view(seat.replicas, -1)  # a row per replica
        self._used: list[tuple[str, Any]] = [("cpu", dist.group.WORLD)]  # groups, and where what they send is
        self._mesh = self._mesh_of(self._kind, dist.group.WORLD, limit)
        # Checkpoints are written beside the training: the collectives of the two must not meet.
        self.writing = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self.writing_mesh = self._mesh_of("cpu", self.writing, WRITE_TIMEOUT)
        self._used.append(("cpu", self.writing))
        for number, (kind, group) in enumerate(dict.fromkeys(self._used)):  # each has connections of its own
            members = dist.get_process_group_ranks(group)
            place = torch.device("cpu") if kind == "cpu" or device is None else device
            name = f"group {number} of the ranks {members} on {kind}"
            exchange = partial(_exchange, group, place)
            prove(seat.secret, name, members.index(seat.rank), len(members), exchange)

    def _mesh_of(self, kind: str, everybody: Any, limit: timedelta) -> DeviceMesh:
        """Return a mesh of all ranks, with process groups of its own if there are several replicas."""
        if len(self._numbers) == 1:
            self._used.append((kind, everybody))
            return DeviceMesh.from_group(everybody, kind, mesh_dim_names=("shard",))
        backend = "nccl" if kind == "cuda" else "gloo"
        groups = [
            dist.new_subgroups_by_enumeration(rows.tolist(), timeout=limit, backend=backend)[0]
            for rows in (self._numbers.T, self._numbers)
        ]
        self._used += [(kind, group) for group in groups]
        return DeviceMesh.from_group(groups, kind, self._numbers, mesh_dim_names=("replicate", "shard"))

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and answers for all."""
        return self.rank == 0

    # ---- exchange ----

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks.

        A value is what JSON has, or bytes; it travels as JSON, from which tuples come back as lists.
        """
        if self.size == 1:
            return [value]
        with self.time.measured():
            return _gathered(value, self.size, None)

    def gathered_beside(self, value: T) -> list[T]:
        """Return what `gathered` does, while checkpoints are written beside the training."""
        return _gathered(value, self.size, self.writing)

    def from_first(self, value: T | None) -> T:
        """Return the first rank's value, of a kind that `gathered` takes; the others' are ignored."""
        return _gathered(value if self.is_first else None, self.size, None)[0]  # type: ignore[no-any-return]

    def tensors_from_first(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the first rank's tensors, in host memory; the others' are ignored."""
        kinds = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        found = {}
        for name, dtype, shape in self.from_first(kinds):
            if self.is_first:
                found[name] = tensors[name].detach().cpu().contiguous()
            else:
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(found[name], 0)
        return found

    def agree(self, what: str, value: object) -> None:
        """Check that all ranks are about to do the same.

        Raises:
            RuntimeError: they are not, on every rank.
        """
        values = self.gathered(value)
        others = [rank for rank, other in enumerate(values) if other != values[self.rank]]
        if others:
            raise RuntimeError(
                f"the Learner's ranks disagree about {what}: ranks {others} differ from {self.rank}"
            )

    def wait_for_first(self) -> None:
        """Wait for the first rank, which takes longer than a collective's time limit allows."""
        self._num_waits += 1
        key = f"first/{self._num_waits}"
        if self.is_first:
            self._store.set(key, "is here")
        else:
            self._store.wait([key])

    # ---- a model in shards ----

    def shard(self, model: PolicyModel, dtype: torch.dtype) -> None:
        """Shard the parameters in place: each becomes a DTensor with this rank's rows.

        Weights in 4 bits stay whole on every rank: they are frozen, small, and have no rows.

        Args:
            dtype: of the gathered weights, and so of the computation; gradients are summed in float32.
        """
        whole = {parameter for parameter in model.parameters() if is_quantized(parameter)}
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            "reshard_after_forward": True,  # of the root too, or passes without gradients would leave it stale
            "ignored_params": whole,
        }
        root: Any = model
        for part in (*blocks_of(model), root):
            fully_shard(part, **options)
        root.apply_whole = lambda compute, *args: compute(*args)
        register_fsdp_forward_method(root, "apply_whole")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss has the whole batch's denominator
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
                module.set_custom_all_gather(Timed(dist.all_gather_single, self.time))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(Timed(dist.reduce_scatter_single, self.time))  # type: ignore[arg-type]

    def end_lookup(self, model: PolicyModel) -> None:
        """Have FSDP2 forget the order of passes without gradients, which only a backward pass would clear."""
        if isinstance(model, FSDPModule):
            model.reset_iter_state()

    def forward(self, model: PolicyModel, compute: Callable[..., T], *args: Any) -> T:
        """Return `compute(*args)`, in which parts of `model` are used; FSDP2 gathers its weights meanwhile."""
        if self.size == 1:
            return compute(*args)
        sharded: Any = model
        result: T = sharded.apply_whole(compute, *args)
        return result

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def _interface_towards(seat: Seat) -> str:
    """Return the network interface that leads to the meeting: gloo's own choice may be the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((seat.host, seat.port))  # sends nothing
        own = probe.getsockname()[0]
    found = (name for name, all_of in psutil.net_if_addrs().items() if own in (a.address for a in all_of))
    return next(found, "lo")


def _exchange(group: Any, device: torch.device, parts: Sequence[bytes]) -> list[bytes]:
    """Send the nth part to the group's nth rank; return the part that each sent here."""
    sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
    if device.type == "cpu":  # gloo has a connection for every pair of ranks, and each of them is used here
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
    else:
        every = [torch.empty_like(sent) for _ in parts]
        dist.all_gather(every, sent, group=group)
        received = torch.stack(every).view(len(parts), len(parts), NUM_BYTES)[:, dist.get_rank(group)]
    return [bytes(part.tolist()) for part in received.reshape(len(parts), NUM_BYTES).cpu()]


def _gathered(value: Any, size: int, group: Any) -> list[Any]:
    own = _encoded(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(own)]), group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group)
    return [_decoded(row[: int(num_bytes)]) for row, num_bytes in zip(rows, sizes, strict=True)]


def _encoded(value: object) -> torch.Tensor:
    """Return a value as JSON, in bytes (uint8)."""
    text = json.dumps(value, default=lambda data: {"base64": base64.b64encode(data).decode()})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(data: torch.Tensor) -> Any:
    def plain(found: dict[str, Any]) -> Any:
        return base64.b64decode(found["base64"]) if found.keys() == {"base64"} else found

    return json.loads(data.numpy().tobytes(), object_hook=plain)


def _take_gpu(store: SignedStore, seat: Seat) -> None:
    """Take the GPU that stands at this rank's place in the order of its node's GPUs.

    Ray gives each of a node's ranks one of their GPUs in any order; nothing has used it yet.
    """
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not mine:
        raise RuntimeError(
            "Ray has set no CUDA_VISIBLE_DEVICES; unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
        )
    store.set(f"gpu/{seat.rank}", mine)
    first = seat.rank // seat.ranks_per_node * seat.ranks_per_node
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(first, first + seat.ranks_per_node)]
    if len(set(gpus)) == len(gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = sorted(gpus, key=lambda gpu: (len(gpu), gpu))[seat.rank - first]
    logging.info("rank %d computes on GPU %s", seat.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))


class CollectiveTime:
    """The time that a rank's collectives took: the transfer, and the wait for ranks that come later.

    On a GPU a part of it passes while blocks compute.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, on_gpu: bool = False) -> Iterator[None]:
        """Add the block's time, on a GPU that of the work that it puts into the current stream."""
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Return the seconds since the last call; the device has done its work."""
        on_gpu = sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3
        seconds, self._seconds = self._seconds + on_gpu, 0.0
        self._events.clear()
        return seconds


class Timed:
    """A collective that FSDP2 lets be replaced (`FSDPModule.set_custom_all_gather`), with its time.

    FSDP2 names its tensors; those of `torch.distributed` may have other names, but stand in the same order.
    """

    def __init__(self, collective: Callable[..., dist.Work | None], clock: CollectiveTime) -> None:
        self._collective, self._clock = collective, clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> dist.Work | None:
        with self._clock.measured(input_tensor.is_cuda):
            return self._collective(output_tensor, input_tensor, **options)
