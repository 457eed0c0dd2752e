"""Console output of a run: a banner, one line per step, validations, warnings, and a bar on a terminal."""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grpo_ray.config import Config
from grpo_ray.errors import counted
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.visible_text import visible
from grpo_ray.watch.metrics_catalog import SYNC
from grpo_ray.watch.run_log import Metrics


class VisibleConsole(Console):
    """A console on which no text acts on the terminal: markup and escape sequences in it are shown instead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # rich itself would discard some of the characters

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; only rich's own control codes reach the terminal, none of a text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class _PatientConsole(VisibleConsole):
    """A console that drops lines it cannot write: a full disk or a closed pager must not end a run."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Print nothing more once the reader is gone, instead of exiting as rich does."""
        self.quiet = True
        with open(os.devnull, "w") as nowhere:  # for what is left in the file's buffer
            os.dup2(nowhere.fileno(), self.file.fileno())


class RunConsole:
    """One line per step; on a terminal a live bar is below them."""

    def __init__(self, num_steps: int, max_lag: int = 1) -> None:
        """The last `max_lag` steps may have nothing left to sample."""
        self.console = _PatientConsole(soft_wrap=True)
        self._num_steps, self._max_lag = num_steps, max_lag
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
            TimeRemainingColumn(compact=True), TextColumn("{task.fields[details]}", markup=False),
            console=self.console, disable=not self.console.is_terminal, transient=True,
            speed_estimate_period=3600,  # of the remaining time; a step may take minutes
        )  # fmt: skip
        self._bar = self._progress.add_task("starting", total=num_steps, details="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def print(self, text: object = "") -> None:
        self.console.print(text)

    def status(self, text: str) -> None:
        """Show the run's current phase before its first step."""
        if self.console.is_terminal:
            self._progress.update(self._bar, description=text)
        else:
            self.print(f"{text} ...")

    def warmup(self, step: int, num_steps: int, loss: float) -> None:
        if self.console.is_terminal:
            self._progress.update(
                self._bar, description="warm-up", completed=step, total=num_steps, details=f"loss {loss:.3f}"
            )
            if step == num_steps:
                self._progress.reset(self._bar, total=self._num_steps, details="")
        elif step % 100 == 0:
            self.print(f"warm-up {step}/{num_steps}  loss {loss:.3f}")

    def step(self, step: int, metrics: Metrics) -> None:
        is_sampled = step > self._num_steps - self._max_lag
        line = f"step {step:>4}/{self._num_steps}  {step_line(metrics, is_sampled)}"
        if self.console.is_terminal:
            if len(line) > self.console.width:
                line = f"step {step:>4}/{self._num_steps}  {step_line(metrics, is_sampled, is_short=True)}"
            self._progress.update(self._bar, description="step", completed=step, details="")
        self.print(line)

    def warning(self, text: str) -> None:
        """Show something that the user should know and that does not end the run."""
        self.console.print(Text.assemble(("!", "yellow"), f" {visible(text)}"))

    def evaluation(self, summary: EvaluationSummary) -> None:
        not_graded = f", {summary.num_errors} not graded" if summary.num_errors else ""
        self.print(
            f"validation at step {summary.step:>4}: "
            f"reward {summary.reward:.3f} ± {summary.reward_standard_error:.3f}  "
            f"(format {summary.format_reward:.2f}, {summary.mean_response_tokens:.1f} tokens, "
            f"{summary.num_examples} prompts{not_graded})"
        )


def step_line(metrics: Metrics, is_sampled: bool = False, is_short: bool = False) -> str:
    """Return a step's metrics on one line; the seconds overlap, so they do not add up to the step's.

    `is_sampled` says that the run may need no more samples, `is_short` that the line must fit 80 columns.
    """
    generate_s = metrics.get("timing/generate_s")  # missing if a Generator did not answer
    tokens_per_s = metrics["throughput/sampled_tokens_per_s"]
    generate = "" if generate_s is None else f"generate {generate_s:.2f}, "
    sampled = f"{tokens_per_s:,.0f} tok/s"
    if is_sampled and not tokens_per_s:
        sampled, generate = "nothing left to sample", ""
    entropy = f"entropy {metrics.get('policy/entropy', math.nan):.3f}  "  # missing without logprobs
    line = (
        f"reward {metrics['reward/mean']:.3f}  lag {metrics['lag/max']:.0f}  "
        f"loss {metrics['loss/policy']:+.4f}  {'' if is_short else entropy}{sampled}  "
        f"{metrics['timing/step_s']:.2f} s"
    )
    if is_short:
        return line
    sync_s = sum(metrics[name] for name in SYNC)
    return (
        f"{line} ({generate}wait {metrics['timing/wait_for_batch_s']:.2f}, "
        f"train {metrics['timing/train_s']:.2f}, sync {sync_s:.2f})"
    )


def banner(config: Config, longest_prompt: int, run_dir: str) -> Table:
    """Return what the configuration amounts to, as a table."""
    table = Table.grid(padding=(0, 2))
    for name, value in (*settings(config, longest_prompt), ("directory", run_dir)):
        table.add_row(f"  {name}", value)
    return table


def settings(config: Config, longest_prompt: int | None = None) -> list[tuple[str, str]]:
    """Return what the configuration amounts to: the size of a step, the schedule, and each actor's device."""
    algorithm, generator, learner = config.algorithm, config.generator, config.learner
    warmed = " and warmed up" if config.model.tiny and config.model.tiny.warmup else ""
    return [
        ("model", config.model.path or f"tiny (built from the seed{warmed})"),
        *_task(config, longest_prompt),
        ("run", f"{algorithm.num_steps} steps, {algorithm.loss}, learning rate {learner.learning_rate:g}"),
        ("schedule", _schedule(config)),
        (
            "Generators",
            f"{generator.num_generators} x {generator.engine} on "
            f"{_device(generator.num_gpus, generator.num_threads)}",
        ),
        ("Learner", _learner(config)),
        ("weights", f"{config.weight_sync.transport}; also actors: {_other_actors(config)}"),
    ]


def _task(config: Config, longest_prompt: int | None) -> Iterator[tuple[str, str]]:
    """Yield the task, the size of a step, and the limits of episodes."""
    algorithm, sampling, episodes = config.algorithm, config.sampling, config.episodes
    if config.has_only_episodes or longest_prompt is None:
        yield "task", config.task.kind
    else:
        yield "task", f"{config.task.kind}, prompts up to {longest_prompt} tokens"
    size = f"{algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples"
    step = f"{size} = {config.rollouts_per_step} rollouts"
    if not config.episode_tasks:
        step += f", up to {config.rollouts_per_step * sampling.max_tokens:,} response tokens"
    yield "step", step
    if config.episode_tasks:
        yield (
            "episodes",
            f"up to {episodes.max_turns} turns of {sampling.max_tokens:,} tokens, "
            f"{episodes.max_tokens:,} tokens with their prompt, {episodes.max_seconds:g} s",
        )


def _other_actors(config: Config) -> str:
    """Return the names of the actors without a line of their own."""
    numbers = {
        "Teacher": config.distillation.num_teachers if config.distillation.teacher is not None else 0,
        "EnvironmentWorker": config.episodes.num_workers if config.episode_tasks else 0,
    }
    others = [f"{name} x{number}" if number > 1 else name for name, number in numbers.items() if number]
    return ", ".join(["Scorer", "TrajectoryBuffer", "WeightSync", *others])


def _learner(config: Config) -> str:
    """Return the Learner's precision and device; for several ranks also their number, and that of replicas."""
    learner = config.learner
    one = f"{config.model.dtype} on {_device(learner.num_gpus, learner.num_threads)}"
    if learner.num_ranks == 1:
        return one
    replicas = f" in {learner.replicas} replicas" if learner.replicas > 1 else ""
    return f"{learner.num_ranks} ranks{replicas}, each {one}"


def _schedule(config: Config) -> str:
    """Return the schedule in words, with everything that is not the default."""
    algorithm, buffer, lag = config.algorithm, config.buffer, config.weight_sync.max_lag
    behind = {0: "synchronous", 1: "one version behind"}.get(lag, f"up to {lag} versions behind")
    parts = [f"max_lag {lag}: {behind}"]
    if config.generator.colocated:
        parts.append("taking turns")
    if config.num_updates > 1:
        parts.append(f"{config.num_updates} updates per batch")
    if config.replayed_per_step:
        parts.append(f"{config.replayed_per_step} groups replayed, up to {buffer.replay.max_age} versions old")
    if buffer.lookahead > 1:
        parts.append(f"look-ahead of {buffer.lookahead}")
    if config.num_oversampled:
        parts.append(f"{config.num_oversampled} groups oversampled")
    if algorithm.dynamic_sampling_tries:
        parts.append("groups without signal replaced")
    return ", ".join(parts)


def _device(num_gpus: int, num_threads: int) -> str:
    return counted(num_gpus, "GPU") if num_gpus else f"CPU, {counted(num_threads, 'thread')}"
