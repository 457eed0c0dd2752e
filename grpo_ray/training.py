"""One training run, from the configuration to the curve."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_ray import cluster
from grpo_ray.config import Config
from grpo_ray.controller import Controller
from grpo_ray.evaluation import sample_rollouts
from grpo_ray.preflight import check_files, prepare
from grpo_ray.report.plots import plot_reward_curve
from grpo_ray.telemetry.console import RunConsole, plan
from grpo_ray.telemetry.run_files import RunDirectory


def train(config: Config, config_name: str) -> Path:
    """Run the whole job; returns the run directory.

    Raises:
        ValueError: the configuration does not fit its files or its model.
        ResourceError: the cluster is too small.
        KeyboardInterrupt: Ctrl-C or SIGTERM; every actor and process has been ended.
    """
    task = check_files(config)
    folder = Path(config.run.output_dir) / (config.run.name or time.strftime(f"{config_name}-%Y%m%d-%H%M%S"))
    RunDirectory.check_free(folder)
    with RunConsole(config.algorithm.num_steps) as console, _cluster():
        cluster.check_resources(config)
        console.status("preparing the model")
        prepared = prepare(config, task, console.warmup)
        run = RunDirectory.create(folder, config)
        console.print(plan(config, prepared.longest_prompt, str(run.path)))
        actors = cluster.start_actors(
            config, prepared.model_path, prepared.max_model_len, prepared.end_token_ids, run.path.resolve()
        )
        controller = Controller(config, prepared, actors, run, console)
        try:
            _run_until_signal(controller)
        finally:
            cluster.stop_actors(actors)
    _print_ending(console, controller, run)
    return run.path


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    cluster.connect()
    try:
        yield
    finally:
        cluster.disconnect()


def _run_until_signal(controller: Controller) -> None:
    """Run the controller; a first SIGINT or SIGTERM cancels it, a second ends the process at once."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _cancel_once, task)
        try:
            await controller.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    asyncio.run(main())


def _cancel_once(task: "asyncio.Task[None]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    task.cancel()


def _print_ending(console: RunConsole, controller: Controller, run: RunDirectory) -> None:
    """The curve, a few rollouts of the first and the last evaluation, and where to look next."""
    curve = run.path / "reward_curve.png"
    plot_reward_curve(run.metrics_path, run.evaluations / "summary.jsonl", curve)
    for step in (min(controller.evaluations), max(controller.evaluations)):
        console.print(f"\nSamples at step {step}:")
        for sample in sample_rollouts(controller.evaluations[step], 3):
            console.print(f"  reward {sample.reward:g}  {sample.prompt!r} -> {sample.response!r}")
