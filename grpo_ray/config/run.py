"""The configuration of a run as a whole: its directory, validation, checkpoints and recovery."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from grpo_ray.config.section import NonNegativeFloat, NonNegativeInt, Section


class RunConfig(Section):
    name: str | None = None
    """Name of the run directory under `output_dir`; default: the config file's name and the time."""
    output_dir: str = "runs"
    """Folder that holds the run directories; on several machines, a folder they share."""
    seed: NonNegativeInt = 0
    """Seed of the task, the prompt order, the engines and the tiny model."""
    save_rollouts: bool = True
    """Write every trained rollout to `rollouts/step-*.parquet`."""
    if_exists: Literal["refuse", "resume"] = "refuse"
    """Behaviour of `train` if the run directory exists; `resume` lets a resubmitted job continue."""
    on_preemption_s: PositiveFloat = 30.0
    """Seconds from SIGTERM to a written checkpoint and exit; work that takes longer is abandoned."""


class EvaluationConfig(Section):
    every_num_steps: PositiveInt = 20
    """Validate before the first step, every N steps, and at the end."""
    samples_per_prompt: PositiveInt = 1
    """Responses per validation prompt, sampled at the training temperature."""


class CheckpointConfig(Section):
    every_num_steps: PositiveInt = 20
    """Write a checkpoint every N steps, at the end, and when the run is interrupted."""
    keep: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation reward."""


class RecoveryConfig(Section):
    """Limits and timeouts for handling failures."""

    max_restarts: NonNegativeInt = 20
    """Restarts of Generators and Scorers per run, all together; beyond it the run ends with a checkpoint."""
    restart_backoff_s: NonNegativeFloat = 1.0
    """Seconds before an actor is restarted; doubled for each further restart within ten minutes."""
    max_restores: NonNegativeInt = 3
    """Times that a run restores its last checkpoint by itself (after the Learner or the buffer died)."""
    group_timeout_s: PositiveFloat = 1800.0
    """Seconds to sample one group; then it is aborted and its prompt retried."""
    max_group_retries: NonNegativeInt = 3
    """Retries per prompt; then it is set aside and reported at the end."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Seconds without progress before the run reports what it is waiting for and replaces stuck actors."""
    max_skipped_updates: PositiveInt = 3
    """Consecutive steps without a finite update that end the run with a checkpoint of the last good weights."""
