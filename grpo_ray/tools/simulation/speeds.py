"""The speeds of simulated actors, and the lengths of simulated responses."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from grpo_ray.config.section import NonNegativeFloat, Section
from grpo_ray.records.rollout_log import damage_named
from grpo_ray.records.run_files import RunDirectory, files_by_step

DAMAGED = "not readable as Parquet ({}); remove it to leave its step out"
MAX_RECORDED = 1_000_000  # lengths; the last steps of a longer run


class Speeds(Section):
    """The speeds of every simulated actor, in seconds; a file `--speeds` replaces some of them.

    The defaults are round numbers for 7 billion parameters and one GPU per engine. They were not measured: take
    them from your own run before you rely on a figure.
    """

    decode_s: PositiveFloat = 0.012
    """Seconds of an engine for one token of every running sequence, without what each sequence adds."""
    decode_sequence_s: NonNegativeFloat = 3e-5
    """More seconds per running sequence."""
    prefill_token_s: NonNegativeFloat = 2e-5
    """Seconds per prompt token, while the engine's other sequences wait. A group's prompt counts once."""
    prompt_tokens: PositiveInt = 256
    """Length of every prompt."""
    start_s: NonNegativeFloat = 60.0
    """Seconds until an engine or the Learner is up."""
    stage_s: NonNegativeFloat = 3.0
    """Seconds of a sync in which a Generator receives weights while it samples."""
    load_s: NonNegativeFloat = 1.0
    """Seconds of a sync in which it is paused."""
    move_s: NonNegativeFloat = 5.0
    """Seconds to leave a device to a colocated actor, or to take it back."""
    score_s: NonNegativeFloat = 0.1
    """Seconds to grade a group."""
    teacher_s: NonNegativeFloat = 1.0
    """Seconds of a Teacher for a group, one group at a time."""
    episode_turns: PositiveFloat = 4.0
    """Mean replies per episode before its limits, at least 1 (nearly geometric)."""
    environment_s: NonNegativeFloat = 1.0
    """Mean seconds of an environment between two replies (exponential)."""
    answer_tokens: NonNegativeInt = 64
    """Tokens of an environment's answer to a reply."""
    train_s: NonNegativeFloat = 2.0
    """Seconds of a Learner's step that do not depend on its tokens."""
    train_token_s: NonNegativeFloat = 1e-5
    """More seconds per response token."""
    snapshot_s: NonNegativeFloat = 1.0
    """Seconds in which the Learner copies its weights, or its state for a checkpoint."""
    generator_life_s: PositiveFloat | None = None
    """Mean seconds until an engine dies (exponential); null: it never does."""
    environment_life_s: PositiveFloat | None = None
    """The same for an EnvironmentWorker."""
    learner_life_s: PositiveFloat | None = None
    """The same for the Learner, after which the run restores its last checkpoint."""

    def token_s(self, num_sequences: int) -> float:
        """Return the seconds for the next token of each of `num_sequences` running sequences."""
        return self.decode_s + self.decode_sequence_s * num_sequences


def read_speeds(path: str | None) -> Speeds:
    """Return the defaults, with the values of a JSON file in place of some.

    Raises:
        ValueError: names the file and the field.
    """
    if path is None:
        return Speeds()
    try:
        return Speeds.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])) or 'its text'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"--speeds {path}: {'; '.join(problems)}") from None


Lengths = Callable[[np.random.Generator, int], np.ndarray]
"""Draws a number of response lengths in tokens, int64, of at least 1; the engine cuts long ones off."""


def lognormal(mean: float, sigma: float) -> Lengths:
    """Return lengths with a heavy tail: their logarithm is normal.

    Args:
        mean: of the lengths, in tokens.
        sigma: standard deviation of their natural logarithm; 0 makes all the same.
    """

    def draw(rng: np.random.Generator, num_samples: int) -> np.ndarray:
        drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, num_samples)
        return np.rint(np.clip(drawn, 1, 2**31)).astype(np.int64)

    return draw


def recorded(lengths: np.ndarray) -> Lengths:
    """Return the lengths of a real run's responses, drawn with replacement."""
    return lambda rng, num_samples: rng.choice(lengths, num_samples)


def read_lengths(path: str) -> np.ndarray:
    """Return the lengths of all responses of a run, newest first up to `MAX_RECORDED`.

    Raises:
        ValueError: the folder holds no rollouts, or one of its files is damaged.
    """
    found: list[np.ndarray] = []
    for file in reversed(files_by_step(RunDirectory(path).rollouts).values()):
        if sum(map(len, found)) < MAX_RECORDED:
            with damage_named(file, DAMAGED):
                column = pq.read_table(file, columns=["num_tokens"])["num_tokens"]
            found.append(column.to_numpy().astype(np.int64))
    if not any(map(len, found)):
        raise ValueError(f"--recorded {path}: there are no rollouts in it; give a run with run.save_rollouts")
    lengths: np.ndarray = np.maximum(1, np.concatenate(found)[:MAX_RECORDED])
    return lengths
