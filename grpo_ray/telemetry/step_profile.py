"""`learner.profile_steps`: torch's profiler over some of the Learner's steps, a trace for each."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_ray.telemetry.run_files import step_name


class StepProfiler:
    """A trace is written, and forgotten, before the next step: memory holds one step's events."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        """Profile from the first step to the last, both included; None profiles nothing."""
        self._steps, self._folder = steps, folder
        self._trace: tuple[int, profile] | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the step's work; without an error it leaves a trace to be written."""
        if self._folder is None or self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler, record_function(f"step {step}"):
            yield
        self._trace = step, profiler

    @property
    def has_trace(self) -> bool:
        return self._trace is not None

    def write(self) -> str | None:
        """Write the step's trace to `<folder>/step-000010.json.gz`; returns why it could not be written."""
        assert self._trace is not None, "profile a step first"
        assert self._folder is not None
        (step, profiler), self._trace = self._trace, None
        path = self._folder / f"{step_name(step)}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # of gzip, and of torch's own writer
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"the profile of step {step} could not be written: {error}"
        return None
