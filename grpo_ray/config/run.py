"""The configuration of a run as a whole: its directory, validation, checkpoints, recovery, nodes, trackers."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from grpo_ray.config.secrets import SECRET_VALUE
from grpo_ray.config.section import GroupSize, HomePath, Name, PositiveSeconds, Seconds, Section, checked

DetectorName = Literal[
    "short_outputs", "wrong_mask", "mismatched_logprobs", "wrong_normalizer", "stale_old_logprobs",
    "satisfied_reward", "entropy_collapse", "large_lag", "narrow_clip", "reward_errors",
]  # fmt: skip
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Strategy = Literal["pack", "spread", "strict_spread", "colocate"]


class RunConfig(Section):
    name: Name | None = None
    """Name of the run directory under `output_dir`; default: the config file's name and the time."""
    output_dir: HomePath = "runs"
    """Folder that holds the run directories; on several machines, a folder they share."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the task, the prompt order, the engines and the tiny model."""
    save_rollouts: bool = True
    """Write every trained rollout to `rollouts/step-*.parquet`."""
    if_exists: Literal["refuse", "resume"] = "refuse"
    """Behaviour of `train` if the run directory exists; `resume` lets a resubmitted job continue."""
    silent_detectors: tuple[DetectorName, ...] = ()
    """Detectors of failures to silence; the page on failures describes each."""
    on_preemption_s: PositiveSeconds = 30.0
    """Seconds from SIGTERM to a written checkpoint; then the run abandons the work, and the last checkpoint
    counts. They must suffice for the rest of the step and a checkpoint (`timing/checkpoint/capture_s` and
    `write_s`; the run reports a first one that takes longer). A validation of the step before is skipped. Make
    the grace period of the SIGTERM's sender 60 s longer: that is when a hanging clean-up is ended."""


class EvaluationConfig(Section):
    every_num_steps: PositiveInt = 20
    """Validate before the first step, every N steps, and at the end."""
    samples_per_prompt: GroupSize = 1
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
    """Restarts of Generators, Scorers, Teachers and EnvironmentWorkers per hour, all together; beyond that the
    run ends with a checkpoint. Actors that die within half a minute of the first count once."""
    restart_backoff_s: Seconds = 1.0
    """Seconds before an actor is restarted or a failed group retried: doubled each time, up to a minute, and
    reset after ten minutes without a death."""
    max_restores: NonNegativeInt = 3
    """Times per hour that a run restores its last checkpoint after the Learner or the buffer died, and times in
    a row without a new step in between."""
    start_timeout_s: PositiveSeconds = 1800.0
    """Seconds for an actor to start: waiting for room on the cluster, loading the model, compiling."""
    group_timeout_s: PositiveSeconds = 1800.0
    """Seconds to sample one group once its engine has room for it; then it is aborted and retried."""
    max_group_retries: NonNegativeInt = 3
    """Retries per prompt after an error; then the prompt is set aside and reported at the end."""
    max_group_losses: NonNegativeInt = 2
    """Times that a group may be lost with its process while sampled alone; after one more, its prompt is set
    aside. A group is sampled alone after two losses alongside others."""
    stall_timeout_s: PositiveSeconds = 1800.0
    """Seconds without progress before the run reports what it is waiting for and replaces stuck actors. A
    Learner that is working through its micro-batches makes progress; a group that is retried does not."""
    max_skipped_updates: PositiveInt = 3
    """Consecutive steps without a finite update before the run ends, with the last good weights saved."""


class PlacementConfig(Section):
    """Nodes of the Generators, Learner and Scorer; one placement group holds everything they reserve."""

    strategy: Strategy = "pack"
    """`pack`: on few nodes. `spread`: on many. `strict_spread`: each on its own. `colocate`: all on one."""
    wait_s: Seconds = 0.0
    """Seconds to wait for missing resources, as for an autoscaler or another job; 0 refuses at once."""


def _repeated(names: tuple[str, ...]) -> str | None:
    return f"{', '.join(names)}: name each tracker once" if len(set(names)) < len(names) else None


def _password_in(uri: str | None) -> str | None:
    if uri is None or not SECRET_VALUE.search(uri):
        return None
    return (
        "the address contains a password, and the configuration is written to the run's folder; remove it, and "
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    )


class TrackingConfig(Section):
    """Destinations of metrics and tables in addition to the run directory."""

    trackers: Annotated[tuple[TrackerName, ...], checked(_repeated)] = ()
    """Trackers to use; each is an extra to install, such as `pip install "grpo_ray[wandb]"`."""
    project: Annotated[str, checked(lambda name: None if name.strip() else "give the project a name")] = (
        "grpo_ray"
    )
    """W&B project or MLflow experiment."""
    rollouts_per_table: PositiveInt = 16
    """Rows per table of rollouts or of validation responses."""
    rollouts_every_num_steps: NonNegativeInt = 10
    """Log a table of rollouts every N steps, read from the run's files; 0 logs none."""
    mlflow_uri: Annotated[str | None, checked(_password_in)] = None
    """MLflow server or folder; default: `MLFLOW_TRACKING_URI`, or the folder `mlruns` in `run.output_dir`."""
    close_timeout_s: PositiveSeconds = 20.0
    """Seconds to wait at the end of a run for unsent data."""
