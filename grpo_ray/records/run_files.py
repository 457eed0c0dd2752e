"""A run's directory: its layout, claiming it, and rewinding it to a step."""

import hashlib
import os
import re
import shlex
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from grpo_ray.config import Config
from grpo_ray.errors import RunError
from grpo_ray.records.durable import sync, write_text
from grpo_ray.records.json_lines import damaged_line, line_number, lines_from_end, parse_line, read_lines
from grpo_ray.records.resumable_folder import ResumableFolder

read_metrics = read_lines
STEP_FILE = re.compile(r"step-(?P<step>\d+)\.parquet|(?P<unfinished>\.step-\d+\.parquet\.partial)")
SEAL = "# written by grpo_ray; `resume` refuses edits. SHA-256 of the other lines: "
CHECKED_BYTES = 2**20  # of a log, before the line at which a resumed run continues


def step_name(step: int) -> str:
    """Return the name of everything that belongs to a step; names sort as the steps do."""
    return f"step-{step:06d}"


def dump_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to the same tree."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_text(path, f"{SEAL}{_digest(text)}\n{text}")


def check_dumped(path: Path) -> None:
    """Refuse a file that is not as `dump_config` wrote it: its run would continue as another.

    Raises:
        RunError: says how to change a run's configuration.
    """
    first, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    if first.startswith(SEAL) and first.removeprefix(SEAL) != _digest(text):
        raise RunError(
            f"{path} was edited, or is damaged. Undo that, and give changes as overrides: `grpo-ray resume "
            f"{path.parent} section.key=value`. To resume with the file as it is, remove its first line"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def run_name(config: Config, config_path: str) -> str:
    """Return the run's name, by default of the file's name and the time; raises RunError."""
    if config.run.if_exists == "resume" and config.run.name is None:
        raise RunError("run.if_exists: `resume` needs run.name; without one, each run gets a name of its own")
    return config.run.name or f"{Path(config_path).stem}-{datetime.now():%Y%m%d-%H%M%S-%f}"


class RunDirectory:
    """The directory of one run; the attributes are the paths in it."""

    def __init__(self, path: str | Path, is_local: bool = False, is_sft_alone: bool = False) -> None:
        self.path, self.is_local, self.is_sft_alone = Path(path), is_local, is_sft_alone
        self.config_path = self.path / "config.yaml"
        self.inputs_path = self.path / "inputs.json"  # digests of files that the configuration names
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.timeline_path = self.path / "timeline.json"
        self.state_path = self.path / "state.json"  # the run's current state
        self.rollouts = self.path / "rollouts"
        self.sft = self.path / "sft"  # the model after the supervised steps, or the adapter
        self.skipped = self.path / "skipped"  # batches of skipped updates; created with the first one
        self.profile = self.path / "profile"  # traces of learner.profile_steps; created with the first one
        self.evaluations = self.path / "evaluations"
        self.evaluations_summary_path = self.evaluations / "summary.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.trackers = self.path / "trackers"  # created if there are any
        self.given = self.path / "given"  # a reward and examples that Python gave; written before the run
        self._folder = ResumableFolder(
            self.path, self.config_path.name, "run", "give another run.name or run.output_dir"
        )

    def check_is_run(self, purpose: str) -> None:
        """Refuse a folder without a run; `purpose` completes the error, such as "to audit". Raises RunError."""
        if not self.config_path.exists():
            raise RunError(f"{self.path}: no run {purpose} (it has no config.yaml)")

    def check_free(self) -> None:
        """Refuse a path that `create` would refuse; call it before anything expensive.

        Raises:
            RunError, ValueError: the path is in use or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give another run.name or run.output_dir")
        if re.search("[\udc80-\udcff]", path := str(self.path.absolute())):  # bytes that Python cannot decode
            raise ValueError(f"{path!r} is not UTF-8, which rollouts need; give another run.output_dir")
        # A run that was killed while it created its folders can be created again.
        if not self._folder.is_free(skeleton=self._subfolders, ignored=(self.given.name,)):
            resume = f"resume it with `{self.resume_command}`, " if self.config_path.exists() else ""
            raise ValueError(
                f"{self.path} exists already and is not empty, and a run never writes into another run's "
                f"folder; {resume}give another run.name, or move the folder away"
            )
        self._folder.check_writable()

    def create(self, config: Config) -> None:
        """Create the folders and write the resolved configuration; hold the lock if others may do the same.

        Raises:
            RunError, ValueError: as `check_free`.
        """
        self.check_free()
        self.create_subfolders()
        dump_config(config, self.config_path)

    def create_subfolders(self) -> None:
        """Create the folders of records and checkpoints that are not there, or were removed."""
        for folder in self._subfolders:
            folder.mkdir(parents=True, exist_ok=True)

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock on the directory, which is created if necessary.

        Raises:
            RunError: another process holds the lock, or a link would make the run write elsewhere; names it.
        """
        # Not in those of trackers, where libraries such as W&B's put links of their own.
        folders = self.path, *self._subfolders, self.skipped, self.profile
        for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
            target = Path(os.path.realpath(path))  # `resolve` raises RuntimeError for a link to itself
            if path.is_symlink() and (target.is_symlink() or not target.is_relative_to(self.path.resolve())):
                raise RunError(
                    f"{path} is a link to {target}, and a run writes only inside its own folder; "
                    "put the file or folder itself in its place"
                )
        return self._folder.lock()

    def check_lock(self) -> None:
        """Refuse to write on if another process holds the lock as well; raises RunError, which names it."""
        self._folder.check_lock()

    def check_records(self, step: int) -> dict[Path, int]:
        """Refuse records that a run cannot resume from at `step`; return the bytes of each log that it keeps.

        Raises:
            RunError: names the file and the line, and says what to do.
        """
        num_bytes, last_step = kept_part(self.metrics_path, step)
        if last_step < step - 1:  # the line of `step` itself is also in its checkpoint
            raise RunError(
                f"{self.metrics_path}, line {line_number(self.metrics_path, num_bytes)}: the lines of steps "
                f"{last_step + 1} to {step - 1} are missing or damaged, and {self.checkpoint_path(step)} needs "
                "them. Put back a copy of the file, or remove that checkpoint to resume from an earlier one"
            )
        of_evaluations, _ = kept_part(self.evaluations_summary_path, step)
        return {self.metrics_path: num_bytes, self.evaluations_summary_path: of_evaluations}

    def rewind(self, step: int) -> None:
        """Delete the records of later steps, which a resumed run repeats; raises as `check_records`."""
        for log, num_bytes in self.check_records(step).items():
            if log.exists() and log.stat().st_size > num_bytes:
                os.truncate(log, num_bytes)
                sync(log)
        for folder in (self.rollouts, self.evaluations, self.skipped):
            for name in os.listdir(folder) if folder.exists() else ():
                match = STEP_FILE.fullmatch(name)
                if match and (match["unfinished"] or int(match["step"]) > step):
                    (folder / name).unlink(missing_ok=True)

    def rollouts_path(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.parquet"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    @property
    def resume_command(self) -> str:
        """The command that continues the run, for messages."""
        path, flag = self.path, " --local" if self.is_local else ""
        if self.is_sft_alone:  # `resume` would go on to GRPO
            named = [str(self.config_path), f"run.name={path.name}", "run.if_exists=resume"]
            return f"grpo-ray sft {shlex.join(named)}{flag}"
        return f"grpo-ray resume {shlex.quote(str(path))}{flag}"

    @property
    def _subfolders(self) -> tuple[Path, ...]:
        return self.rollouts, self.evaluations, self.checkpoints, self.logs


def files_by_step(folder: Path) -> dict[int, Path]:
    """Return a folder's files of rollouts by step, in order; a folder that cannot be read is an OSError."""
    names = os.listdir(folder) if folder.exists() else []
    found = filter(None, map(STEP_FILE.fullmatch, names))
    return dict(sorted((int(match["step"]), folder / match[0]) for match in found if match["step"]))


def last_logged_step(path: str | Path) -> int:
    """Return the last step with a line in the metrics file; 0 without any."""
    return int(last_row(path).get("step", 0))


def last_row(path: str | Path) -> dict[str, Any]:
    """Return the last row of a log, read from its end; empty without any."""
    return next(iter(read_lines(path, 1)), {})


def kept_part(path: Path, step: int) -> tuple[int, int]:
    """Return the bytes, and the last step, of the part of a log that a run keeps when it goes back to `step`.

    Lines that cannot be read are as good as absent behind that end. Before it, as far as the file is read
    (`CHECKED_BYTES`), they are an error: the run would end with records that no command can read.

    Raises:
        DamagedLine: a line of a step up to `step` cannot be read.
    """
    end, last_step = 0, 0
    for offset, line in lines_from_end(path):
        found = (parse_line(line) or {}).get("step")
        if end and not isinstance(found, int):
            raise damaged_line(path, offset, "not valid JSON, or without a step")
        if not end and isinstance(found, int) and found <= step:
            end, last_step = offset + len(line), found
        if end and end - offset > CHECKED_BYTES:
            break
    return end, last_step
