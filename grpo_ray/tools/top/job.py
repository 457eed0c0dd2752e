"""A submitted job on a Ray cluster and the folder of its run, for `grpo-ray top`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_ray.errors import RunError
from grpo_ray.tools.submit.submission import RUN_KEY, SubmissionContext


class Jobs(Protocol):
    """The part of `job_client.JobClient` that is needed here."""

    def status(self, job_id: str) -> str: ...
    def metadata(self, job_id: str) -> dict[str, str]: ...


@dataclass(frozen=True)
class Job:
    """A submitted job; `run` is its run's folder, which may not exist yet."""

    name: str
    run: Path
    jobs: Jobs

    def status(self) -> str:
        """Return Ray's status, such as RUNNING; a cluster that does not answer must not end the watch."""
        try:
            return self.jobs.status(self.name)
        except RunError:
            return "unknown: Ray does not answer"


def find_job(name: str, address: str | None) -> Job:
    """Find a job on the cluster at `address`; None: the one in RAY_ADDRESS, or the one on this machine.

    Raises:
        RunError: no cluster answers, it has no such job, or the job does not name its run's folder.
    """
    from grpo_ray.tools.submit.job_client import JobClient, check_token, job_address

    try:
        where = SubmissionContext(job_address(address), Path.cwd())
        check_token(where)
        return job_of(JobClient(where.address), name)
    except RunError as error:
        raise RunError(
            f"{name} is not a folder here, and was not found among a cluster's jobs: {error}"
        ) from error


def job_of(jobs: Jobs, name: str) -> Job:
    """Return the job of that name.

    Raises:
        RunError: there is no such job, or it does not name its run's folder.
    """
    metadata = jobs.metadata(name)
    if RUN_KEY not in metadata:
        raise RunError(
            f"job {name} does not name its run's folder (`grpo-ray submit` would have); give the folder instead"
        )
    return Job(name, Path(metadata[RUN_KEY]), jobs)
