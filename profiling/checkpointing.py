"""What does a checkpoint cost a run?

    python profiling/checkpointing.py [--steps 24] [section.key=value ...]

Runs the same job without checkpoints and with one after every step, and prints seconds a step, their ratio, and
what of it the Learner stood still for (capture) and what was written beside the training (write). The model is
larger than the quickstart's (18M parameters), so that there is something to write, and random; half of its
responses are rewarded, so that it trains and the optimizer has a state.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics

LARGER = [
    "model.tiny.hidden_size=512",
    "model.tiny.num_layers=6",
    "model.tiny.intermediate_size=1408",
    "model.tiny.warmup=null",
    "generator.engine=torch",
    "algorithm.prompts_per_step=16",
    "evaluation.every_num_steps=1000000",
]


def child(arguments: list[str]) -> int:
    """The command line with a reward that a random model earns."""
    from grpo_ray import hosting
    from grpo_ray.actors.scorer import Scorer
    from grpo_ray.cli import main as cli
    from grpo_ray.rewards.grader import Grader

    class ParityGrader(Grader):
        def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Any]:
            values = [float(sum(response.encode()) % 2) for response, _ in pairs]
            return [dict.fromkeys(("reward", "format_reward", "answer_reward"), value) for value in values]

    class ParityScorer(Scorer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._grader = ParityGrader(args[0], args[2])

    hosting.Scorer = ParityScorer  # type: ignore[misc]
    return cli(arguments)


def run(name: str, every_num_steps: int, steps: int, overrides: list[str], folder: Path) -> RunDirectory:
    command = [sys.executable, __file__, "--child", "train", "configs/quickstart.yaml", *LARGER]
    command += [f"run.output_dir={folder}", f"run.name={name}", f"algorithm.num_steps={steps}"]
    command += [f"checkpoint.every_num_steps={every_num_steps}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunDirectory(folder / name)


def mean(files: RunDirectory, name: str) -> float:
    rows = read_metrics(files.metrics_path)[3:-1]  # past the start, before the end
    return statistics.fmean(row[name] for row in rows if name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        without, every = (
            run(name, every_num_steps, options.steps, options.overrides, Path(folder))
            for name, every_num_steps in (("without", 1_000_000), ("every-step", 1))
        )
        newest = every.checkpoint_path(options.steps)
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        seconds = [mean(files, "timing/step_s") for files in (without, every)]
        print(f"checkpoint                 {size / 2**20:.0f} MiB")
        print(f"step without               {seconds[0]:.3f} s")
        print(f"step with one every step   {seconds[1]:.3f} s, {seconds[1] / seconds[0]:.2f} of it")
        print(f"  capture, Learner waits   {mean(every, 'timing/checkpoint/capture_s'):.3f} s")
        print(f"  write, beside training   {mean(every, 'timing/checkpoint/write_s'):.3f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    main()
