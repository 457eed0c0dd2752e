"""The upload of a job's working directory: which files Ray takes, and what would not arrive."""

import os
from collections import Counter
from pathlib import Path

from grpo_ray.errors import RunError
from grpo_ray.tools.submit.ignore_list import uploaded_files
from grpo_ray.tools.submit.submission import Submission

LIMIT_BYTES = 100 * 2**20  # a head node's dashboard refuses larger requests


def check_upload(job: Submission) -> None:
    """Compare the files that Ray will upload with those that the job reads, and with Ray's limit.

    Raises:
        RunError: a file would not arrive, or the upload is too large.
    """
    folder = Path(job.runtime_env["working_dir"])
    sent = uploaded_files(folder, job.runtime_env["excludes"])
    for field, name in job.relative_files.items():
        path = Path(os.path.normpath(folder / name))
        read = [file for file in path.iterdir() if file.name[0] != "."] if path.is_dir() else [path]
        left = [file for file in read if file.is_file() and file not in sent]
        if left:
            raise RunError(
                f"{field}: {os.path.relpath(left[0], folder)} is not uploaded with the working directory: "
                "it is outside of it, or excluded by .gitignore, .rayignore or submit itself "
                "(docs/cluster.md); move it, or give an absolute path that the cluster sees"
            )
    total = sum(sent.values())
    if total > LIMIT_BYTES:
        sizes: Counter[str] = Counter()
        for file, size in sent.items():
            sizes[file.relative_to(folder).parts[0]] += size
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(3))
        raise RunError(
            f"{folder}: {_mib(total)} would be uploaded, and Ray takes {_mib(LIMIT_BYTES)}; the largest: "
            f"{largest}. List in a .rayignore what is to stay here, and name what the run reads of it by an "
            "absolute path that the cluster sees"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
