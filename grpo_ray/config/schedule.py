"""The configuration of the schedule: how old a token may be, and what batches are made of."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_ray.config.section import NonNegativeInt, Section


class WeightSyncConfig(Section):
    max_lag: NonNegativeInt = 1
    """Largest age, in versions, of a token that is trained on: 0 synchronous, 1 one version behind."""
    in_flight: bool = True
    """true: weights change under running requests, which go on under the new ones (best where lengths vary
    widely). false: a sync first lets the running requests finish on their version (best where they end
    together: nothing is computed again)."""
    transport: Literal["object_store", "ipc"] = "object_store"
    """How weights reach the Generators: Ray's object store, then shared memory into the engine; or `ipc`,
    read in place on the GPU that colocated Generator and Learner share."""
    phase_timeout_s: PositiveFloat = 300.0
    """Seconds each phase of a sync may take; a Generator that takes longer is named and replaced."""
    checksum: bool = False
    """Compare a CRC-32 of the weights before they are loaded: about a second for each GB."""


class ReplayConfig(Section):
    """Scored groups that are trained on again."""

    frac: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a batch that is drawn from earlier batches; 0 is plain FIFO."""
    sampling: Literal["uniform", "recent", "advantage"] = "uniform"
    """Draw evenly, the newest, or in proportion to the mean |advantage|."""
    max_age: PositiveInt = 4
    """No token older than so many versions is trained on again."""
    max_uses: Annotated[int, Field(ge=2)] = 4
    """Times a group is trained on, the first included."""
    max_groups: PositiveInt = 1024
    """Groups kept; the oldest make room."""
    max_gib: PositiveFloat = 1.0
    """Their size, in GiB."""


class BufferConfig(Section):
    max_gib: PositiveFloat = 4.0
    """Scored groups kept in memory, in GiB; past it only the groups that the Learner waits for are taken in."""
    lookahead: PositiveInt = 1
    """A batch is the first finished groups of so many more than it needs, less one: stragglers hold it up
    less, and come a step later, which `weight_sync.max_lag` must allow. 1 is strict order."""
    replay: ReplayConfig = ReplayConfig()
