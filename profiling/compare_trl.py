"""Whole steps of grpo_ray against TRL's GRPOTrainer on two cores, in turns; see docs/lab/profiling.md.

    python profiling/compare_trl.py --trl-python ~/trl/bin/python --out trl.json

Nothing is installed here. TRL needs a Python of its own with trl and a CPU build of torch:

    python3 -m venv ~/trl
    ~/trl/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    ~/trl/bin/pip install trl==1.16.0 transformers==5.19.0

Both sides have the same weights, prompts, rewards, group sizes, optimizer and limits, learning rate 0 (so that
every step does the same work), and two threads: TRL's trainer both, grpo_ray's Generator and Learner one each.

    python profiling/compare_trl.py --trl-python ~/trl/bin/python --until 0.9 --rounds 3 --steps 60

`--set` and `--trl-set` change both sides, for example to run on a GPU (docs/lab/gpu.md).

With --until, both sides learn, with the configuration's learning rate and reward; a run counts until the mean
training reward of three steps has passed the bound. Each round has a seed of its own.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import train
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.results import Result, Row, print_result
from rich.console import Console

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.machine import WAITING_THREADS
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.prompts import Prompter, template_of
from grpo_ray.tools.arguments import positive
from grpo_ray.tools.cli import set_library_defaults

TRL_SIDE = Path(__file__).with_name("trl_side.py")
QUICKSTART = "configs/quickstart.yaml"
COMMON = ["learner.learning_rate=0", "evaluation.every_num_steps=1000000"]
SKIPPED_STEPS = 4  # warm-up of Generator and Learner
WINDOW = 3  # steps of which the mean reward counts, with --until
# Lengths differ from response to response with it, so that groups have signal; trl_side.py has its formula.
BREVITY = 'task.reward=[{"reward": "brevity", "arguments": {"free": 0, "span": 1000}}]'
NUM_LONG_PROMPTS = 1000


@dataclass(frozen=True)
class Case:
    """One workload for both sides."""

    reward: str = "exact_match"
    overrides: tuple[str, ...] = ()
    is_exact: bool = False  # every response has max_tokens: no end token is sampled
    prompt_tokens: int | None = None  # None: the quickstart's own prompts
    trl_micro_batch_rows: int = 64  # responses per forward and backward pass; of 32, 64 and 256 the fastest
    trl_dtype: str = "float32"  # of the weights that its optimizer updates
    config: str = QUICKSTART
    is_pretrained: bool = False  # the model is that of --model


def exactly(num_tokens: int) -> tuple[str, ...]:
    """Return overrides that make every response of one length, and give groups a signal."""
    return (
        f"sampling.max_tokens={num_tokens}",
        f"sampling.min_tokens={num_tokens}",
        "sampling.stop=[]",
        BREVITY,
    )


CASES = {
    "quickstart": Case(),
    "192-token responses": Case("brevity", exactly(192), is_exact=True),
    "250-token prompts, 64-token responses": Case("brevity", exactly(64), is_exact=True, prompt_tokens=250),
    # Every group gets a signal: of sums, the model gets so few right that most of its groups would have none.
    "SmolLM2, sums, bfloat16": Case(
        "brevity", (BREVITY,), config="configs/smollm2-sums.yaml", is_pretrained=True, trl_dtype="bfloat16"
    ),
    "SmolLM2, sums as they are, bfloat16": Case(
        "last_number", config="configs/smollm2-sums.yaml", is_pretrained=True, trl_dtype="bfloat16"
    ),
    "SmolLM2, sums, float32": Case(
        "brevity", (BREVITY, "model.dtype=float32"), config="configs/smollm2-sums.yaml", is_pretrained=True
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    set_library_defaults()
    options = _parser().parse_args(arguments)
    if problem := trl_problem(options.trl_python):
        print(f"compare_trl.py: {problem}", file=sys.stderr)
        return 2
    console = Console(highlight=False, soft_wrap=True, width=200)
    chosen = [name for name, case in CASES.items() if options.model or not case.is_pretrained]
    chosen = [name for name in chosen if not options.case or options.case in name]
    if not chosen:
        print(f"compare_trl.py: no case has {options.case!r} in its name: {', '.join(CASES)}", file=sys.stderr)
        return 2
    machine, trl_versions = describe_machine(), dict[str, str]()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            case = replace(CASES[name], trl_micro_batch_rows=options.rows or CASES[name].trl_micro_batch_rows)
            measured, trl_versions = compare(name, case, options, Path(folder) / str(len(rows)))
            rows += measured
    result = Result(
        "compare_trl",
        time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine,
        describe_versions() | trl_versions,
        {"rounds": options.rounds, "steps": options.steps, "cases": chosen},
        rows,
    )
    print_result(result, console)
    result.write(options.out)
    console.print(f"seconds per step, the median of each run; written to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, metavar="PATH", help="a Python that has trl")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="runs of each side per case")
    parser.add_argument("--steps", type=positive, default=14, metavar="N", help="steps per run")
    parser.add_argument("--case", metavar="TEXT", help="only cases with this text in their names")
    parser.add_argument(
        "--until", type=float, metavar="REWARD", help="measure the time to this training reward"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="SmolLM2 (grpo-ray data smollm2 FOLDER), for the cases with it"
    )
    parser.add_argument("--rows", type=positive, metavar="N", help="responses per micro-batch of TRL")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of grpo_ray's configuration")
    parser.add_argument("--trl-set", type=json.loads, default={}, metavar="JSON", help="fields of GRPOConfig")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compare_trl.json")
    return parser


def trl_problem(python: Path) -> str | None:
    """Return the reason why TRL cannot run in that Python, or None."""
    install = "see the head of this file for the three commands that make one"
    if not python.exists():
        return f"--trl-python: there is no {python}; {install}"
    check = [str(python), "-c", "import trl, torch, datasets; assert hasattr(trl, 'GRPOTrainer')"]
    failed = subprocess.run(check, capture_output=True, text=True)
    if failed.returncode:
        last = failed.stderr.strip().splitlines()[-1:]
        return f"--trl-python: {python} cannot import trl with torch and datasets ({''.join(last)}); {install}"
    return None


def compare(
    name: str, case: Case, options: argparse.Namespace, folder: Path
) -> tuple[list[Row], dict[str, str]]:
    """Run both sides in turns; return their rows, and TRL's versions."""
    folder.mkdir()
    common = COMMON if options.until is None else COMMON[1:]
    overrides = [*common, f"algorithm.num_steps={options.steps}", *case.overrides, *options.set]
    if case.prompt_tokens is not None:
        overrides += write_long_prompts(case.prompt_tokens, folder)
    if case.is_pretrained:
        overrides.append(f"model.path={options.model}")
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(options.rounds):
        # Of what is learned, each round has another model (a tiny one), other prompts and another order.
        seeded = overrides if options.until is None else [*overrides, f"run.seed={number}"]
        job = trl_job(case, load_config(case.config, seeded), options.steps, folder)
        run = run_trl(options.trl_python, job | {"seed": number, "arguments": options.trl_set}, folder)
        directory = train(f"run-{number}", seeded, folder, config=case.config)
        if options.until is None:
            theirs.append(summary(run["seconds"], run["response_tokens"]))
            ours.append(summary(*step_metrics(directory)[:2]))
        else:
            theirs.append(time_to(options.until, run["seconds"], run["response_tokens"], run["rewards"]))
            ours.append(time_to(options.until, *step_metrics(directory)))
        what = "s per step" if options.until is None else f"s to a reward of {options.until:g}"
        print(
            f"{name}, round {number + 1}: TRL {theirs[-1]['median']:.3f} {what}, "
            f"grpo_ray {ours[-1]['median']:.3f}, ratio {ours[-1]['median'] / theirs[-1]['median']:.2f}",
            flush=True,
        )
    base = f"{name}: TRL"
    return [make_row(base, theirs, base), make_row(f"{name}: grpo_ray", ours, base)], run["versions"]


