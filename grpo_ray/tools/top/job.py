"""A job on a Ray cluster, and the folder of its run: the job API's part of `grpo-ray top`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_ray.errors import RunError
from grpo_ray.tools.submit.submission import RUN_KEY, SubmissionContext


class Jobs(Protocol):
    """As `job_client.JobClient`."""

    def status(self, job_id: str) -> str: ...
    def metadata(self, job_id: str) -> dict[str, str]: ...


@dataclass(frozen=True)
class Job:
    """A submitted job. `run` is its run's folder, which need not exist yet."""

    name: str
    run: Path
    jobs: Jobs

    def status(self) -> str:
        """As Ray has it, such as RUNNING; that it does not answer is no reason to stop watching the run."""
        try:
            return self.jobs.status(self.name)
        except RunError:
            return "unknown, Ray does not answer"


def find_job(name: str, address: str | None) -> Job:
    """Ask the cluster for a job; without an address, the one that RAY_ADDRESS names, or one on this machine.

    Raises:
        RunError: no cluster answers, it has no such job, or the job does not say where its run is.
    """
    from grpo_ray.tools.submit.job_client import JobClient, check_token, job_address

    try:
        where = SubmissionContext(job_address(address), Path.cwd())
        check_token(where)
        return job_of(JobClient(where.address), name)
    except RunError as error:
        raise RunError(
            f"{name} is no folder here, and was looked for among a cluster's jobs: {error}"
        ) from error


def job_of(jobs: Jobs, name: str) -> Job:
    """Raises RunError: there is no such job, or it does not say where its run is."""
    metadata = jobs.metadata(name)
    if RUN_KEY not in metadata:
        raise RunError(
            f"job {name} does not say where its run is (`grpo-ray submit` would have); give the run's folder"
        )
    return Job(name, Path(metadata[RUN_KEY]), jobs)
