"""TensorBoard: event files in the run's directory."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from grpo_ray.watch.trackers.tracker import End, Row, TrackedRun

PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # ASCII: everything with a meaning in Markdown or HTML


class TensorBoardTracker:
    def __init__(self) -> None:
        self._run: Any = None
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        self._run = run
        return f"tensorboard --logdir {run.folder.parents[2]}"  # the parent folder of all runs

    def resume_from(self, step: int) -> None:
        """Start a new event file, which replaces what earlier files have of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(self._run.folder), purge_step=step + 1)
        text = yaml.safe_dump(self._run.config.model_dump(mode="json"), sort_keys=False)
        self._writer.add_text("config", re.sub("^", "    ", text, flags=re.MULTILINE), step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a resumed run sends no step again

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self._writer.add_text(name, escaped_markdown_table(rows), step)

    def close(self, end: End) -> None:
        self._writer.close()


def escaped_markdown_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with escaped cells: a response may contain Markdown or HTML itself."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else value or ""
    return "<br>".join(PUNCTUATION.sub(lambda sign: f"&#{ord(sign[0])};", line) for line in text.splitlines())
