"""The configuration of the schedule: the age that tokens may reach, and the groups that batches consist of."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_ray.config.section import PositiveSeconds, Section


class WeightSyncConfig(Section):
    max_lag: Annotated[int, Field(ge=0, le=1000)] = 1  # the groups that it admits are all begun
    """Largest lag, in versions, of a token that is trained on: 0 is synchronous, 1 is one version behind."""
    in_flight: bool = True
    """true: a sync replaces the weights under running requests, which continue with the new ones (best where
    response lengths vary widely). false: a sync first waits for running requests to finish on their version
    (best where they end together, since nothing is recomputed)."""
    recompute_kv: bool = True
    """true: a sync discards the keys and values of running requests, and the engine recomputes them with the
    new weights. false: it keeps them, so later tokens attend to keys and values of earlier weights. New
    requests use those of their own version, unless they waited in vLLM's queue during a sync.
    `mismatch/kl/after_switch` shows the cost, of responses that had begun before it."""
    transport: Literal["object_store", "ipc", "collective", "nccl"] = "object_store"
    """Path of the weights to the Generators. `object_store`: Ray's object store, then shared memory into the
    engine. `ipc`: read in place on the GPU that a colocated Generator and Learner share. `collective`: one gloo
    communicator per Generator, between host memories. `nccl`: one NCCL communicator per Generator, between GPUs
    (not run on any GPU yet). With the last two the Learner sends during its next step, and keeps two copies."""
    send: Literal["merged", "adapter"] = "merged"
    """With `model.adapter`: `merged` sends the whole model with the adapter merged into it; `adapter` sends
    only the adapter, which vLLM's LoRA layers apply (slower sampling, different rounding)."""
    delta: bool = False
    """Send only changed values (lossless and verified), unless sending all weights takes fewer bytes
    (`weight_sync/sent_frac`). For slow networks, bfloat16 and small learning rates: encoding takes the time of
    several memory copies. The Learner and each Generator keep the weights in host memory."""
    phase_timeout_s: PositiveSeconds = 300.0
    """Seconds for `stage`, and for each phase of `switch`, which may take twice as long as a whole. A Generator
    that takes longer is named and replaced."""
    checksum: bool = False
    """Compare a CRC-32 of the weights before they are loaded; takes about a second per GB."""

    @property
    def wire_backend(self) -> Literal["gloo", "nccl"] | None:
        """The library of the Generators' communicators; None for transports without any.

        vLLM reads an adapter from host memory, so it goes by gloo.
        """
        if self.transport == "nccl" and self.send == "merged":
            return "nccl"
        return "gloo" if self.transport in ("collective", "nccl") else None


class ReplayConfig(Section):
    """Replay of scored groups from earlier batches."""

    frac: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a batch that is drawn from earlier batches; 0 turns replay off."""
    sampling: Literal["uniform", "recent", "advantage"] = "uniform"
    """Draw uniformly, the most recent first, or in proportion to the mean |advantage|."""
    max_age: PositiveInt = 4
    """Largest lag, in versions, of a token that is replayed."""
    max_uses: Annotated[int, Field(ge=2)] = 4
    """Times that a group is trained on, the first included."""
    max_groups: PositiveInt = 1024
    """Groups to keep; the oldest are evicted."""
    max_gib: PositiveFloat = 1.0
    """Memory for the kept groups, in GiB."""


class BufferConfig(Section):
    max_gib: PositiveFloat = 4.0
    """Memory for scored groups, in GiB; when full, only groups that the Learner waits for are accepted."""
    lookahead: PositiveInt = 1
    """Window W: a batch takes the first groups to finish among the next `fresh groups + W - 1`. Stragglers
    delay it less but may come later, which `weight_sync.max_lag` must allow. 1 is strict order."""
    replay: ReplayConfig = ReplayConfig()
