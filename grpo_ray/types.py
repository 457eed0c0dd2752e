"""The messages that travel between the stages: one small frozen dataclass each.

    PromptItem -> RolloutGroup(Completion...) -> ScoredGroup -> TrainBatch -> StepReport
    (ledger)      (Generator)                   (Scorer)       (buffer)      (Learner)

and, the other way, WeightSnapshot from the Learner to the Generators.
A *version* counts the steps the Learner has completed and published; the initial weights are version 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class DeviceHandle:
    """A buffer of bytes on a GPU for another process on it, in plain values that every message can carry."""

    num_bytes: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


@dataclass(frozen=True)
class PromptItem:
    """One prompt to be sampled as a group.

    `group_id` is the prompt's place in the run's whole order (epoch after epoch); batches are made in that
    order (actors/batch_line.py).
    """

    group_id: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    ground_truth: str
    num_cuts: int = 0  # times it was cut off by oversampling before
    task: str = ""  # the part of a mixture that it comes from


@dataclass(frozen=True)
class Completion:
    """One sampled response; the three arrays are `[response_tokens]`.

    `logprobs` are the behaviour logprobs (natural log, at the sampling temperature, as the sampler
    assigned them) and `versions` the weight version that sampled each token.
    """

    text: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    finish_reason: str  # "stop" | "length"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and its G completions, from one Generator."""

    item: PromptItem
    completions: tuple[Completion, ...]
    generator: str

    @property
    def oldest_version(self) -> int:
        """The smallest version that sampled any token of the group."""
        return min(int(completion.versions.min()) for completion in self.completions)


@dataclass(frozen=True)
class GroupOutcome:
    """What sampling a prompt as a group has shown of it."""

    pass_rate: float  # the share of its graded responses that is right
    has_signal: bool  # as in ScoredGroup


@dataclass(frozen=True)
class ScoredGroup:
    """A group with its rewards; every array is `[G]` float32.

    A response that could not be graded has reward 0 and advantage 0, and stands in `errors`: it is left out
    of its group's mean and std, and so teaches nothing.
    """

    rollout: RolloutGroup
    rewards: np.ndarray
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    advantages: np.ndarray
    errors: Mapping[int, str] = field(default_factory=dict)  # by sample: why it could not be graded

    @property
    def group_id(self) -> int:
        return self.rollout.item.group_id

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def outcome(self) -> GroupOutcome | None:
        """None if no response was graded."""
        graded = [right for sample, right in enumerate(self.answer_rewards) if sample not in self.errors]
        return GroupOutcome(float(np.mean(np.array(graded) > 0)), self.has_signal) if graded else None

    @property
    def has_signal(self) -> bool:
        """False when every advantage is zero: the group cannot move the policy."""
        return bool(np.any(self.advantages != 0.0))

    @property
    def num_bytes(self) -> int:
        """Roughly the memory it takes: its arrays and texts."""
        item, completions = self.rollout.item, self.rollout.completions
        arrays = [self.rewards, self.format_rewards, self.answer_rewards, self.advantages]
        arrays += [array for c in completions for array in (c.token_ids, c.logprobs, c.versions)]
        texts = [item.prompt, item.ground_truth, *(c.text for c in completions)]
        return sum(a.nbytes for a in arrays) + sum(map(len, texts)) + 8 * len(item.prompt_token_ids)


@dataclass(frozen=True)
class TrainBatch:
    """The groups of one Learner step: fresh ones in group order, then those that are replayed."""

    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True)
class PutReceipt:
    """What became of a group that was put into the buffer."""

    is_kept: bool  # False: it is too old for every batch to come
    num_places: int = 0  # groups that left the line for lack of signal: so many more may be admitted


@dataclass(frozen=True)
class BatchFacts:
    """What the controller needs to know of a batch: small numbers, never tokens."""

    group_ids: tuple[int, ...]  # fresh groups that are trained
    rejected_ids: tuple[int, ...]  # groups that were too old: they are sampled again, and there is no batch yet
    metrics: dict[str, float]
    dropped_ids: tuple[int, ...] = ()  # left out for lack of signal
    cut_ids: tuple[int, ...] = ()  # came, but too late: the next batch cannot have them either
    num_places: int = 0  # as in PutReceipt
    outcomes: Mapping[int, GroupOutcome] = field(default_factory=dict)  # of fresh and dropped groups
    write_error: str | None = None  # why rollouts of an earlier batch are not on disk yet


@dataclass(frozen=True)
class StepReport:
    """What one Learner step did."""

    version: int  # the Learner's version after the step
    metrics: dict[str, float]
    profile_error: str | None = None  # why the trace of the step could not be written


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a snapshot's buffer."""

    name: str
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class WeightSnapshot:
    """All weights of one version, end to end in one buffer of bytes (Hugging Face names).

    The bytes are in `data`, or where `on_device` leads to, on the GPU that Learner and Generator share.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    data: np.ndarray  # uint8 [total_bytes]
    checksum: int | None = None  # CRC-32 of `data`, where it was asked for
    on_device: DeviceHandle | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if self.on_device is None else self.on_device.num_bytes


@dataclass(frozen=True)
class SyncReport:
    """Seconds of each phase of one weight sync, the slowest Generator counted."""

    version: int
    metrics: dict[str, float]
    failed: dict[str, str]  # Generators that did not come along, and why: they are out until admitted again


@dataclass(frozen=True)
class SamplingSettings:
    """How an engine samples; `seed` makes a request's draws reproducible where the engine can.

    At temperature 0 the likeliest token is taken each time (an evaluation's; training cannot use it).
    """

    num_samples: int
    temperature: float
    top_p: float
    min_tokens: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    seed: int | None = None
