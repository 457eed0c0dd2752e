"""The Learner's weights as snapshots: packed for the configured transport, whole or as a delta."""

from dataclasses import asdict, replace
from itertools import chain

import numpy as np
import torch

from grpo_ray.config import Config
from grpo_ray.learning.adapters import served_adapter, served_weights
from grpo_ray.learning.hub_format import in_hub_format
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sharded import gathered
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import DeviceHandle, WeightSnapshot
from grpo_ray.transfer.sender import make_sender
from grpo_ray.transfer.snapshot import NamedWeights, ReusedMemory, pack_on_device, pack_weights, take_part


class Publisher:
    """One rank's part in every snapshot; `sender` is its end of the wires."""

    def __init__(self, config: Config, host: str, device: torch.device, ranks: Ranks) -> None:
        """
        Args:
            host: the address of this node, which Generators reach.
            device: of the weights, except while a colocated Learner has left it.
        """
        self._sync, self._device, self._ranks = config.weight_sync, device, ranks
        self._dtype = getattr(torch, config.model.dtype)
        self._packing = ReusedMemory(is_pinned=device.type == "cuda")
        self._shared: list[torch.Tensor] = []  # the bytes of the last snapshot, on the device
        self._kept = KeptWeights()  # with weight_sync.delta, those that Generators have
        self._whole: WeightSnapshot | None = None  # the last snapshot, until `delta`
        self.sender = make_sender(config, host, device)

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
            take_part(weights)
            return WeightSnapshot(version, (), np.empty(0, np.uint8))
        if sync.wire_backend:
            return self.sender.pack(weights, version, dtype, sync.checksum)
        return pack_weights(weights, version, dtype, sync.checksum, self._packing)
