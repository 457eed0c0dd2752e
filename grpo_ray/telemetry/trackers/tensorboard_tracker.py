"""TensorBoard: event files in the run's folder."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import yaml

from grpo_ray.telemetry.trackers.tracker import End, Row, TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 10
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # ASCII's: all that Markdown and HTML give a meaning


class TensorBoardTracker:
    def __init__(self) -> None:
        self._run: TrackedRun | None = None
        self._writer: SummaryWriter | None = None

    def start(self, run: TrackedRun) -> str:
        self._run = run
        return f"tensorboard --logdir {run.folder.parents[2]}"  # where this run's folder is one of several

    def go_on_from(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert self._run is not None
        if self._writer is not None:
            self._writer.close()
        # TensorBoard then shows nothing that earlier files have of later steps.
        self._writer = SummaryWriter(str(self._run.folder), purge_step=step + 1, flush_secs=FLUSH_S)
        text = yaml.safe_dump(self._run.config.model_dump(mode="json"), sort_keys=False)
        self._writer.add_text("config", re.sub("^", "    ", text, flags=re.MULTILINE), step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        assert self._writer is not None
        self._writer.add_text(name, markdown_table(rows), step)

    def close(self, end: End) -> None:
        assert self._writer is not None
        self._writer.close()


def markdown_table(rows: Sequence[Row]) -> str:
    """A table in Markdown whose cells are shown as they are: a response may hold Markdown or HTML itself."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:g}"
    return "<br>".join(PUNCTUATION.sub(lambda sign: f"&#{ord(sign[0])};", line) for line in text.splitlines())
