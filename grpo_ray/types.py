"""The messages that travel between the stages: one small frozen dataclass each.

    PromptItem -> RolloutGroup(Completion...) -> Verdict -> TrainBatch(ScoredGroup...) -> StepReport
    (GroupBook)   (Generator)                   (Scorer)   (buffer)                      (Learner)

and, in the other direction, WeightSnapshot from the Learner to the Generators (transfer/messages.py). With
distillation, a Teacher gives one more array for each RolloutGroup.

A *step* trains on one batch and is counted from 1. A *version* is the number of steps that the Learner has
completed, so the initial weights are version 0, and step n turns version n - 1 into n.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

T_co = TypeVar("T_co", covariant=True)

TERM = "reward/"
"""Begins the name of a reward's term in scores and in rollout files."""
NO_VERSION = 2**31 - 1  # later than any
INT_BYTES = 36  # of a number in a tuple: an object of 28 bytes, and the reference to it
CONTEXT = -1
"""The version of a token that the policy did not sample: of a message, a tool's result, or the template."""


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
class PromptItem:
    """One prompt to be sampled as a group.

    `group_id` is the prompt's position in the order of the whole run (epoch after epoch), which is also the
    order of batches (core/batch_queue.py).

    Example: `PromptItem(7, "Sort: 31245", (83, 111, 114), "12345")`
    """

    group_id: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    ground_truth: str
    num_cuts: int = 0  # times that oversampling has cut it off so far
    task: str = ""  # the part of a mixture that the prompt belongs to
    about: str = ""
    """JSON of `Example.facts`, and a chat's messages, if a function of the user's may ask for it."""


@dataclass(frozen=True)
class Completion:
    """One sampled response; the three arrays are `[response_tokens]`.

    `logprobs` are the behaviour logprobs (natural log, at the sampling temperature, as the sampler assigned
    them), and `versions` the weight version that sampled each token, or CONTEXT.

    Example: `"12345"` of the token ids [17, 2] with the logprobs [-0.3, -0.01], sampled by [4, 5]; "stop"
    """

    text: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    finish_reason: str  # "stop" | "length"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def mask(self) -> np.ndarray:
        """The tokens to train, bool `[response_tokens]`: all, but in episodes those sampled and not masked."""
        mask: np.ndarray = self.versions != CONTEXT
        return mask

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.versions != CONTEXT))


@dataclass(frozen=True)
class EpisodeSequence:
    """A part of an episode that is trained as one sequence: the tokens `[start, end)` of it after a prompt.

    An episode has several if a turn did not continue the tokens before it (a branch). The prompt of a later one
    may hold sampled tokens, which an earlier one trains.
    """

    prompt_token_ids: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Episode(Completion):
    """A sample of several turns, as one completion: its sequences end to end, context and sampled tokens.

    `reward` is None if the end says nothing about the policy (an error of the environment, or the clock).
    """

    turns: np.ndarray  # int32, the turn that sampled each token, from 0; CONTEXT elsewhere
    sequences: tuple[EpisodeSequence, ...]
    status: str  # see episodes/outcome.py
    reward: float | None
    seconds: float
    turn_rewards: tuple[float, ...] | None = None  # one per turn
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # the end of the traceback, or the limit that was reached

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, masked ones included."""
        return int(np.count_nonzero(self.turns != CONTEXT))

    @property
    def num_turns(self) -> int:
        return int(self.turns.max(initial=CONTEXT)) + 1

    def masked_before(self, version: int) -> "Episode":
        """Return it with tokens sampled by earlier versions as context; they keep their turns."""
        is_old = self.versions < version
        versions, logprobs = np.where(is_old, CONTEXT, self.versions), np.where(is_old, 0, self.logprobs)
        return replace(self, versions=versions.astype(np.int32), logprobs=logprobs.astype(np.float32))


PER_TOKEN = frozenset(("token_ids", "logprobs", "versions", "turns"))


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and its G completions, from one Generator; or its G episodes, from one EnvironmentWorker.

    It travels as one array of each kind, end to end (`pack`).
    """

    item: PromptItem
    completions: tuple[Completion, ...]
    generator: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of, (self.item, pack(self.completions), self.generator)

    @property
    def sampled_versions(self) -> np.ndarray:
        """The version of each sampled token, int32 `[sampled_tokens]`, one completion after the other."""
        versions: np.ndarray = np.concatenate([completion.versions for completion in self.completions])
        sampled: np.ndarray = versions[versions != CONTEXT]
        return sampled

    @cached_property  # a replay memory asks for it at each draw
    def oldest_version(self) -> int:
        """The smallest version that sampled any token of the group; NO_VERSION if none was sampled."""
        return int(self.sampled_versions.min(initial=NO_VERSION))

    @property
    def is_of_episodes(self) -> bool:
        return any(isinstance(completion, Episode) for completion in self.completions)

    def masked_before(self, version: int) -> "RolloutGroup":
        """Return the group of episodes with the tokens of earlier versions masked."""
        masked = [c.masked_before(version) if isinstance(c, Episode) else c for c in self.completions]
        return replace(self, completions=tuple(masked))