def make_row(case: str, runs: Sequence[Mapping[str, float]], baseline: str) -> Row:
    facts = {
        "mean s": statistics.fmean(run["mean"] for run in runs),
        "response tokens": statistics.fmean(run["response_tokens"] for run in runs),
    }
    return Row(case, tuple(run["median"] for run in runs), baseline, facts=facts)


def summary(seconds: Sequence[float], response_tokens: Sequence[float]) -> dict[str, float]:
    """Summarise a run's steps without the first few, and without the last, which samples no next batch."""
    steady = seconds[SKIPPED_STEPS:-1]
    if not steady:
        raise ValueError(f"--steps: the first {SKIPPED_STEPS} and the last are left out; give more")
    return {
        "median": statistics.median(steady),
        "mean": statistics.fmean(steady),
        "response_tokens": statistics.fmean(response_tokens),
    }


def time_to(
    bound: float, seconds: Sequence[float], response_tokens: Sequence[float], rewards: Sequence[float]
) -> dict[str, float]:
    """Return the seconds until rewards pass the bound, and the mean tokens per response, summed over steps."""
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[end - WINDOW : end]) >= bound:
            total = sum(seconds[:end])
            return {"median": total, "mean": total, "response_tokens": sum(response_tokens[:end]), "steps": end}
    best = max(statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1))
    raise ValueError(
        f"--until: no {WINDOW} steps have a reward of {bound:g}, at most {best:.3f}; give more --steps"
    )


