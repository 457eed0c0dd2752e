"""Random episodes with branches, and a slow reference for training on them: a loop over turns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from builders import ENDS, make_completion, make_group, make_item, rows_of
from episode_groups import make_episode as played
from episode_groups import play
from slow_objectives import slow_kl, slow_loss, slow_product, slow_total

from grpo_ray.config import Config
from grpo_ray.config.losses import RATIO_LOSSES
from grpo_ray.episodes.segments import Segments
from grpo_ray.types import Completion, Episode, ScoredGroup

VOCAB = 280


@dataclass
class Turn:
    """One call of the policy, with all that a loss needs of it."""

    prompt: list[int]
    reply: list[int]
    logprobs: list[float]
    advantage: float = 0.0
    sequence: int = 0  # of its episode's sequences, the one that trains it
    weights: list[float] | None = None  # factor of each token's loss
    penalties: list[float] | None = None  # of each token, times |log(pi / pi_old)|
    teacher: list[float] | None = None  # the teacher's logprobs


def make_episode(
    prompts_and_replies: Sequence[tuple[Sequence[int], Sequence[int]]], versions: int | Sequence[int] = 0
) -> Episode:
    """Make an episode of turns, with logprobs of -1; `versions` is one for all turns, or one each."""
    segments = Segments()
    for number, (prompt, reply) in enumerate(prompts_and_replies):
        version = versions if isinstance(versions, int) else versions[number]
        play(segments, prompt, reply, version)
    return played(segments)


def random_turns(rng: np.random.Generator, model: Any, config: Config, prompt: Sequence[int]) -> list[Turn]:
    """Play a conversation that goes on, strips thoughts, goes back to an earlier turn, or begins anew."""

    def some(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(20, VOCAB, rng.integers(low, high + 1))]

    turns: list[Turn] = []
    history: list[int] = list(prompt)
    for _ in range(rng.integers(1, 6)):
        if turns:
            way = rng.choice(["on", "on", "strip", "back", "anew"])
            last = turns[int(rng.integers(len(turns)))] if way == "back" else turns[-1]
            if way == "strip":  # the reply's first half was a thought, which the template removes
                history = last.prompt + last.reply[len(last.reply) // 2 + 1 :] + some(1, 4)
            elif way == "anew":
                history = list(prompt[: len(prompt) // 2]) + some(1, 5)
            else:
                history = last.prompt + last.reply + some(1, 4)
        reply = some(1, 5)
        if len(reply) > config.sampling.min_tokens:
            reply[-1] = int(rng.choice([reply[-1], ENDS[1]]))
        turns.append(Turn(history, reply, rng.normal(0, 0.3, len(reply)).tolist()))
    with torch.no_grad():
        found = rows_of_turns(model, config, turns).values()
    for turn, rows in zip(turns, found, strict=True):
        own = [row[token].item() for row, token in zip(rows, turn.reply, strict=True)]
        turn.logprobs = np.add(own, turn.logprobs).astype(np.float32).tolist()
    return turns


def rows_of_turns(model: Any, config: Config, turns: Sequence[Turn]) -> dict[int, list[torch.Tensor]]:
    """Return each turn's log-distributions, by the turn's `id`."""
    found = rows_of(model, [(turn.prompt, turn.reply) for turn in turns], *distribution(config))
    return dict(zip(map(id, turns), found, strict=True))


def distribution(config: Config) -> tuple[float, int, tuple[int, ...]]:
    return config.sampling.temperature, config.sampling.min_tokens, ENDS


def random_batch(
    seed: int, model: Any, config: Config, group_size: int = 3, num_groups: int = 3, versions: int = 0
) -> tuple[list[ScoredGroup], list[list[Turn]]]:
    """Make groups of episodes: with one advantage each, with one per turn, and plain completions.

    Also return the turns of each sample. A few tokens have no finite logprob.
    """
    rng = np.random.default_rng(seed)
    groups, samples = [], []
    for group_id in range(num_groups):
        prompt = [int(token) for token in rng.integers(20, VOCAB, rng.integers(2, 9))]
        played = [random_turns(rng, model, config, prompt) for _ in range(group_size)]
        rewards = rng.normal(0, 1, group_size).astype(np.float32).tolist()
        for turns in played[:1]:
            turns[0].logprobs[0] = rng.choice([math.nan, -math.inf, turns[0].logprobs[0]])
        is_plain, has_turn_advantages = group_id % 3 == 2, group_id % 3 == 1
        of_turns = tuple(rng.normal(0, 1, len(turns)).astype(np.float32) for turns in played)
        if is_plain:
            played = [turns[:1] for turns in played]
            completions = [make_completion(t.reply, t.logprobs, versions) for (t,) in played]
        else:
            completions = [_joined(turns, versions) for turns in played]
        for turns, reward, of_own in zip(played, rewards, of_turns, strict=True):
            for number, turn in enumerate(turns):
                turn.advantage = float(of_own[number]) if has_turn_advantages else reward
        group = make_group(make_item(group_id, prompt), completions, rewards)
        groups.append(replace(group, turn_advantages=of_turns if has_turn_advantages else ()))
        samples += played
    return groups, samples


def teach(groups: Sequence[ScoredGroup], samples: Sequence[Sequence[Turn]], seed: int) -> list[ScoredGroup]:
    """Give each sampled token a random logprob of a teacher, which rules a few out."""
    rng = np.random.default_rng(seed)
    for turns in samples:
        for turn in turns:
            drawn = rng.choice([-0.5, -2.0, -4.0, -np.inf], len(turn.reply), p=[0.4, 0.3, 0.2, 0.1])
            turn.teacher = drawn.tolist()
    places, taught = iter(samples), []
    for group in groups:
        rows = []
        for completion in group.rollout.completions:
            row, turns = np.zeros(len(completion.token_ids), np.float32), next(places)
            row[completion.mask] = np.concatenate([_in_order(turns, completion)])
            rows.append(row)
        taught.append(replace(group, teacher_logprobs=np.concatenate(rows)))
    return taught


def _in_order(turns: Sequence[Turn], completion: Completion) -> list[float]:
    """Return the teacher's logprobs of a sample in the order of the completion's sampled tokens."""
    if not isinstance(completion, Episode):
        return turns[0].teacher or []
    order = dict.fromkeys(completion.turns[completion.mask].tolist())  # a turn's tokens stand together
    return [logprob for turn in order for logprob in turns[turn].teacher or []]


def _joined(turns: Sequence[Turn], versions: int) -> Episode:
    """Return the turns as an episode; note in each which sequence trains it."""
    segments = Segments()
    for turn in turns:
        play(segments, turn.prompt, turn.reply, versions, turn.logprobs)
    episode = played(segments)
    for number, sequence in enumerate(episode.sequences):
        for turn in set(episode.turns[sequence.start : sequence.end].tolist()) - {-1}:
            turns[turn].sequence = number
    return episode


def slow_gradient(
    model: torch.nn.Module, config: Config, samples: Sequence[Sequence[Turn]], reference: Any = None,
    first: Any = None, groups: Sequence[int] | None = None,
) -> tuple[float, torch.Tensor, int]:  # fmt: skip
    """Compute loss and gradient of an update by one row per turn, and the number of clipped tokens.

    Args:
        first: the policy before the batch's first update; None: this is that update.
        groups: the group of each sample; None: groups are whole.
    """
    algorithm = config.algorithm
    played = [turn for turns in samples for turn in turns]
    rows = Rows(rows_of_turns(model, config, played))
    with torch.no_grad():
        rows.first = rows_of_turns(first, config, played) if first is not None else rows.policy
        rows.reference = rows_of_turns(reference, config, played) if reference is not None else {}
    per_sample = [slow_losses(config, turns, rows) for turns in samples]
    groups = groups or [place // algorithm.samples_per_prompt for place in range(len(samples))]
    total = slow_total(algorithm, per_sample, groups, config.sampling.max_tokens)
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return total.item(), torch.cat([gradient.flatten() for gradient in gradients]), rows.num_clipped


@dataclass
class Rows:
    """The log-distributions of each turn, by its `id`, under each policy that a loss compares."""

    policy: Mapping[int, Sequence[torch.Tensor]]
    first: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    reference: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    num_clipped: int = 0  # tokens so far


def slow_losses(config: Config, turns: Sequence[Turn], rows: Rows) -> list[torch.Tensor]:
    """Compute the losses of a sample's tokens, those of a ratio loss only with a finite old logprob."""
    losses = []
    for number in sorted({turn.sequence for turn in turns}):
        losses += _losses_of_sequence(config, [turn for turn in turns if turn.sequence == number], rows)
    return losses


