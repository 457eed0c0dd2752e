"""Frames of `grpo-ray top`: a run's view, drawn with rich until the run has ended or the user quits."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_ray.records.run_files import RunDirectory
from grpo_ray.records.visible_text import told, visible
from grpo_ray.tools.look import TopOptions
from grpo_ray.tools.top.bottleneck import (
    Problems,
    bottleneck,
    learner_figures,
    rank_figures,
    rank_hint,
    ranks_line,
    stage_seconds,
    steady,
)
from grpo_ray.tools.top.run_view import RunView, read_view
from grpo_ray.watch.console import VisibleConsole
from grpo_ray.watch.metrics_catalog import SYNC
from grpo_ray.watch.run_state import ActorState, RunState

WIDE = 112  # console columns from which everything is shown
MIN_STEPS, STEPS_WITHOUT_TERMINAL = 3, 10
ENDING_STYLES = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}

Row = Mapping[str, Any]
Column = tuple[str, Sequence[str], str]  # heading, metrics that add up to its value, format

COLUMNS: tuple[Column, ...] = (
    ("step", ("step",), "{:.0f}"),
    ("reward", ("reward/mean",), "{:.3f}"),
    ("lag", ("lag/max",), "{:.0f}"),
    ("seconds", ("timing/step_s",), "{:.2f}"),
    ("generate", ("timing/generate_s",), "{:.2f}"),
    ("wait", ("timing/wait_for_batch_s",), "{:.2f}"),
    ("train", ("timing/train_s",), "{:.2f}"),
    ("sync", SYNC, "{:.2f}"),
    ("tokens/s", ("throughput/sampled_tokens_per_s",), "{:,.0f}"),
)
MORE_COLUMNS: tuple[Column, ...] = (
    ("tokens", ("rollout/response_tokens/mean",), "{:.1f}"),
    ("cut off", ("rollout/truncated_frac",), "{:.0%}"),
    ("loss", ("loss/policy",), "{:+.4f}"),
    ("entropy", ("policy/entropy",), "{:.3f}"),
    ("grad", ("optim/grad_norm",), "{:.3f}"),
    ("eval", ("eval/reward",), "{:.3f}"),
)
EPISODE_COLUMNS: tuple[Column, ...] = (
    ("turns", ("episodes/turns/mean",), "{:.1f}"),
    ("finished", ("episodes/status/finished",), "{:.0%}"),
    ("longest", ("episodes/seconds/max",), "{:.0f} s"),
)
"""Shown if the run's newest steps have episodes; the last one only with space for all columns."""


def draw_frame(view: RunView, console: Console) -> RenderableType:
    """Draw the view as wide as the console and, on a terminal, no higher."""
    above = [*_header(view), *_actors(view, console.width), _bottleneck(view)]
    below = _events(view)
    height = STEPS_WITHOUT_TERMINAL
    if console.is_terminal:
        taken = len(console.render_lines(Group(*above, *below), pad=False))
        height = max(MIN_STEPS, console.height - taken - 4)
    return Group(*above, _steps(view.steps[-height:], console.width), *below)


def _header(view: RunView) -> list[RenderableType]:
    state = view.state
    lines: list[RenderableType] = [plain_text(str(view.path), "bold")]
    if state is None:
        lines.append(Text("no state.json yet: the run is starting"))
        return lines
    now = state.time if view.is_over else max(view.read_at, state.time)  # this clock may be behind the host's
    began = timedelta(seconds=max(0, round(now - state.began)))  # the clock may have been set back
    lines.append(_progress(state))
    if state.ending is not None:
        style = ENDING_STYLES[state.ending.kind]
        text = f": {state.ending.text}" if state.ending.text else ""
        lines.append(plain_text(f"{state.ending.kind} {began} after the last start{text}", style))
    elif (silence := view.silence) is not None:
        run = RunDirectory(view.path, state.is_local)
        command = f"resume with: {run.resume_command}" if "and is gone" in silence else ""
        lines.append(plain_text("\n".join(filter(None, [silence, command])), "bold red"))
    else:
        lines.append(plain_text(f"driver: process {state.pid} on {state.host}, for {began}", "dim"))
    return lines


def _progress(state: RunState) -> RenderableType:
    now, line = state.now, Table.grid(padding=(0, 2))
    facts = f"step {now.step}/{state.num_steps}"
    bar = ProgressBar(total=state.num_steps, completed=now.step, width=16)
    if state.ending is not None:
        line.add_row(facts, bar)
    else:
        line.add_row(plain_text(state.phase, "bold cyan"), facts, bar)
    return line