def _group_of(item: PromptItem, packed: "PackedRows", generator: str) -> RolloutGroup:
    return RolloutGroup(item, unpack(packed), generator)


PackedRows = tuple[type[Completion], Sequence[int], Mapping[str, np.ndarray], Sequence[Mapping[str, Any]]]


def pack(rows: Sequence[Completion]) -> PackedRows:
    """Return completions as one array of each kind, `[tokens of all rows]`, and their other fields.

    In a message, an array costs about as much as a thousand tokens.
    """
    kind = type(rows[0]) if rows else Completion
    names = [field.name for field in fields(kind)]
    arrays = {n: np.concatenate([getattr(row, n) for row in rows]) for n in names if n in PER_TOKEN and rows}
    others = [{name: getattr(row, name) for name in names if name not in PER_TOKEN} for row in rows]
    return kind, (0, *accumulate(len(row.token_ids) for row in rows)), arrays, others


def unpack(packed: PackedRows) -> tuple[Completion, ...]:
    """Return the completions that `pack` was given; their arrays are views."""
    kind, bounds, arrays, others = packed
    return tuple(
        kind(**{**other, **{name: array[start:end] for name, array in arrays.items()}})
        for (start, end), other in zip(pairwise(bounds), others, strict=True)
    )


@dataclass(frozen=True)
class GroupFacts:
    """The facts about a scored group by which the driver decides; they come with its verdict."""

    oldest_version: int  # of a sampled token
    has_signal: bool  # that of `algorithm.dynamic_sampling_metric`
    num_bytes: int  # in the buffer
    outcome: bool | None  # ScoredGroup.has_signal; None if too few responses were graded to know it


@dataclass(frozen=True)
class Verdict:
    """The rewards and advantages of a group; every array is `[G]` float32.

    A response that the grader failed on is listed in `errors`, with reward 0 and advantage 0. The group's mean
    and standard deviation exclude it, so it contributes nothing to the gradient. A response that made its own
    grading impossible is listed in `ungradable`; it has the reward of a wrong one, and takes part.

    Example: with a G of 2, rewards [1, 0], format rewards [1, 1], answer rewards [1, 0], advantages [0.7, -0.7]
    """

    rewards: np.ndarray
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    advantages: np.ndarray
    errors: Mapping[int, str] = field(default_factory=dict)  # by sample: the reason that it could not be graded
    ungradable: Mapping[int, str] = field(default_factory=dict)  # by sample: the reason that it counts as wrong
    turn_advantages: tuple[np.ndarray, ...] = ()  # of episodes with rewards per turn: float32 `[turns]` of each
    overruns: frozenset[int] = frozenset()  # the ungradable ones that ended their grading; not kept on disk
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)  # by name, unweighted; NaN: did not apply
    facts: GroupFacts | None = None  # from the Scorer; not kept on disk

    def with_facts(self, rollout: RolloutGroup, metric: str, has_teacher: bool = False) -> "Verdict":
        """Return it with the facts about its group.

        Args:
            metric: `algorithm.dynamic_sampling_metric`.
            has_teacher: a Teacher's logprobs will come to the buffer with the group.
        """
        num_tokens = sum(len(completion.token_ids) for completion in rollout.completions)
        logprobs = np.zeros(num_tokens, np.float32) if has_teacher else None
        return replace(self, facts=ScoredGroup.of(rollout, self, logprobs).facts_for(metric))

    @property
    def is_graded(self) -> np.ndarray:
        """The responses that the grader did not fail on, bool `[G]`."""
        return np.array([sample not in self.errors for sample in range(len(self.rewards))], bool)


