"""The audit of recorded episodes: random valid ones have no problem, and each planted fault is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_groups import branched_episode, make_episode, make_episode_group, play, random_episode_group
from small_run import QUICKSTART

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.segments import Segments
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.tools.audit.rollouts import Regrader, RolloutFacts, RolloutRows, audit_evaluation, audit_step
from grpo_ray.types import CONTEXT, Episode, ScoredGroup
from grpo_ray.watch.batch_metrics import rollout_metrics

STEP = 4  # trains on version 3
SIZE = 4
Row = dict[str, Any]
Change = Callable[[list[Row]], object]


def make_config(*changes: str) -> Config:
    own = ["algorithm.prompts_per_step=2", f"algorithm.samples_per_prompt={SIZE}", "episodes.turn_discount=0.5"]
    return load_config(QUICKSTART, [*own, f"evaluation.samples_per_prompt={SIZE}", *changes])


@pytest.fixture(scope="module")
def grader() -> Regrader:
    return Regrader([make_config()], run_reward_code=False)


def audited(
    path: Path, groups: list[ScoredGroup], grader: Regrader, *overrides: str,
    change: Change = lambda rows: None, lag: float | None = None,
) -> RolloutFacts:  # fmt: skip
    """Audit the step of these groups as written, after `change` was made to its rows."""
    write_rollouts(path / "step.parquet", STEP, groups)
    rows = read_rollouts(path / "step.parquet")
    sampled = np.concatenate([c.versions[c.mask] for group in groups for c in group.rollout.completions])
    lag = float(STEP - 1 - sampled.min(initial=STEP - 1)) if lag is None else lag
    completions = [c for group in groups for c in group.rollout.completions if isinstance(c, Episode)]
    num_masked = sum(np.count_nonzero(~c.mask & (c.turns != CONTEXT)) for c in completions)
    metrics = {"step": STEP, "lag/max": lag, "lag/masked_tokens": num_masked, **rollout_metrics(groups)}
    change(rows)
    return audit_step(RolloutRows("step.parquet", rows), metrics, [make_config(*overrides)], grader)


def branched_groups() -> list[ScoredGroup]:
    """Make two groups of four episodes with rewards per turn, with a branch each, except for the last."""
    rng = np.random.default_rng(0)
    groups = []
    for group_id in range(2):
        rewards = rng.normal(size=(SIZE - 1, 3)).tolist()
        episodes = [branched_episode((2, 3, 3), reward=float(sum(own)), turn_rewards=own) for own in rewards]
        broken = make_episode(Segments(), None, status="environment_error", error="boom")
        groups.append(make_episode_group(group_id, [*episodes, broken], discount=0.5))
    return groups


@pytest.mark.parametrize("seed", range(24))
def test_random_episodes_have_no_problem(tmp_path: Path, grader: Regrader, seed: int) -> None:
    rng = np.random.default_rng(seed)
    discount, vocabulary = 0.5 if seed % 2 else None, (3, 40)[seed % 3 > 0]
    options = {"version": 3, "max_lag": 1, "vocabulary": vocabulary}
    groups = [random_episode_group(rng, number, SIZE, discount, **options) for number in range(2)]
    assert audited(tmp_path, groups, grader).problems == []


def test_branched_episodes_have_problems_with_another_discount_or_lag(tmp_path: Path, grader: Regrader) -> None:
    facts = audited(tmp_path, branched_groups(), grader)
    assert (facts.problems, facts.notes) == ([], [])
    assert (facts.trained, facts.num_errors, facts.num_completions) == ([0, 1], 2, 8)
    found = audited(tmp_path, branched_groups(), grader, "episodes.turn_discount=1.0").problems
    assert len(found) == 6
    assert all("turn_advantages are" in problem for problem in found)
    problems = audited(tmp_path, branched_groups(), grader, lag=0.0).problems
    assert problems == ["step.parquet: lag/max is recorded as 0.0, its responses give 1"]


def set_row(**values: Any) -> Change:
    return lambda rows: rows[1].update(values)


def at(column: str, place: int | slice, value: Any) -> Change:
    """Change an element, or a slice, of a list of the second row."""
    return lambda rows: rows[1][column].__setitem__(place, value)


def in_span(column: str, place: int, **values: Any) -> Change:
    return lambda rows: rows[1][column][place].update(values)


def set_turns(*turns: int) -> Change:
    return lambda rows: [span.update(turn=turn) for span, turn in zip(rows[1]["turns"], turns, strict=True)]


def split(rows: list[Row]) -> None:
    """Write the first sequence, of turns 0 and 1, as two."""
    first, second = rows[1]["sequences"]
    prompt = [*first["prompt_token_ids"], *rows[1]["token_ids"][:4]]
    rows[1]["sequences"] = [{**first, "end": 4}, {"prompt_token_ids": prompt, "start": 4, "end": 6}, second]
    rows[1]["num_branches"] = 2


def split_whole(rows: list[Row]) -> None:
    """Write turn 1 as a branch that continues turn 0 to its end, without context between them."""
    rows[1].update(
        token_ids=[3, 4, 6, 7, 5], logprobs=[-1.0] * 5, num_context_tokens=0,
        versions=[{"version": 2, "start": 0, "end": 2}, {"version": 3, "start": 2, "end": 5}],
        turns=[{"turn": turn, "start": 2 * turn, "end": min(5, 2 * turn + 2)} for turn in range(3)],
        sequences=[
            {"prompt_token_ids": [1, 2], "start": 0, "end": 2},
            {"prompt_token_ids": [1, 2, 3, 4, 9, 9], "start": 2, "end": 4},
            {"prompt_token_ids": [1, 2, 8], "start": 4, "end": 5},
        ],
        num_branches=2,
    )  # fmt: skip


# The second row: prompt 1 2 | 3 4 (turn 0) | 9 9 | 6 7 (turn 1), and prompt 1 2 3 4 8 | 5 (turn 2).
FAULTS: dict[str, tuple[Change, str]] = {
    "a token without a version": (in_span("versions", 2, version=-1), "token 4 of turn 1 has version -1"),
    "context with a version": (in_span("versions", 1, version=3), "token 2 is context, but has version 3"),
    "no number as a logprob": (at("logprobs", 5, np.nan), "token 5 of turn 1 has logprob nan"),
    "context with a logprob": (at("logprobs", 3, -0.5), "token 3 is context, but has logprob -0.5"),
    "a logprob is lost": (lambda rows: rows[1]["logprobs"].pop(), "do not cover its tokens"),
    "a gap in the versions": (in_span("versions", 1, start=3), "do not cover its tokens"),
    "a gap in the turns": (in_span("turns", 2, turn=5), "its turns are [0, 2, 5]"),
    "a turn twice": (in_span("turns", 2, turn=0), "turns [0] have tokens at several places"),
    "a turn in two sequences": (in_span("turns", 3, turn=1), "sequence 1: turns [1] are in an earlier one too"),
    "falling versions in a turn": (
        at("versions", slice(1), [{"version": v, "start": n, "end": n + 1} for n, v in enumerate((3, 2))]),
        "the versions of turn 0 are [3, 2]",
    ),
    "a token of the past": (in_span("versions", 0, version=1), "is 2 versions old; weight_sync.max_lag is 1"),
    "a token of the future": (in_span("versions", 2, version=7), "is of version 7, which did not exist yet"),
    "a token in two sequences": (in_span("sequences", 1, start=5), "do not have each token once"),
    "a sequence is lost": (lambda rows: rows[1]["sequences"].pop(), "do not have each token once"),
    "a sequence without a prompt": (in_span("sequences", 0, prompt_token_ids=[]), "0: it has no prompt"),
    "context at an end": (split, "sequence 0: it begins or ends with context"),
    "a branch that is none": (split_whole, "sequence 1: it continues sequence 0 to its end"),
    "turns that run backwards": (set_turns(1, CONTEXT, 0, 2), "sequence 0: its turns are in the order [1, 0]"),
    "sequences that run backwards": (
        set_turns(0, CONTEXT, 2, 1), "sequence 1: its last turn is before that of the sequence before it",
    ),
    "num_tokens with context": (set_row(num_tokens=7), "num_tokens is recorded as 7, its tokens give 5"),
    "num_context_tokens": (set_row(num_context_tokens=0), "num_context_tokens is recorded as 0"),
    "num_turns": (set_row(num_turns=2), "num_turns is recorded as 2, its tokens give 3"),
    "num_branches": (set_row(num_branches=0), "num_branches is recorded as 0"),
    "min_version of context": (set_row(min_version=-1), "min_version is recorded as -1, its tokens give 2"),
    "max_version": (set_row(max_version=2), "max_version is recorded as 2"),
    "another time": (set_row(seconds=99.0), "episodes/seconds/max is recorded as"),
    "an unknown status": (set_row(status="done"), "unknown status, 'done'"),
    "an error with a reward": (set_row(status="environment_error"), "it ended as environment_error, with"),
    "an end without a reward": (set_row(episode_reward=None), "it ended as finished, with reward None"),
    "too few turn_rewards": (lambda rows: rows[1]["turn_rewards"].pop(), "2 turn_rewards for 3 turns"),
    "an infinite turn reward": (at("turn_rewards", 0, np.inf), "are not finite"),
    "another reward": (set_row(reward=0.125), "reward, format_reward and answer_reward are recorded as (0.125"),
    "an error that is none": (set_row(error="boom"), "its error is recorded as 'boom'"),
    "another advantage": (set_row(advantage=0.25), "advantages ["),
    "another turn advantage": (at("turn_advantages", 2, 0.25), "episode 1: turn_advantages are ["),
    "no turn advantages": (set_row(turn_advantages=None), "episode 1: turn_advantages are None"),
    "too many turn advantages": (lambda rows: rows[1]["turn_advantages"].append(0.0), "turn_advantages are ["),
    "a response among episodes": (set_row(status=None), "only some of its completions are episodes"),
    "an episode is lost": (lambda rows: rows.pop(1), "has completions [0, 2, 3] instead of 4"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(tmp_path: Path, grader: Regrader, change: Change, message: str) -> None:
    problems = audited(tmp_path, branched_groups(), grader, change=change).problems
    assert any(message in problem for problem in problems), problems


def test_an_error_may_have_the_configured_reward(tmp_path: Path, grader: Regrader) -> None:
    error = make_episode(Segments(), -0.5, status="environment_error", error="boom")
    won, lost = (branched_episode((2, 3, 3), reward=reward) for reward in (1.0, 0.0))
    groups = [make_episode_group(group_id, [won, lost, error, error]) for group_id in range(2)]
    assert audited(tmp_path, groups, grader, "episodes.error_reward=-0.5").problems == []
    for changes in ((), ("episodes.error_reward=-1.0",)):
        found = audited(tmp_path, groups, grader, *changes).problems
        assert any("it ended as environment_error, with reward -0.5" in problem for problem in found)


def test_two_turns_with_the_same_tokens_are_no_fault(tmp_path: Path, grader: Regrader) -> None:
    """Both replies to a prompt are alike, and two branches continue one of them."""
    segments = Segments()
    for prompt, reply in (([1], [2]), ([1], [2]), ([1, 2, 5], [6]), ([1, 2, 7], [8])):
        play(segments, prompt, reply, 3)
    episode = make_episode(segments, 1.0)
    assert [s.prompt_token_ids for s in episode.sequences] == [(1,), (1,), (1, 2, 7)]
    groups = [make_episode_group(number, [episode] * SIZE) for number in range(2)]
    assert audited(tmp_path, groups, grader).problems == []
    # An unrelated conversation is a note.
    segments = Segments()
    play(segments, [1, 2], [3], 3)
    play(segments, [7, 2], [4], 3)  # as an agent's helper with a system prompt of its own
    groups = [make_episode_group(number, [make_episode(segments, 1.0)] * SIZE) for number in range(2)]
    facts = audited(tmp_path, groups, grader)
    assert facts.problems == []
    assert facts.notes == ["step.parquet: 8 sequences begin with no token of their episode's earlier ones"]


def test_a_validation_of_episodes(tmp_path: Path, grader: Regrader) -> None:
    def problems_of(*versions: int) -> list[str]:
        episode = branched_episode(versions, reward=1.0)
        nothing = make_episode(Segments(), None, status="truncated_time")
        group = make_episode_group(0, [episode, nothing, episode, episode])
        write_rollouts(tmp_path / "step.parquet", 3, [group])
        rows = RolloutRows("step.parquet", read_rollouts(tmp_path / "step.parquet"))
        summary = {"step": 3, "reward": 0.75, "num_examples": 1}
        return audit_evaluation(rows, summary, {"reward": 0.75}, make_config(), grader).problems

    assert problems_of(3, 3, 3) == []
    assert problems_of(3, 2, 3) == ["step.parquet: sampled by versions [2, 3], not only by 3"]
