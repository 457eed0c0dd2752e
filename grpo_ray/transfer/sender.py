"""The Learner's end of all wires, the versions that it keeps for them, and its weights as snapshots."""

import secrets
from dataclasses import asdict, replace
from itertools import chain
from threading import Lock
from zlib import crc32

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from grpo_ray.config import Config
from grpo_ray.learning.adapters import served_adapter, served_weights
from grpo_ray.learning.hub_format import in_hub_format
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.rendezvous import NUM_BYTES, open_store
from grpo_ray.learning.sharded import gathered
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import CHUNK_BYTES, Backend, DeviceHandle, Meeting, WeightSnapshot, WireError
from grpo_ray.transfer.snapshot import (
    NamedWeights,
    ReusedMemory,
    host_zeros,
    pack,
    pack_on_device,
    pack_weights,
)
from grpo_ray.transfer.wire import SENDER, Channel, join, send


class Sender:
    """Packs versions, keeps them until they are released, and sends them to Generators.

    Its methods run in several threads: versions are sent while the next one is trained and packed. Two buffers
    take turns, that of the version which Generators run or switch to and that of the next; there is a third one
    only while a version waits to be published and the one after it is packed.
    """

    def __init__(self, config: Config, host: str, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Open no wire yet; `host` is the address of the Learner's node, and `device` the Learner's."""
        on_gpu = config.weight_sync.wire_backend == "nccl"
        self._backend: Backend = config.weight_sync.wire_backend or "gloo"
        self._host, self._timeout_s = host, config.weight_sync.phase_timeout_s
        self._num_receivers = config.generator.num_gpus if on_gpu else 1  # per Generator: each of its workers
        self._device = device if on_gpu else torch.device("cpu")  # keeps the bytes
        self._is_pinned = device.type == "cuda" and not on_gpu  # the weights come from a GPU
        self._chunk_bytes = chunk_bytes
        self._store: TCPStore | None = None
        self._num_opened = 0
        self._meetings: dict[str, Meeting] = {}  # by Generator
        self._channels: dict[str, tuple[Meeting, Channel]] = {}
        self._kept: dict[int, tuple[WeightSnapshot, torch.Tensor]] = {}  # by version
        self._spare: torch.Tensor | None = None
        self._lock = Lock()

    # ---- versions ----

    def pack(
        self, weights: NamedWeights, version: int, dtype: torch.dtype, with_checksum: bool
    ) -> WeightSnapshot:
        """Copy the weights, and keep them; the returned snapshot describes them, without the bytes."""
        specs, buffer = pack(weights, dtype, self._room)
        checksum = crc32(buffer.numpy().data) if with_checksum else None
        snapshot = WeightSnapshot(version, specs, np.empty(0, np.uint8), checksum, wire_bytes=buffer.numel())
        with self._lock:
            self._kept[version] = snapshot, buffer
        return snapshot

    def with_bytes(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Return what `pack` returned, with the bytes (in host memory); they are valid until it is released."""
        with self._lock:
            _, buffer = self._kept[snapshot.version]
        return replace(snapshot, data=buffer.numpy(), wire_bytes=0)

    def _room(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == num_bytes:
            return spare
        if self._device.type == "cpu":
            return host_zeros(num_bytes, self._is_pinned)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def release(self, version: int) -> None:
        """Forget the versions before this one: no Generator will be sent them any more."""
        with self._lock:
            for old in [old for old in self._kept if old < version]:
                _, self._spare = self._kept.pop(old)

    # ---- wires ----

    def open_wire(self, name: str) -> Meeting:
        """Return where the Generator `name` joins its wire; an earlier one of this name is dropped."""
        self.drop_wire(name)
        with self._lock:
            if self._store is None:
                self._store = open_store(self._host, self._timeout_s)
            self._num_opened += 1
            self._meetings[name] = Meeting(
                host=self._host,
                port=self._store.port,
                key=f"{name}/{self._num_opened}",
                backend=self._backend,
                num_receivers=self._num_receivers,
                timeout_s=self._timeout_s,
                secret=secrets.token_bytes(NUM_BYTES),
                chunk_bytes=self._chunk_bytes,
            )
            return self._meetings[name]

    def join_wire(self, name: str) -> None:
        """Wait until the Generator has joined; raises WireError after the time limit."""
        with self._lock:
            meeting = self._meetings[name]
        channel = join(meeting, SENDER, self._device)
        with self._lock:
            if self._meetings.get(name) is meeting:
                self._channels[name] = meeting, channel
                return
        channel.close()
        raise WireError(f"the wire to {name} was dropped")

    def send(self, name: str, version: int) -> None:
        """Send a version that was packed here to the Generator.

        Raises:
            WireError: the Generator is gone, or did not take it within the time limit; its wire is dropped.
        """
        with self._lock:
            wire, kept = self._channels.get(name), self._kept.get(version)
        if wire is None or kept is None:
            raise WireError(f"no wire to {name}" if wire is None else f"version {version} is not kept")
        meeting, channel = wire
        try:
            send(channel, meeting, *kept)
        except WireError:
            self.drop_wire(name, wire)
            raise

    def drop_wire(self, name: str, failed: tuple[Meeting, Channel] | None = None) -> None:
        """Close the wire (`failed`, not one that a replacement has joined), which ends what waits for it."""
        with self._lock:
            wire = self._channels.get(name)
            if failed is not None and wire is not failed:
                return
            self._meetings.pop(name, None)
            self._channels.pop(name, None)
        if wire is not None:
            wire[1].close()


class Packer:
    """One rank's part in every snapshot; `sender` is its end of the wires."""

    def __init__(self, config: Config, host: str, device: torch.device, ranks: Ranks) -> None:
        """Pack nothing yet; the weights are on `device`, except while a colocated Learner has left it."""
        self._sync, self._device, self._ranks = config.weight_sync, device, ranks
        self._dtype = getattr(torch, config.model.dtype)
        self._packing = ReusedMemory(is_pinned=device.type == "cuda")
        self._shared: list[torch.Tensor] = []  # the bytes of the last snapshot, on the device
        self._kept = KeptWeights()  # with weight_sync.delta, those that Generators have
        self._whole: WeightSnapshot | None = None  # the last snapshot, until `delta`
        self.sender = Sender(config, host, device)

    def snapshot(self, model: PolicyModel, version: int) -> WeightSnapshot:
        """Return a copy of the weights in the served dtype, unaffected by later steps."""
        is_merged = self._sync.send == "merged"
        served = served_weights(model) if is_merged else served_adapter(model)
        with gathered(model, served, self._dtype, by_block=is_merged) as weights:
            snapshot = self._packed(in_hub_format(model, weights) if is_merged else weights, version)
        if self._sync.delta:
            self._whole = snapshot = replace(snapshot, is_kept=True)
        return snapshot

    def delta(self) -> tuple[WeightSnapshot | None, float]:
        """Return the last snapshot as its difference from the one before it, and the share of its bytes.

        It is None, and the share 1, if the whole is to be sent: it is the first, or not larger.
        """
        whole, self._whole = self._whole, None
        assert whole is not None, "snapshot first"
        if whole.wire_bytes:
            whole = self.sender.with_bytes(whole)
        delta = self._kept.delta_to(whole) if self._ranks.is_first else None
        return delta, 1.0 if delta is None else delta.data.nbytes / delta.num_bytes

    def forget_shared(self) -> None:
        """Free the device's memory of the last snapshot, which every Generator has loaded."""
        self._shared.clear()
        torch.cuda.ipc_collect()  # also what a Generator that died had not read

    def _packed(self, weights: NamedWeights, version: int) -> WeightSnapshot:
        sync, dtype = self._sync, self._dtype
        if sync.transport == "ipc":
            self.forget_shared()
            torch.cuda.empty_cache()  # a buffer cut from a larger cached block would keep all of it from vLLM
            snapshot, self._shared = pack_on_device(weights, version, dtype, self._device)
            # It is kept until the next one: a replacement Generator loads it as well.
            found = chain(*self._ranks.gathered([asdict(handle) for handle in snapshot.on_device]))
            return replace(snapshot, on_device=tuple(DeviceHandle(**fields) for fields in found))
        if not self._ranks.is_first:
            for _, weight in weights:  # a sharded one is gathered, for the rank that packs it
                weight.detach()
            return WeightSnapshot(version, (), np.empty(0, np.uint8))
        if sync.wire_backend:
            return self.sender.pack(weights, version, dtype, sync.checksum)
        return pack_weights(weights, version, dtype, sync.checksum, self._packing)
