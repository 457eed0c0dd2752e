"""A run of 100,000 steps, written as training would leave it, and what it costs to read it.

Each reader is a process of its own. `CPU` is what it computes (`seconds` has its waits, too), `peak` its
largest resident memory, `above imports` what it needs beyond the modules that it imports. The audit reads and
grades every response, so it is measured on a shorter run.
Other sizes: `algorithm.num_steps=1000`, `generator.num_generators=64`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.machine import status_bytes
from benchmarks.results import Options, Row
from benchmarks.synthetic_run import SyntheticRun
from benchmarks.tiny_learner import QUICKSTART
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.watch.console import RunConsole

TITLE = "a synthetic run of 100,000 steps: seconds and peak memory of what reads it"
TAKES_OVERRIDES = True
STEPS, QUICK_STEPS = 100_000, 300
AUDITED_STEPS, WHOLE_STEPS = 1_000, 100
SMALL = [
    "generator.engine=torch", "model.tiny.warmup=null", "task.num_validation_prompts=8",
    "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
]  # fmt: skip
MIB = 2**20


def run(options: Options) -> list[Row]:
    steps, audited = (QUICK_STEPS, 20) if options.quick else (STEPS, AUDITED_STEPS)
    config = load_config(QUICKSTART, [*SMALL, f"algorithm.num_steps={steps}", *options.overrides])
    shorter = load_config(QUICKSTART, [*SMALL, *options.overrides, f"algorithm.num_steps={audited}"])
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        long, short = Path(folder) / "long", Path(folder) / "short"
        rows = [_written(config, long, WHOLE_STEPS), _written(shorter, short, audited)]
        for reader in READERS:
            path = short if reader == "audit" else long
            rows.append(_measured(reader, path, (shorter if reader == "audit" else config).algorithm.num_steps))
    return rows


def _written(config: Config, folder: Path, num_whole: int) -> Row:
    started, num_steps = time.perf_counter(), config.algorithm.num_steps
    run = SyntheticRun(config, folder, num_whole).write()
    seconds = time.perf_counter() - started
    num_bytes = run.metrics_path.stat().st_size
    facts = {"metrics.jsonl, MiB": num_bytes / MIB, "kB per line": num_bytes / num_steps / 1000}
    return Row(f"writing {num_steps:,} steps", (seconds,), work=num_steps, unit="steps", facts=facts)


def _measured(reader: str, path: Path, num_steps: int) -> Row:
    """Run the reader in a process of its own."""
    here = Path(__file__).parents[1]
    script = f"from benchmarks.long_run import read; read({reader!r}, {str(path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    found = json.loads(output.splitlines()[-1])
    facts = {
        "CPU, s": found["cpu"],
        "peak, MiB": found["peak"] / MIB,
        "above imports, MiB": found["above"] / MIB,
    }
    return Row(f"{reader}, {num_steps:,} steps", (found["seconds"],), work=num_steps, unit="steps", facts=facts)


# In the process of a reader


def read(reader: str, path: str) -> None:
    """Run the reader on the run in `path`, and print its seconds and memory."""
    prepared = READERS[reader](RunDirectory(path))
    imported, started, cpu = psutil.Process().memory_info().rss, time.perf_counter(), time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        prepared()
    seconds, peak = time.perf_counter() - started, status_bytes("VmHWM")
    used = {"cpu": time.process_time() - cpu, "peak": peak, "above": max(0, peak - imported)}
    print(json.dumps({"seconds": seconds, **used}))


def _resume(run: RunDirectory) -> Callable[[], None]:
    """Read what `grpo-ray resume` does before it starts the actors."""
    import grpo_ray.run.training  # noqa: F401  # all that the command imports
    from grpo_ray.records.checkpoint import make_store
    from grpo_ray.records.run_files import last_logged_step
    from grpo_ray.run.preparation import check_files, prepare
    from grpo_ray.watch.run_log import RunLog

    config = load_config(run.config_path)
    prompts = prepare(config, check_files(config)).prompts

    def work() -> None:
        store = make_store(config, run)
        newest = store.latest()
        assert newest is not None
        assert last_logged_step(run.metrics_path) == newest.state.step  # is it done?
        store.discard_unfinished()
        run.rewind(newest.state.step)
        prompts.load_state_dict(newest.state.ledger)
        RunLog(run, RunConsole(config.algorithm.num_steps))
        assert last_logged_step(run.metrics_path) == newest.state.step  # is its last line there?

    return work


def _report(run: RunDirectory) -> Callable[[], None]:
    from grpo_ray.tools.look import ReportOptions
    from grpo_ray.tools.report.write_report import report

    return lambda: print(report(ReportOptions((str(run.path),))))


def _ending(run: RunDirectory) -> Callable[[], None]:
    from grpo_ray.tools.report.ending import print_ending

    return lambda: print_ending(print, run)


def _top(run: RunDirectory) -> Callable[[], None]:
    from grpo_ray.tools.look import TopOptions
    from grpo_ray.tools.top.frame import top

    return lambda: top(TopOptions(str(run.path), once=True))


def _audit(run: RunDirectory) -> Callable[[], None]:
    from grpo_ray.tools.audit.audit import audit

    def work() -> None:
        report = audit(run)
        assert report.is_clean, str(report)

    return work


# Each imports what it needs, and returns its work.
READERS: dict[str, Callable[[RunDirectory], Callable[[], None]]] = {
    "resume": _resume,
    "report": _report,
    "ending": _ending,
    "top": _top,
    "audit": _audit,
}
