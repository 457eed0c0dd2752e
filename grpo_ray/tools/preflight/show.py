"""One conversation as the exact tokens that would be trained, for a terminal and as a page of HTML."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_ray.records.visible_text import visible
from grpo_ray.tools.preflight.findings import Finding
from grpo_ray.tools.preflight.plays import Played

BOLD, DIM, PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
LONGEST_RUN = 60  # tokens shown of a stretch of context in the terminal: its beginning and its end
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}
pre{white-space:pre-wrap;font:13px/1.7 ui-monospace,monospace}
.t{background:#c8efd0;border-radius:2px;box-shadow:inset -1px 0 #fff}.e{background:#5fbf77}
.c{color:#667;box-shadow:inset -1px 0 #ddd}.fail{border-left:4px solid #c33;padding-left:.7em}
.note{border-left:4px solid #aaa;padding-left:.7em}"""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind."""

    branch: int  # from 0
    turn: int | None  # that sampled them; None for context
    tokens: list[str]
    ends_turn: bool = False

    @property
    def is_trained(self) -> bool:
        return self.turn is not None


def runs_of(played: Played, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> list[Run]:
    """Return the tokens of the episode's sequences, each split where its mask changes or a turn ends."""
    runs = []
    for branch, path in enumerate(played.paths):
        runs.append(Run(branch, None, [tokenizer.decode([token]) for token in path.prompt_token_ids]))
        bounds = [n for n in range(1, len(path.turns)) if path.turns[n] != path.turns[n - 1]]
        for start, end in zip([0, *bounds], [*bounds, len(path.turns)], strict=True):
            ids = path.response_token_ids[start:end].tolist()
            turn = int(path.turns[start]) if path.mask[start] else None
            tokens = [tokenizer.decode([token]) for token in ids]
            runs.append(Run(branch, turn, tokens, turn is not None and ids[-1] in ends))
    return runs


def as_text(runs: Sequence[Run], in_color: bool) -> Iterator[str]:
    """Yield lines for a terminal: trained tokens stand in brackets, `|` parts tokens."""
    for number, run in enumerate(runs):
        if run.branch and (number == 0 or runs[number - 1].branch != run.branch):
            yield f"  -- branch {run.branch}: its prompt is computed again --"
        tokens = run.tokens
        if not run.is_trained and len(tokens) > LONGEST_RUN + 10:
            half = LONGEST_RUN // 2
            tokens = [*tokens[:half], f" [... {len(tokens) - LONGEST_RUN:,} tokens ...] ", *tokens[-half:]]
        text = visible("|".join(tokens)).replace("\n", "\\n")
        label = f"turn {run.turn}, trained" if run.is_trained else "context"
        if run.is_trained:
            ending = "" if run.ends_turn else "  (cut off: no end token)"
            text = f"{BOLD}{text}{PLAIN}{ending}" if in_color else f"[{text}]{ending}"
        elif in_color:
            text = f"{DIM}{text}{PLAIN}"
        yield f"  {label:>15}, {len(run.tokens):>4} tokens  {text}"


def write_page(path: Path, title: str, summary: str, runs: Sequence[Run], findings: Sequence[Finding]) -> None:
    """Write the findings and the conversation as one page without scripts or other files."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts += [f"<h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>"]
    for each in findings:
        kind = "note" if each.is_note else "fail"
        lines = (f"<b>{each.name}</b> {html.escape(each.where)}", html.escape(visible(each.text)))
        parts.append(f"<p class={kind}>{'<br>'.join(lines)}<br><i>{html.escape(each.cure)}</i></p>")
    parts.append(
        "<p><span class=t>trained</span> <span class='t e'>end of turn</span> <span class=c>context</span></p>"
    )
    branch = None
    for run in runs:
        if run.branch != branch:
            parts.append(f"{'</pre>' if branch is not None else ''}<h2>Branch {run.branch}</h2><pre>")
            branch = run.branch
        for number, token in enumerate(run.tokens):
            is_end = run.ends_turn and number == len(run.tokens) - 1
            kind = "c" if not run.is_trained else "'t e'" if is_end else "t"
            tip = "context" if run.turn is None else f"turn {run.turn}"
            shown = html.escape(visible(token)).replace("\n", "\\n\n")
            parts.append(f"<span class={kind} title='{tip}'>{shown}</span>")
    path.write_text("".join([*parts, "</pre>\n"]), encoding="utf-8")
