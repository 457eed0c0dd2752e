"""The confinement of environment code: what a tool may read and write on its node.

Replies of a model decide what tools do, so an EnvironmentWorker holds its episodes to what graders may read, to
one folder for writing, and to a limit of memory. Unlike a grader it keeps the network: environments are often
servers. Landlock and capabilities belong to threads, so Ray's own threads go on as before.
"""

import os
import resource
import tempfile
from pathlib import Path

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.records.run_lock import make_locked
from grpo_ray.rewards.isolation.confinement import drop_capabilities
from grpo_ray.rewards.isolation.landlock import Ruleset, landlock_version
from grpo_ray.rewards.isolation.readable import check_exist
from grpo_ray.rewards.isolation.system_calls import forgo_privileges

HINT = (
    "\n(the worker is confined: allow paths with episodes.readable_paths and episodes.writable_paths, or set "
    "episodes.confined to false)"
)
NO_MEMORY_HINT = "\n(memory beyond episodes.memory_gib is refused)"
SCRATCH = "grpo-ray-scratch-"


def confine(settings: EpisodesConfig, scratch: str) -> None:
    """Limit this process's memory, and confine this thread and all that it starts, for good.

    Nothing of the process in /proc can be opened, which has its memory, nor anything in /dev/shm, where the
    semaphores and the shared memory of other processes are.

    Args:
        scratch: the folder of `make_scratch`.

    Raises:
        ValueError: a path of the settings does not exist on this node.
        OSError: the kernel refuses.
    """
    check_paths(settings)
    # Private memory beyond the present; Ray's shared memory is not counted.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + int(settings.memory_gib * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    version = landlock_version()
    if version:
        rules = Ruleset(settings.readable_paths, version, is_offline=False)
        for folder in (scratch, *settings.writable_paths):
            rules.allow(folder, rules.all_rights)
        rules.enter()
    else:
        forgo_privileges()
    drop_capabilities()


def make_scratch() -> str:
    """Make a temporary folder, locked as long as this process lives, and remove those without a lock."""
    folder, _ = make_locked(SCRATCH, tempfile.gettempdir())  # never closed: the lock would end
    return folder


def check_paths(config: EpisodesConfig) -> None:
    """Refuse paths that do not exist.

    Raises:
        ValueError: names the field and the path.
    """
    for field in ("readable_paths", "writable_paths"):
        check_exist(getattr(config, field), f"episodes.{field}")


def hint_for(error: BaseException) -> str:
    """Return what helps against an error that confinement may have caused."""
    if isinstance(error, MemoryError):
        return NO_MEMORY_HINT
    return HINT if isinstance(error, PermissionError) else ""
