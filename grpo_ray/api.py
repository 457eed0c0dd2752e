"""The Python interface: `grpo_ray.train`, `evaluate`, `read_rollouts` and `Run`; docs/python.md has examples.

They work in a script, in a thread and in a notebook: where an event loop is running, a run has its own thread.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from grpo_ray.config.loading import find_config, make_config, overridden, read_config, with_torch
from grpo_ray.config.user_code import import_from, pickled
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.rollout_log import log_table, read_table
from grpo_ray.records.run_files import RunDirectory, files_by_step, last_logged_step, run_name
from grpo_ray.records.visible_text import print_visible
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.run.machine import let_waiting_threads_sleep
from grpo_ray.watch.run_state import read_state

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_ray.records.evaluation_summary import EvaluationSummary
    from grpo_ray.run.training import Follower
    from grpo_ray.tasks.examples import Example

let_waiting_threads_sleep()  # as in a terminal; torch is imported later
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of loading a model, which bury a run's lines
T = TypeVar("T")
Row = Mapping[str, Any]
OnStep = Callable[[int, Mapping[str, float]], object]
"""(step, metrics), called after each step; if it returns True, the run stops with a checkpoint."""


class Run:
    """A run's directory; everything is read from its files, also while the run goes on."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            RunError: there is no run at this path.
        """
        self._run = RunDirectory(Path(path).absolute())
        self._run.check_is_run("here")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._run.path

    @property
    def is_finished(self) -> bool:
        """True if all steps are done, and the last validation."""
        if (state := read_state(self._run)) is None or state.ending is None:
            return False
        return state.ending.kind != "failed" and last_logged_step(self._run.metrics_path) >= state.num_steps

    def metrics(self) -> pa.Table:
        """Return one row per step, one column per metric (docs/metrics.md); null where a step lacks one."""
        return log_table(StepLines(self._run.metrics_path))

    def evaluations(self) -> pa.Table:
        """Return one row per validation: its step, reward, accuracy, format and more."""
        return log_table(StepLines(self._run.evaluations_summary_path))

    def rollouts(self, step: int | None = None) -> pa.Table:
        """Return one row per response that was sampled for `step`, or for all steps; see `read_rollouts`."""
        return read_rollouts(self._run.rollouts if step is None else self._run.rollouts_path(step))

    def plot(self) -> "Figure":
        """Draw the rewards and the time of each step, as in `reward_curve.png`."""
        from grpo_ray.tools.drawing.figures import draw_reward_curve

        return draw_reward_curve(self._run.metrics_path, self._run.evaluations_summary_path)

    def model(
        self, checkpoint: str = "last", trust_remote_code: bool = False, run_reward_code: bool = False
    ) -> tuple[Any, Any]:
        """Return the model and the tokenizer of a checkpoint, for transformers.

        Args:
            checkpoint: `last`, `best`, or a name such as `step-000010`.
            trust_remote_code, run_reward_code: as of `grpo-ray export`; the run itself is not believed.

        Raises:
            RunError: there is no such checkpoint, or it takes code that is not to be run.
        """
        from transformers import AutoModelForCausalLM

        from grpo_ray.config.loading import load_config
        from grpo_ray.learning.model_files import load_tokenizer
        from grpo_ray.records.checkpoint import CheckpointStore
        from grpo_ray.tools.export.merge import checkpoint_policy

        config = load_config(self._run.config_path).changed(model={"trust_remote_code": trust_remote_code})
        store = CheckpointStore(self._run)
        folder = store.choose(checkpoint, "checkpoint").path
        for line in store.skipped:
            print_visible(f"! {line}")
        if config.model.adapter is not None:
            merged, base = checkpoint_policy(config, folder, run_reward_code)
            return merged, load_tokenizer(base, trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trust_remote_code, use_safetensors=True
        )
        return model, load_tokenizer(str(folder), trust_remote_code)

    def resume(self, *overrides: str, on_step: OnStep | None = None, local: bool = False) -> "Run":
        """Continue the run from its last checkpoint, such as with `"algorithm.num_steps=200"`.

        Raises:
            ConfigError, RunError: as the command `grpo-ray resume`.
        """
        from grpo_ray.run import training

        _check_overrides(overrides)
        return _finished(lambda follower: training.resume(str(self.path), overrides, local, follower), on_step)


def train(
    config: Mapping[str, Any] | str | Path, *overrides: str, reward: Callable[..., Any] | None = None,
    examples: Iterable["Row | tuple[str, str] | Example"] | None = None,
    validation: Iterable["Row | tuple[str, str] | Example"] | None = None, on_step: OnStep | None = None,
    local: bool = False,
) -> Run:  # fmt: skip
    """Train a model with GRPO and return its run; after Ctrl-C, the run as far as it came.

    Args:
        config: a mapping with the sections of a configuration file, or the path of one.
        overrides: changes, such as `"learner.learning_rate=1e-4"`.
        reward: in place of `task.reward`, any function that docs/rewards.md describes, a lambda or one of a
            notebook included. It travels as a pickle in the run's directory, from which it is resumed.
        examples: in place of `task.train_path`: rows with `question`, `answer` and further columns, or pairs.
        validation: the same to validate with; default: the last tenth of `examples`, at most 256.
        on_step: called after each step with its number and metrics; if it returns True, the run stops.
        local: all actors are objects of this process, with the torch engine; without Ray and vLLM.

    Raises:
        ConfigError, RunError: a fault of the configuration, the files, the model or an actor, in words.
    """
    from grpo_ray.run import training

    _check_overrides(overrides)
    if isinstance(config, str | Path):
        data = read_config(source := find_config(config))
    elif isinstance(config, Mapping):
        source, data = Path("config"), json.loads(json.dumps(config, default=_plain))
    else:
        raise ValueError(f"config: a {type(config).__name__} is neither a file's path nor a mapping")
    given = _Given(overridden(data, with_torch(data, overrides) if local else overrides, source), source)
    try:
        given.add_examples(examples, validation)
        given.add_reward(reward)
        resolved = make_config(given.data, (), source)
        return _finished(lambda follower: training.train(resolved, str(source), local, follower), on_step)
    except BaseException as error:
        given.remove_if_unused()
        if isinstance(error, RunError):
            error.args = (given.named(str(error)),)
        raise


def evaluate(target: str | Path | Run, *overrides: str, **options: Any) -> "EvaluationSummary":
    """Sample and grade a model's answers as `grpo-ray evaluate` does, and return the summary.

    Args:
        target: a run, its path, a model's folder or name on the hub, or a configuration file.
        options: those of the command with underscores: `task`, `prompt`, `reward`, `limit`, `num_samples`,
            `temperature`, `top_p`, `max_tokens`, `checkpoint` (one of them), `output`, `run_reward_code`.

    Raises:
        ConfigError, RunError: as the command.
    """
    from grpo_ray.run.training import Follower
    from grpo_ray.tools.arguments import converted
    from grpo_ray.tools.evaluation.evaluate import evaluate as run_evaluation
    from grpo_ray.tools.evaluation.results import read_summary
    from grpo_ray.tools.look import EvaluationOptions

    if options.get("checkpoint") == "all":
        raise ValueError(
            "checkpoint: `all` has several summaries; call it for each, or use `grpo-ray evaluate`"
        )
    if not isinstance(target, str | Path | Run):
        raise ValueError(f"target: a {type(target).__name__} is neither a run nor the path of a file or folder")
    path = str(target.path if isinstance(target, Run) else target)
    _check_overrides(overrides)
    own: Any = {"overrides": overrides, "typed": f"the same call of grpo_ray.evaluate({path!r}, ...)"}
    asked = EvaluationOptions(path, **own, **converted(EvaluationOptions, options))
    follower = Follower()
    summary = read_summary(_in_own_thread(lambda: run_evaluation(asked, follower.can_stop), follower))
    assert summary is not None
    return summary


def read_rollouts(path: str | Path) -> pa.Table:
    """Return the responses in a rollout file, or in all files of a folder or run.

    docs/rollouts.md has the columns. The schema's metadata has the format's version, under `grpo_ray.rollouts`.

    Raises:
        RunError: there is none.
    """
    path = Path(path)
    folder = path / "rollouts" if (path / "config.yaml").exists() else path
    files = list(files_by_step(folder).values()) if folder.is_dir() else [path]
    if not files or not files[0].exists():
        raise RunError(f"{path}: no rollouts; give a run, its folder `rollouts`, or one of the files in it")
    return pa.concat_tables(map(read_table, files), promote_options="default")


# ---- what is given from Python, in the run's directory ----


class _Given:
    """Files for what a run is given from Python, in `given/` of its directory, which is chosen now."""

    def __init__(self, data: dict[str, Any], source: Path) -> None:
        self.data, self._source = data, source
        section = self._section("run")
        # Of a run that lacks nothing else: what is wrong with this section is said before files are written.
        config = make_config({"run": section, "model": {"tiny": {}}, "task": {"kind": "sorting"}}, (), source)
        section["name"] = run_name(config, str(source))
        self._run = RunDirectory(Path(config.run.output_dir) / section["name"])
        self._was_there = self._run.path.exists()
        self._resumes = config.run.if_exists == "resume"
        self._places: dict[str, list[str]] = {}  # of each file's examples in what was given

    def _section(self, name: str) -> dict[str, Any]:
        section = self.data[name] = {} if self.data.get(name) is None else self.data[name]
        if not isinstance(section, dict):
            make_config(self.data, (), self._source)  # refuses it
        return section

    def add_examples(self, examples: Iterable[Any] | None, validation: Iterable[Any] | None) -> None:
        if examples is None and validation is None:
            return
        if examples is None:
            raise ValueError("validation needs `examples` too: the ones to train on")
        from grpo_ray.tools.evaluation.subject import section_of

        rows = _placed(examples, "examples")
        if len(rows) < (2 if validation is None else 1):
            raise ValueError(f"examples has {len(rows)}; give more: to train on, and a tenth to validate with")
        if validation is None:
            size = min(256, max(1, len(rows) // 10))
            rows, held_out = rows[:-size], rows[-size:]
        elif not (held_out := _placed(validation, "validation")):
            raise ValueError("validation has no rows; leave it out to validate with a tenth of `examples`")
        task = self._section("task")
        task.setdefault("kind", "file")
        section = section_of(task)
        if section is not None and "train_path" not in section.model_fields:
            raise ValueError(
                f"examples: a task of kind {task['kind']!r} makes its own; add the override "
                '"task={kind: file}", with the prompt and the reward of these'
            )
        if validation is None and task.get("validation_path"):
            raise ValueError("task.validation_path would not be read: give `validation`, or leave it out")
        for field, part in (("train_path", rows), ("validation_path", held_out)):
            text = "".join(json.dumps(row, default=_plain) + "\n" for _, row in part)
            task[field] = path = str(self._write(field.removesuffix("_path"), ".jsonl", text))
            self._places[path] = [place for place, _ in part]

    def named(self, text: str) -> str:
        """Return an error's text with the examples in place of the lines of their files."""
        for path, places in self._places.items():
            for number in re.findall(rf"{re.escape(path)}, line (\d+)", text):
                text = re.sub(rf"{re.escape(path)}, line {number}\b", places[int(number) - 1], text)
            text = text.replace(path, "the given examples")
        return text

    def add_reward(self, reward: Callable[..., Any] | None) -> None:
        if reward is None:
            return
        if not callable(reward):
            raise ValueError(f"reward: a {type(reward).__name__} is not a function; name others in task.reward")
        task = self._section("task")
        name = _imported_name(reward) or self._stored_reward() or self._pickled(reward)
        task["reward"] = name
        if UserFunction(reward, name, {}).is_async:  # of a judge
            task["reward"] = [{"reward": name, "network": True}]

    def _pickled(self, reward: Callable[..., Any]) -> str:
        try:
            text = f"import cloudpickle\n\nreward = cloudpickle.loads({pickled(reward)!r})\n"
        except Exception as error:  # of what the function holds: a lock, a connection
            raise ValueError(f"reward: it cannot be sent to other processes: {error}") from error
        path = self._write("given", ".py", text)
        import_from(path.parent)
        return f"{path.stem}:reward"

    def _stored_reward(self) -> str | None:
        """Return the pickled reward of the run that goes on; a new pickle of the same function may differ."""
        if not (self._resumes and self._run.config_path.exists()):
            return None
        stored = (read_config(self._run.config_path).get("task") or {}).get("reward")
        for term in stored if isinstance(stored, list) else [stored]:
            name = str(term.get("reward") if isinstance(term, dict) else term)
            if (self._run.given / f"{name.partition(':')[0]}.py").exists():
                print(f"! the run goes on with its own reward, which is stored in {self._run.given}")
                import_from(self._run.given.resolve())
                return name
        return None

    def _write(self, stem: str, suffix: str, text: str) -> Path:
        """Write a file named by its content: another start of this run, or one that is refused, has others."""
        if not self._resumes:  # or else another run's files would be overwritten before it is refused
            with shown_plainly():
                self._run.check_free()
        self._run.given.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        path = (self._run.given / f"{stem}_{digest}{suffix}").resolve()
        path.write_text(text, encoding="utf-8")
        return path

    def remove_if_unused(self) -> None:
        """Remove the folder of a run that was refused."""
        if not self._was_there and not self._run.config_path.exists():
            shutil.rmtree(self._run.path, ignore_errors=True)


