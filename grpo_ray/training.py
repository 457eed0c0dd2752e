"""One training run, from the configuration to the curve."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from grpo_ray import cluster
from grpo_ray.config import Config
from grpo_ray.controller import Controller
from grpo_ray.errors import RunError, all_of, shown_plainly
from grpo_ray.evaluation import sample_rollouts
from grpo_ray.preflight import Prepared, TaskData, check_files, prepare
from grpo_ray.report.plots import plot_reward_curve
from grpo_ray.report.terminal_curve import terminal_curve
from grpo_ray.telemetry.console import RunConsole, plan
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics


def train(config: Config, config_path: str) -> RunDirectory:
    """Run the whole job; returns the run's directory.

    Raises:
        RunError: the files, the model, the cluster or an actor; the message says what to do.
        KeyboardInterrupt: Ctrl-C or SIGTERM; every actor and process has been ended.
    """
    name = config.run.name or f"{Path(config_path).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDirectory(Path(config.run.output_dir) / name)
    task: TaskData
    task, *_ = all_of(lambda: check_files(config), lambda: cluster.check_machine(config), run.check_free)
    with RunConsole(config.algorithm.num_steps) as console:
        console.status("starting Ray")
        with _ray(), _sigterm_interrupts():
            cluster.check_resources(config)
            with shown_plainly():
                console.status("preparing the model")
                prepared = prepare(config, task, console.warmup)
                run.create(config)
            console.print(plan(config, prepared.longest_prompt, str(run.path)))
            with _actors(config, prepared, run) as actors:
                controller = Controller(config, prepared, actors, run, console)
                _run_until_signal(controller, run)
    _print_ending(console, controller, run, config_path)
    return run


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    cluster.connect()
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that what follows is cleaned up the same way (Ray's own handler exits at once)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _actors(config: Config, prepared: Prepared, run: RunDirectory) -> Iterator[cluster.Actors]:
    actors = cluster.start_actors(config, prepared, run.path.resolve())
    try:
        yield actors
    finally:
        cluster.stop_actors(actors)


def _run_until_signal(controller: Controller, run: RunDirectory) -> None:
    """Run the controller; a first SIGINT or SIGTERM cancels it, a second ends the process at once."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, _cancel_once, task)
        try:
            await controller.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(main())
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RunError(f"an actor failed: {cause}\nThe actors' output is in {run.logs}/") from error
    finally:
        signal.signal(signal.SIGTERM, before)  # asyncio leaves the default, which would skip the clean-up


def _cancel_once(task: "asyncio.Task[None]") -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    task.cancel()


def _print_ending(console: RunConsole, controller: Controller, run: RunDirectory, config_path: str) -> None:
    """The curve, a few rollouts of the first and the last evaluation, and where to look next."""
    curve = run.path / "reward_curve.png"
    plot_reward_curve(run.metrics_path, run.evaluations_summary_path, curve)
    rewards = [(row["step"], row["reward"]) for row in read_metrics(run.evaluations_summary_path)]
    console.print(f"\n{terminal_curve(rewards, title='validation reward')}")
    for step in (min(controller.evaluations), max(controller.evaluations)):
        console.print(f"\nSamples at step {step}:")
        for sample in sample_rollouts(controller.evaluations[step], 3):
            console.print(f"  reward {sample.reward:g}  {sample.prompt!r} -> {sample.response!r}")
    console.print(f"\nReward curve   {curve}")
    console.print(f"Run directory  {run.path}  (metrics.jsonl, rollouts/, evaluations/, checkpoints/, logs/)")
    command = f"{_command()} train {config_path}"
    console.print("Next:")
    console.print(f"  {command} weight_sync.max_lag=0         # synchronous")
    console.print(f"  {command} generator.num_generators=2    # two Generators")
    console.print(f"  {command} run.seed=1 learner.learning_rate=1e-4")


def _command() -> str:
    """How this program was called, so that the next commands can be copied."""
    return sys.argv[0] if Path(sys.argv[0]).name == "grpo-ray" else "grpo-ray"
