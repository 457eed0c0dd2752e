"""A few rollouts for people to read."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ray.errors import counted
from grpo_ray.records.episode_metrics import episode_facts
from grpo_ray.types import Completion, Episode, ScoredGroup

MAX_CHARACTERS = 4000


def readable_rollouts(groups: Sequence[ScoredGroup], num_rollouts: int) -> list[dict[str, Any]]:
    """Return first completions of prompts spread evenly over the set: the same prompts at every validation."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    num_rollouts = min(num_rollouts, len(ordered))
    chosen = [ordered[index * len(ordered) // num_rollouts] for index in range(num_rollouts)]
    return [
        {
            "prompt": group.rollout.item.prompt,
            "response": readable_response(group.rollout.completions[0]),
            "ground_truth": group.rollout.item.ground_truth,
            "reward": float(group.rewards[0]),
            "error": group.errors.get(0),  # why it could not be graded
        }
        for group in chosen
    ]


def readable_response(completion: Completion) -> str:
    """Return the text of a completion; of an episode its last line says how it went: `(1 turn, finished)`."""
    if not isinstance(completion, Episode):
        return completion.text
    facts = episode_facts(completion)
    parts = [counted(facts["num_turns"], "turn"), completion.status]
    if facts["num_branches"]:
        parts.insert(1, counted(facts["num_branches"], "branch", "es"))
    lines = [line for line in completion.error.splitlines() if line.strip()]
    ending = ", ".join(parts) + (f": {lines[-1].strip()}" if lines else "")
    return f"{completion.text}\n({ending})".lstrip()


def readable_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table with its texts shortened."""
    return {name: shortened(value) if isinstance(value, str) else value for name, value in row.items()}


def shortened(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the text, cut at `max_characters` with a note of how much is missing."""
    num_cut = len(text) - max_characters
    return text if num_cut <= 0 else f"{text[:max_characters]}… ({num_cut:,} more characters)"