def _plain(value: Any) -> Any:
    """Return a value of numpy or torch as Python's own, a mapping or set as JSON's, and any other as text."""
    if isinstance(value, Mapping | Set):
        return dict(value) if isinstance(value, Mapping) else list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _placed(examples: Iterable[Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (place, row) pairs; the place is for messages."""
    if not isinstance(examples, Iterable):
        raise ValueError(f"{name}: a {type(examples).__name__} is not a list of rows")
    places = ((f"{name}[{index}]", example) for index, example in enumerate(examples))
    return [(place, _row(example, place)) for place, example in places]


def _row(example: Any, place: str) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(example)
    question = getattr(example, "question", None)
    answer = getattr(example, "ground_truth", getattr(example, "answer", None))  # of a named tuple
    if question is None and isinstance(example, tuple | list) and len(example) == 2:
        question, answer = example
    if question is None:
        raise ValueError(
            f"{place} is {repr(example)[:80]}; give a dict with question and answer, or a pair of them"
        )
    return {**getattr(example, "_asdict", dict)(), "question": question, "answer": answer}


def _imported_name(function: Callable[..., Any]) -> str | None:
    """Return `module:function` if a new process can import it so."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None) if name.isidentifier() else None
    is_file = getattr(sys.modules.get(module), "__file__", None) is not None
    return f"{module}:{name}" if found is function and is_file and module != "__main__" else None


def _check_overrides(overrides: Sequence[Any]) -> None:
    for each in overrides:
        if not isinstance(each, str):
            raise ValueError(f'override {each!r}: write it as text, such as "learner.learning_rate=1e-4"')


def _finished(work: "Callable[[Follower], RunDirectory]", on_step: OnStep | None) -> Run:
    """Return the run that `work` trains, also one that was interrupted."""
    from grpo_ray.run.signals import Interrupted
    from grpo_ray.run.training import Follower

    follower = Follower(on_step)
    # A run's seed is not the caller's: numbers may be drawn afterwards.
    torch = sys.modules.get("torch")
    try:
        with torch.random.fork_rng(devices=()) if torch else nullcontext():
            return Run(_in_own_thread(lambda: work(follower), follower).path)
    except Interrupted as interrupted:
        if follower.exit is not None:
            raise follower.exit from None
        if interrupted.run is None:
            raise
        return Run(interrupted.run.path)


def _in_own_thread(work: Callable[[], T], follower: "Follower") -> T:
    """Run `work` here if no event loop runs in this thread, and else in a thread.

    Ctrl-C while waiting asks the run to stop with a checkpoint; a second one stops waiting.
    """
    loop: asyncio.AbstractEventLoop | None = None
    with suppress(RuntimeError):
        loop = asyncio.get_running_loop()
    if loop is None:
        return work()
    thread = ThreadPoolExecutor(1, "grpo_ray")
    future = thread.submit(work)
    thread.shutdown(wait=False)
    try:
        return future.result()
    except KeyboardInterrupt:
        follower.stop()
        return future.result()