@dataclass(frozen=True, kw_only=True)
class ScoredGroup(Verdict):
    """A verdict with its group, and the logprobs of a Teacher if there is one."""

    rollout: RolloutGroup
    teacher_logprobs: np.ndarray | None = None  # float32 [group_tokens], completions end to end; context: 0

    @classmethod
    def of(
        cls, rollout: RolloutGroup, verdict: Verdict, teacher_logprobs: np.ndarray | None = None
    ) -> "ScoredGroup":
        scores = {**vars(verdict), "facts": None}  # of use only on the way to the buffer
        return cls(**scores, rollout=rollout, teacher_logprobs=teacher_logprobs)

    def facts_for(self, metric: str) -> GroupFacts:
        """Return the facts about the group, for a run with this `algorithm.dynamic_sampling_metric`."""
        return GroupFacts(self.rollout.oldest_version, self.varies_in(metric), self.num_bytes, self.outcome)

    @property
    def group_id(self) -> int:
        return self.rollout.item.group_id

    @property
    def outcome(self) -> bool | None:
        """`has_signal`, by which a curriculum goes; None if too few responses were graded to know it."""
        num_graded = self.is_graded.sum()
        is_known = num_graded > 1 or (num_graded == 1 and (self.has_signal or len(self.rewards) == 1))
        return self.has_signal if is_known else None

    @property
    def has_signal(self) -> bool:
        """True if any advantage is nonzero or there is a teacher; else only added terms, such as a KL, act."""
        return self.teacher_logprobs is not None or self.has_advantage

    @property
    def has_advantage(self) -> bool:
        """True if any advantage is nonzero."""
        return any(np.any(each != 0.0) for each in self.turn_advantages or (self.advantages,))

    def varies_in(self, metric: str) -> bool:
        """Return True if the group has the signal of `algorithm.dynamic_sampling_metric`."""
        if metric == "advantage":
            return self.has_signal
        values = self.rewards if metric == "reward" else self.answer_rewards
        return len(set(values[self.is_graded].tolist())) > 1

    @property
    def teacher_rows(self) -> list[np.ndarray | None]:
        """The Teacher's logprobs for each completion, `[response_tokens]`."""
        completions = self.rollout.completions
        if self.teacher_logprobs is None:
            return [None] * len(completions)
        bounds = accumulate(len(c.token_ids) for c in completions[:-1])
        return [*np.split(self.teacher_logprobs, list(bounds))]

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the group's arrays and texts."""
        item, completions = self.rollout.item, self.rollout.completions
        arrays = [self.rewards, self.format_rewards, self.answer_rewards, self.advantages]
        arrays += [getattr(c, name) for c in completions for name in PER_TOKEN if hasattr(c, name)]
        arrays += [] if self.teacher_logprobs is None else [self.teacher_logprobs]
        texts = [item.prompt, item.ground_truth, item.about, *(c.text for c in completions)]
        prompts = [item.prompt_token_ids]
        prompts += [s.prompt_token_ids for c in completions if isinstance(c, Episode) for s in c.sequences]
        return sum(a.nbytes for a in arrays) + sum(map(len, texts)) + INT_BYTES * sum(map(len, prompts))


@dataclass(frozen=True)
class PlayReport:
    """The facts about a group of episodes that the controller needs."""

    num_tokens: int  # sampled
    num_stuck: int  # threads of the worker that episodes left behind, because a call in them never returns


@dataclass(frozen=True)
class TrainBatch:
    """The groups of one Learner step: fresh groups in order, then replayed ones."""

    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True)
class Ungraded:
    """The answers of a batch or a validation that could not be graded; the first stands for all."""

    num_failed: int
    num_answers: int
    reason: str  # the first's: a line, and the function's traceback if there is one
    response: str  # the first's, its beginning
    is_of_episodes: bool = False

    @property
    def is_all(self) -> bool:
        return self.num_failed == self.num_answers

    @property
    def example(self) -> str:
        return f"{self.reason.rstrip()}\non the response {self.response!r}"

    def refusal(self, where: str) -> str:
        """Return why the run ends, if none of the answers `where` could be graded."""
        if self.is_of_episodes:
            return f"task.episode: every episode {where} failed: {self.example}"
        return (
            f"task.reward: none of the {self.num_answers} answers {where} could be graded, so nothing can be "
            f"learned from them: {self.example}"
        )


@dataclass(frozen=True)
class BatchFacts:
    """The facts about a batch that the controller needs, without its tokens."""

    metrics: dict[str, float]
    write_error: str | None = None  # the reason that rollouts of an earlier batch are not on disk yet
    ungraded: "Ungraded | None" = None  # among the fresh and dropped groups
    notes: tuple[str, ...] = ()  # on groups that could not be written as they were, since the last batch


@dataclass(frozen=True)
class StepReport:
    """The result of one Learner step."""

    version: int  # the Learner's version after the step
    metrics: dict[str, float]
    events: dict[str, str] = field(default_factory=dict)  # what the run should say, by the event's kind


@dataclass(frozen=True)
class SyncReport:
    """The result of one weight sync: the slowest Generator's seconds per phase, and the failed Generators."""

    version: int
    metrics: dict[str, float]
    failed: dict[int, str]  # each one's error, by the number of its process, which is excluded from now on


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
