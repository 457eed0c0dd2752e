"""The messages that travel between the stages: one small frozen dataclass each.

    PromptItem -> RolloutGroup(Completion...) -> Verdict -> TrainBatch(ScoredGroup...) -> StepReport
    (ledger)      (Generator)                   (Scorer)   (buffer)                      (Learner)

and, in the other direction, WeightSnapshot from the Learner to the Generators.

A *step* trains on one batch and is counted from 1. A *version* is the number of steps that the Learner has
completed and published, so the initial weights are version 0, and step n turns version n - 1 into n.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

T_co = TypeVar("T_co", covariant=True)


class Ref(Awaitable[T_co], Protocol[T_co]):
    """A reference to a value in another process; awaiting it brings the value here."""


@dataclass(frozen=True)
class StartingModel:
    """The model that a run's actors load when it begins."""

    path: str
    end_token_ids: tuple[int, ...]
    max_model_len: int
    """Maximum length of prompt and response together, in tokens."""


@dataclass(frozen=True)
class DeviceHandle:
    """A buffer on a GPU that another process on the same GPU can open, in plain values."""

    num_bytes: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    gpu: str  # its UUID, by which another process finds it


@dataclass(frozen=True)
class PromptItem:
    """One prompt to be sampled as a group.

    `group_id` is the prompt's position in the order of the whole run (epoch after epoch), which is also the
    order of batches (actors/batch_queue.py).
    """

    group_id: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    ground_truth: str
    num_cuts: int = 0  # times that oversampling has cut it off so far
    task: str = ""  # the part of a mixture that the prompt belongs to


@dataclass(frozen=True)
class Completion:
    """One sampled response; the three arrays are `[response_tokens]`.

    `logprobs` are the behaviour logprobs (natural log, at the sampling temperature, as the sampler assigned
    them), and `versions` the weight version that sampled each token.
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
    """A prompt and its G completions, from one Generator.

    It travels as one array of each kind, end to end: in a message, an array costs about as much as a thousand
    tokens. On arrival the completions' arrays are views of these.
    """

    item: PromptItem
    completions: tuple[Completion, ...]
    generator: str

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self.completions
        texts, reasons = tuple(c.text for c in rows), tuple(c.finish_reason for c in rows)
        bounds = (0, *accumulate(len(c.token_ids) for c in rows))
        arrays = [[c.token_ids for c in rows], [c.logprobs for c in rows], [c.versions for c in rows]]
        joined = tuple(np.concatenate(kind) for kind in arrays) if rows else ()
        return _unpacked_group, (self.item, self.generator, texts, reasons, bounds, joined)

    @property
    def oldest_version(self) -> int:
        """The smallest version that sampled any token of the group."""
        return min(int(completion.versions.min()) for completion in self.completions)


def _unpacked_group(
    item: PromptItem,
    generator: str,
    texts: tuple[str, ...],
    reasons: tuple[str, ...],
    bounds: tuple[int, ...],
    joined: tuple[np.ndarray, ...],
) -> RolloutGroup:
    """Return the group that `RolloutGroup.__reduce__` packed; `joined` are three arrays `[group_tokens]`."""
    completions = []
    for text, reason, (start, end) in zip(texts, reasons, pairwise(bounds), strict=True):
        token_ids, logprobs, versions = (array[start:end] for array in joined)
        completions.append(Completion(text, token_ids, logprobs, versions, reason))
    return RolloutGroup(item, tuple(completions), generator)


@dataclass(frozen=True)
class GroupOutcome:
    """The result of sampling a prompt as a group."""

    pass_rate: float  # share of its graded responses that are correct
    has_signal: bool  # as in ScoredGroup


@dataclass(frozen=True)
class Verdict:
    """The rewards and advantages of a group; every array is `[G]` float32.

    A response that the grader failed on is listed in `errors`, with reward 0 and advantage 0. The group's mean
    and standard deviation exclude it, so it contributes nothing to the gradient. A response that made its own
    grading impossible is listed in `ungradable`; it has the reward of a wrong one, and takes part.
    """

    rewards: np.ndarray
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    advantages: np.ndarray
    errors: Mapping[int, str] = field(default_factory=dict)  # by sample: the reason that it could not be graded
    ungradable: Mapping[int, str] = field(default_factory=dict)  # by sample: the reason that it counts as wrong


@dataclass(frozen=True)
class ScoredGroup:
    """A group with the fields of its verdict."""

    rollout: RolloutGroup
    rewards: np.ndarray
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    advantages: np.ndarray
    errors: Mapping[int, str] = field(default_factory=dict)
    ungradable: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rollout: RolloutGroup, verdict: Verdict) -> "ScoredGroup":
        return cls(rollout, **vars(verdict))

    @property
    def group_id(self) -> int:
        return self.rollout.item.group_id

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def outcome(self) -> GroupOutcome | None:
        """The group's outcome; None if no response was graded."""
        graded = [right for sample, right in enumerate(self.answer_rewards) if sample not in self.errors]
        return GroupOutcome(float(np.mean(np.array(graded) > 0)), self.has_signal) if graded else None

    @property
    def has_signal(self) -> bool:
        """True if any advantage is nonzero; otherwise the group cannot change the policy."""
        return bool(np.any(self.advantages != 0.0))

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the group's arrays and texts."""
        item, completions = self.rollout.item, self.rollout.completions
        arrays = [self.rewards, self.format_rewards, self.answer_rewards, self.advantages]
        arrays += [array for c in completions for array in (c.token_ids, c.logprobs, c.versions)]
        texts = [item.prompt, item.ground_truth, *(c.text for c in completions)]
        return sum(a.nbytes for a in arrays) + sum(map(len, texts)) + 8 * len(item.prompt_token_ids)


