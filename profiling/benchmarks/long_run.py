"""A run of 100,000 steps, written as training would leave it in minutes, and what it costs to read it.

The first steps have files of their own, which the audit finds clean: real prompts, rewards by the real Scorer,
and a checkpoint by a real Learner. Later steps share those files by hard links. Every line of metrics.jsonl is
a real one, apart from its step.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.machine import status_bytes
from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.groups import GroupBook
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.checkpoint import GROUPS, REPLAY, CheckpointState, CheckpointStore
from grpo_ray.records.evaluation_summary import summarise_groups, write_evaluation
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import RunDirectory, step_name
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup, TrainBatch
from grpo_ray.watch.batch_metrics import rollout_metrics
from grpo_ray.watch.console import RunConsole
from grpo_ray.watch.run_state import reported

TITLE = "a synthetic run of 100,000 steps: seconds and peak memory of what reads it"
TAKES_OVERRIDES = True
STEPS, QUICK_STEPS = 100_000, 300
AUDITED_STEPS, WHOLE_STEPS = 1_000, 100
SMALL = [
    "generator.engine=torch", "model.tiny.warmup=null", "task.num_validation_prompts=8",
    "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
]  # fmt: skip
MIB = 2**20
LINE = Path(__file__).with_name("quickstart_line.json")  # of a run of configs/quickstart.yaml
OF_FIRST_GENERATOR = "/generator-0"
STEPS_PER_EVENT = 100


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


class SyntheticRun:
    """Writes one run of `config.algorithm.num_steps` steps."""

    def __init__(self, config: Config, folder: Path, num_whole_steps: int) -> None:
        """
        Args:
            num_whole_steps: steps with files of their own.
        """
        self._config, self.run = config, RunDirectory(folder)
        self._num_steps = config.algorithm.num_steps
        self._num_whole = min(num_whole_steps, self._num_steps)
        self._prepared = prepare(config, check_files(config))
        self._tokenizer = load_tokenizer(self._prepared.model.path)
        self._scorer = Scorer(config)

    def write(self) -> RunDirectory:
        self.run.create(self._config)
        self._scorer.ready()
        try:
            self._write_rollouts()
            self._write_evaluations()
        finally:
            self._scorer.close()
        self._write_lines()
        self._write_checkpoint()
        with reported(self.run, self._num_steps, RunConsole(self._num_steps)):
            pass  # writes how the run ended
        return self.run

    def _write_rollouts(self) -> None:
        size, prompts = self._config.algorithm.prompts_per_step, self._prepared.prompts
        for step in range(1, self._num_whole + 1):
            items = [prompts.item(group_id) for group_id in range((step - 1) * size, step * size)]
            groups = [self._group(item, step - 1, self._config.algorithm.samples_per_prompt) for item in items]
            write_rollouts(self.run.rollouts_path(step), step, groups)
            if step == 1:
                self._first = groups
        for step in range(self._num_whole + 1, self._num_steps + 1):
            os.link(self.run.rollouts_path(step % self._num_whole + 1), self.run.rollouts_path(step))

    def _group(self, item: PromptItem, version: int, num_samples: int) -> ScoredGroup:
        """Make a group of which every second response is right."""
        answers = [item.ground_truth if sample % 2 else "0" for sample in range(num_samples)]
        completions = [self._completion(f" so </think> <answer> {text} </answer>", version) for text in answers]
        rollout = RolloutGroup(item, tuple(completions), "generator-0")
        return ScoredGroup.of(rollout, self._scorer.score(rollout))

    def _completion(self, text: str, version: int) -> Completion:
        token_ids = np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        logprobs = np.full(len(token_ids), -1.0, np.float32)
        return Completion(text, token_ids, logprobs, np.full(len(token_ids), version, np.int32), "stop")

    def _write_evaluations(self) -> None:
        items, num_samples = self._prepared.validation, self._config.evaluation.samples_per_prompt
        every, last = self._config.evaluation.every_num_steps, self._num_steps
        due = sorted({*range(0, last, every), last})
        for step in (step for step in due if step <= self._num_whole):
            groups = [self._group(item, step, num_samples) for item in items]
            write_evaluation(self.run.evaluations, summarise_groups(step, groups), groups)
        summary = json.loads(self.run.evaluations_summary_path.read_text().splitlines()[-1])
        first = self.run.evaluations / f"{step_name(0)}.parquet"
        with self.run.evaluations_summary_path.open("a") as file:
            for step in (step for step in due if step > self._num_whole):
                os.link(first, self.run.evaluations / f"{step_name(step)}.parquet")
                file.write(json.dumps({**summary, "step": step, "version": step}) + "\n")

    def _write_lines(self) -> None:
        metrics = dict(self._metrics())
        rest = json.dumps(metrics)[1:]
        with self.run.metrics_path.open("w") as file:
            for step in range(1, self._num_steps + 1):
                file.write(f'{{"step": {step}, {rest}\n')
        with self.run.events_path.open("w") as file:
            for step in range(STEPS_PER_EVENT, self._num_steps + 1, STEPS_PER_EVENT):
                event = {"time": 0.0, "kind": "generator_failed", "actor": "generator-0", "step": step}
                file.write(json.dumps({**event, "text": "generator-0 died: it is replaced in 1 s"}) + "\n")

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Yield a line's metrics, with those of one Generator repeated for all of them."""
        own: Mapping[str, Any] = {**rollout_metrics(self._first), "lag/mean": 0.0, "lag/max": 0.0}
        for name, value in {**json.loads(LINE.read_text()), **own}.items():
            if OF_FIRST_GENERATOR in name:
                for index in range(self._config.generator.num_generators):
                    yield name.replace(OF_FIRST_GENERATOR, f"/generator-{index}"), value
            elif name != "step":
                yield name, value

    def _write_checkpoint(self) -> None:
        """Write the last step's checkpoint; the groups of the next step are in flight."""
        step, model = self._num_steps, self._prepared.model
        learner = Learner(model.path, self._config, model.end_token_ids)
        learner.train_step(TrainBatch(tuple(self._first)))  # so that the optimizer has a state
        learner.version = step
        learner.capture()
        store = CheckpointStore(self.run, self._config.checkpoint)
        folder = store.begin(step)
        sizes = learner.write_captured(folder)
        for name in (GROUPS, REPLAY):
            path = folder / "training" / name
            write_rollouts(path, None, ())
            sizes[f"training/{name}"] = path.stat().st_size
        state = CheckpointState(step, self._book_at(step).state_dict(), dict(self._metrics()))
        store.commit(step, state, sizes)

    def _book_at(self, step: int) -> GroupBook:
        book = GroupBook(self._config, self._prepared.prompts, step)
        num_groups = step * self._config.algorithm.prompts_per_step
        done = {"next_group_id": num_groups, "num_trained": num_groups}
        book.load_state_dict({**book.state_dict(), **done}, {})
        book.admit(self._config.algorithm.prompts_per_step)
        return book


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
    from grpo_ray.records.run_files import last_logged_step
    from grpo_ray.watch.run_log import RunLog

    config = load_config(run.config_path)
    prompts = prepare(config, check_files(config)).prompts

    def work() -> None:
        store = CheckpointStore(run, config.checkpoint)
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