def _losses_of_sequence(config: Config, turns: Sequence[Turn], all_rows: Rows) -> list[Any]:
    algorithm = config.algorithm
    rows, new, first, behaviour, advantages, of_reference = [], [], [], [], [], []
    factors: list[float] = []
    penalties: list[float] = []
    teacher: list[float] = []
    for turn in turns:
        rows += all_rows.policy[id(turn)]
        new += _log_probs(all_rows.policy, turn)
        first += [value.item() for value in _log_probs(all_rows.first, turn)]
        of_reference += _log_probs(all_rows.reference, turn) if all_rows.reference else []
        behaviour += turn.logprobs
        given = 0.0 if turn.teacher and not config.distillation.use_reward else turn.advantage
        advantages += [given] * len(turn.reply)
        factors += turn.weights or [1.0] * len(turn.reply)
        penalties += turn.penalties or [0.0] * len(turn.reply)
        teacher += turn.teacher or []
    for t, taught in enumerate(teacher):
        bound = config.distillation.max_gap
        gap = min(max(taught - first[t], -bound), bound)
        advantages[t] += config.distillation.coefficient * gap
    old = first if algorithm.old_log_probs == "proximal" else behaviour
    has_ratio = algorithm.loss in RATIO_LOSSES or (all_rows.reference and algorithm.kl.estimator == "unbiased")
    kept = [t for t in range(len(new)) if not has_ratio or math.isfinite(old[t])]
    logs = [a - b if math.isfinite(b) else None for a, b in zip(first, behaviour, strict=True)]
    drift = [b - a.item() if math.isfinite(b) else None for a, b in zip(new, behaviour, strict=True)]
    weights = slow_product(algorithm, logs, advantages, drift)
    of_loss, num_clipped = slow_loss(algorithm, new, old, advantages, kept)
    all_rows.num_clipped += num_clipped
    losses = []
    for t in kept:
        loss = factors[t] * weights[t] * of_loss[t]
        if penalties[t]:
            loss = loss + penalties[t] * abs(new[t] - old[t])
        if of_reference:
            kl = slow_kl(algorithm.kl.estimator, new[t], of_reference[t].item(), old[t])
            loss = loss + algorithm.kl.coefficient * kl
        possible = rows[t][rows[t].isfinite()]
        losses.append(loss + algorithm.entropy_bonus * (possible.exp() * possible).sum())
    return losses


def _log_probs(rows: Mapping[int, Sequence[torch.Tensor]], turn: Turn) -> list[torch.Tensor]:
    return [row[token] for row, token in zip(rows[id(turn)], turn.reply, strict=True)]