@dataclass(frozen=True)
class TrainBatch:
    """The groups of one Learner step: fresh groups in order, then replayed ones."""

    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True)
class PutReceipt:
    """The buffer's answer to a group that was put into it."""

    is_kept: bool  # False if the group is too old for all future batches
    num_slots: int = 0  # groups just dropped for lack of signal; one more may be admitted for each


@dataclass(frozen=True)
class BatchFacts:
    """The facts about a batch that the controller needs, without its tokens."""

    group_ids: tuple[int, ...]  # fresh groups in the batch
    rejected_ids: tuple[int, ...]  # too old, to be sampled again; if there are any, there is no batch yet
    metrics: dict[str, float]
    dropped_ids: tuple[int, ...] = ()  # left out for lack of signal
    cut_ids: tuple[int, ...] = ()  # arrived too late for this batch and the next
    num_slots: int = 0  # as in PutReceipt
    outcomes: Mapping[int, GroupOutcome] = field(default_factory=dict)  # of fresh and dropped groups
    write_error: str | None = None  # the reason that rollouts of an earlier batch are not on disk yet


@dataclass(frozen=True)
class StepReport:
    """The result of one Learner step."""

    version: int  # the Learner's version after the step
    metrics: dict[str, float]
    profile_error: str | None = None  # the reason that the step's trace could not be written
    out_of_memory: str | None = None  # how micro-batches were reduced after the GPU's memory ran out
    unshared_prompts: str | None = None  # the reason for the padded layout, after the Learner's first step


@dataclass(frozen=True)
class TensorSpec:
    """Position of one tensor in a snapshot's buffer."""

    name: str
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Delta:
    """The version that a snapshot's bytes must be applied to, and the result (transfer/delta.py)."""

    base_version: int
    num_bytes: int
    fingerprint: int  # 64 bits


@dataclass(frozen=True)
class WeightSnapshot:
    """All weights of one version under their Hugging Face names, end to end in one buffer of bytes.

    The bytes are in `data`, or in the buffers of `on_device`, for each GPU that a Generator shares with the
    Learner; or the Learner keeps them, and sends `wire_bytes` to each Generator (transfer/wire.py). With
    `delta`, `data` is the difference from an earlier version.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    data: np.ndarray  # uint8 [total_bytes]
    checksum: int | None = None  # CRC-32 of `data`, if `weight_sync.checksum` is on or it is a delta
    on_device: tuple[DeviceHandle, ...] = ()
    wire_bytes: int = 0
    delta: Delta | None = None
    is_kept: bool = False  # the receiver keeps the bytes, because a delta from them may follow

    @property
    def num_bytes(self) -> int:
        if self.delta is not None:
            return self.delta.num_bytes
        if self.on_device:
            return sum(each.num_bytes for each in self.on_device if each.gpu == self.on_device[0].gpu)
        return self.wire_bytes or self.data.nbytes


@dataclass(frozen=True)
class Admitted:
    """Permission to dispatch groups, as of a published version."""

    version: int  # the published version
    num_groups: int  # groups that may have been dispatched since the beginning of the run

    def exceeds(self, other: "Admitted") -> bool:
        return self.version > other.version or self.num_groups > other.num_groups


@dataclass(frozen=True)
class SyncReport:
    """The result of one weight sync: the slowest Generator's seconds per phase, and the failed Generators."""

    version: int
    metrics: dict[str, float]
    failed: dict[str, str]  # each one's error; it is excluded until its replacement is admitted


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of a request; `seed` makes its draws reproducible if the engine supports that.

    Temperature 0 always takes the most likely token (for evaluations; training cannot use it).
    """

    num_samples: int
    temperature: float
    top_p: float
    min_tokens: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    seed: int | None = None
