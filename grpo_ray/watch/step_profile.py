"""`learner.profile_steps`: torch's profiler on some of the Learner's steps, with one trace per step."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_ray.records.run_files import step_name


class StepProfiler:
    """A profiler for a range of steps. Each trace is written before the next step, so memory holds one step."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        """Profile the steps from the first to the last, inclusive; None profiles nothing."""
        self._steps, self._folder = steps, folder
        self._trace: tuple[int, profile] | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the block as the step's work; if it succeeds there is a trace to write."""
        if self._folder is None or self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler, record_function(f"step {step}"):
            yield
        self._trace = step, profiler

    @property
    def has_trace(self) -> bool:
        """True if a trace has not been written yet."""
        return self._trace is not None

    def write(self) -> str | None:
        """Write the step's trace to `<folder>/step-000010.json.gz`; return why it could not be written."""
        assert self._trace is not None, "profile a step first"
        assert self._folder is not None
        (step, profiler), self._trace = self._trace, None
        path = self._folder / f"{step_name(step)}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # from gzip and from torch's writer
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"the profile of step {step} could not be written: {error}"
        return None