def _actors(view: RunView, width: int) -> list[RenderableType]:
    if view.state is None or view.is_over or not view.state.now.actors:
        return []
    now, shares = view.state.now, stage_shares(view.steps, num_stages=2 if width >= WIDE else 1)
    ranks = rank_figures(steady(view.steps))
    in_collectives = {} if ranks is None else {n: f"collectives {s:.0%}" for n, s in ranks.collectives.items()}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("actor", no_wrap=True, min_width=max(len(actor.name) for actor in now.actors))
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("for", justify="right", no_wrap=True, min_width=len("999.9 s"))
    if shares:
        table.add_column("recent time", no_wrap=True, overflow="ellipsis", max_width=width // 2)
    for actor in now.actors:
        seconds = "" if actor.doing is None else f"{actor.for_s:.1f} s"
        row: list[RenderableType] = [plain_text(actor.name), _doing(actor), Text(seconds, style="dim")]
        recent = (shares.get(actor.name), in_collectives.get(actor.name))
        row.append(plain_text("; ".join(filter(None, recent))))
        table.add_row(*row[: len(table.columns)])
    groups = (
        f"{now.num_sampling} groups in sampling or grading, {now.num_buffered} in the buffer; "
        f"Generators run version {now.published_version}"
    )
    return [Text(), table, Text(groups, style="dim")]


def _doing(actor: ActorState) -> Text:
    if actor.doing is None:
        return Text("nothing", style="dim")
    more = f" (and {actor.num_calls - 1} more)" if actor.num_calls > 1 else ""
    return plain_text(actor.doing + more, "yellow" if actor.is_waiting else "green")


def stage_shares(rows: Sequence[Row], num_stages: int) -> dict[str, str]:
    """Return each actor's largest stages by its own clock: `train 61%, wait for batch 35%`."""
    texts = {}
    for actor, stages in stage_seconds(rows).items():
        whole = sum(stages.values())
        largest = sorted(stages.items(), key=lambda stage: -stage[1])[:num_stages]
        parts = [f"{name.replace('_', ' ')} {spent / whole:.0%}" for name, spent in largest if spent]
        texts[actor] = ", ".join(parts)
    return texts


def _bottleneck(view: RunView) -> RenderableType:
    rows = steady(view.steps)
    ranks, problems = rank_figures(rows), Problems(view.config, view.steps)
    lines = [Text(f"! {text}", style="bold red") for text in problems.errors()]
    lines += [Text(f"! {text}", style="yellow") for text in problems.cut_off()]
    if lines:
        lines[0].append(f" (steps {view.steps[0]['step']} to {view.steps[-1]['step']})", style="dim")
    lines.append(Text(bottleneck(rows), style="bold"))
    if hint := rank_hint(ranks):
        lines.append(Text(f"! {hint}", style="yellow"))
    if figures := learner_figures(rows):
        lines.append(Text(figures, style="dim"))
    if ranks is not None:
        lines.append(Text(ranks_line(ranks), style="dim"))
    return Group(Text(), *lines)


def _steps(rows: Sequence[Row], width: int) -> RenderableType:
    if not rows:
        return Group()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = []
    for heading, names, form in _columns(rows, width):
        known = [[row[name] for name in names if row.get(name) is not None] for row in rows]
        cells = [form.format(sum(values)) if values else "" for values in known]
        width -= max(map(len, (heading, *cells))) + 2
        if width < 0:
            break  # numbers that are cut would mislead
        table.add_column(heading, justify="right", no_wrap=True)
        columns.append(cells)
    for each in zip(*columns, strict=True):
        table.add_row(*each)
    return Group(Text(), table)


def _columns(rows: Sequence[Row], width: int) -> tuple[Column, ...]:
    """Return the columns that fit; those of episodes take the place of the times of the Learner's stages."""
    is_wide = width >= WIDE
    if not any("episodes/turns/mean" in row for row in rows):
        return COLUMNS + MORE_COLUMNS if is_wide else COLUMNS
    plain = tuple(column for column in COLUMNS if column[0] not in ("generate", "wait"))
    return plain + EPISODE_COLUMNS + MORE_COLUMNS if is_wide else plain + EPISODE_COLUMNS[:2]


def _events(view: RunView) -> list[RenderableType]:
    lines = []
    for event in view.events[-3:]:
        is_today = view.read_at - event["time"] < 20 * 3600  # else the time alone would mean a later day
        clock = time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", time.localtime(event["time"]))
        lines.append(_line(f"{clock} {told(event.get('actor'), event['text'])}", "dim"))
    shown = {told(event.get("actor"), event["text"]) for event in view.events}
    warnings = view.state.warnings if view.state is not None and not view.is_over else ()
    lines += [_line(f"! {text}", "yellow") for text in warnings[-3:] if text not in shown]
    return [Text(), *lines] if lines else []


def _line(text: str, style: str) -> Text:
    """Join the text's lines into one."""
    return Text(" ".join(visible(text).split()), style=style, overflow="ellipsis", no_wrap=True)


def plain_text(text: str, style: str = "") -> Text:
    """Return the text with characters that a terminal would obey shown instead."""
    return Text(visible(text), style=style)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Provide `wait(seconds)`, which returns the key that was pressed meanwhile, or "".

    The terminal's mode is restored at the end. If the input is not a terminal, no key is ever pressed.
    """
    source = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(source) if source is not None else None

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([] if source is None else [source], [], [], seconds)
        return os.read(ready[0], 1).decode(errors="replace") if ready else ""

    try:
        if source is not None:
            tty.setcbreak(source, termios.TCSADRAIN)  # keeps the keys typed before
        yield wait
    finally:
        if source is not None and before is not None:
            termios.tcsetattr(source, termios.TCSADRAIN, before)


def top(options: TopOptions, console: Console | None = None) -> None:
    """Show a run until it has ended, or until q or Ctrl-C, which do not stop the run.

    Raises:
        RunError: there is no such run, or its folder cannot be read here.
    """
    console, run = console or VisibleConsole(), RunDirectory(options.run)
    view = read_view(run)  # before the screen is taken, so that an error stays visible
    if console.is_terminal and not options.once:
        screen = Live(console=console, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), keys() as wait, screen as live:
            while not view.is_over:
                live.update(draw_frame(view, console), refresh=True)
                if wait(options.every_s) == "q":
                    break
                view = read_view(run)
    console.print(draw_frame(view, console))