def step_metrics(run: RunDirectory) -> tuple[list[float], list[float], list[float]]:
    names = ("timing/step_s", "rollout/response_tokens/mean", "reward/mean")
    seconds, tokens, rewards = ([row[name] for row in read_metrics(run.metrics_path)] for name in names)
    return seconds, tokens, rewards


def trl_job(case: Case, config: Config, num_steps: int, folder: Path) -> dict[str, Any]:
    """Return what trl_side.py needs to do the same work as a run of `config`."""
    if config.rollouts_per_step % case.trl_micro_batch_rows:  # it would train on fewer responses
        raise ValueError(f"--rows must divide a step's {config.rollouts_per_step} responses")
    model = str(tiny_model_folder(config)) if config.model.path is None else config.model.path
    prompter = Prompter(template_of(config.task), load_tokenizer(model))  # type: ignore[arg-type]
    items = [prompter.item(n, e) for n, e in enumerate(load_examples(config.task, config.run.seed).train)]
    if case.prompt_tokens is not None:
        assert {len(item.prompt_token_ids) for item in items} == {case.prompt_tokens}
    return {
        "model": model,
        "folder": str(folder / "trl"),
        "prompts": [(item.prompt, item.ground_truth) for item in items],
        "reward": case.reward,
        "prompts_per_step": config.algorithm.prompts_per_step,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "micro_batch_rows": case.trl_micro_batch_rows,
        "max_tokens": config.sampling.max_tokens,
        "min_tokens": config.sampling.min_tokens if case.is_exact else 0,
        "learning_rate": config.learner.learning_rate,
        "schedule": {"constant": "constant_with_warmup"}.get(
            config.learner.lr_schedule, config.learner.lr_schedule
        ),
        "warmup_steps": config.learner.warmup_steps,
        "num_steps": num_steps,
        "num_threads": config.learner.num_threads + config.generator.num_threads,
        "dtype": case.trl_dtype,
    }


def run_trl(python: Path, job: Mapping[str, Any], folder: Path, script: Path = TRL_SIDE) -> dict[str, Any]:
    """Run a script of TRL's side with that Python; return its result."""
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(python), str(script), str(folder / "job.json"), str(folder / "result.json")]
    # Its threads wait as they do for TRL's users; ours are told otherwise by set_library_defaults.
    own = {name: value for name, value in os.environ.items() if name not in WAITING_THREADS}
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def write_long_prompts(num_tokens: int, folder: Path) -> list[str]:
    """Write distinct prompts of exactly `num_tokens`, for the quickstart's model; return overrides for them.

    Each is a number of many digits, other ones from the first on, so that groups share no prefix.
    """
    config = load_config(QUICKSTART)
    model = str(tiny_model_folder(config))
    template, tokenizer = template_of(config.task), load_tokenizer(model)  # type: ignore[arg-type]
    rng = random.Random(0)

    def question(num_digits: int) -> str:
        return "".join(rng.choices("0123456789", k=num_digits))

    def length(text: str) -> int:
        return len(tokenizer(template.render(text, tokenizer), add_special_tokens=False)["input_ids"])

    num_digits = num_tokens - length("0") + 1  # a digit is a token
    for name in ("train", "validation"):
        texts = [question(num_digits) for _ in range(NUM_LONG_PROMPTS)]
        lines = [json.dumps({"question": text, "answer": "0"}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        "model.tiny=null",
        f"model.path={model}",
        f'task={{"kind": "file", "prompt": "short", "train_path": "{folder}/train.jsonl", '
        f'"validation_path": "{folder}/validation.jsonl"}}',
        BREVITY,
    ]


if __name__ == "__main__":
    sys.exit(main())
