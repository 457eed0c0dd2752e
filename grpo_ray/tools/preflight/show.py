"""One conversation as the exact tokens that would be trained, with the findings, on a terminal and as HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from grpo_ray.errors import counted
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.preflight.plays import Played
from grpo_ray.tools.preflight.preflight import Preflight

LONGEST_RUN = 60  # tokens shown of a stretch of context: its beginning and its end
TRAINED, END, CONTEXT = "green", "bold green reverse", "dim"
PAGE = (
    "<!doctype html><meta charset=utf-8><title>Preflight</title><style>{stylesheet}</style>"
    "<pre style='white-space:pre-wrap;font:14px/1.7 ui-monospace,monospace'>{code}</pre>"
)


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind."""

    branch: int  # from 0
    turn: int | None  # that sampled them; None for context
    tokens: list[str]
    ends_turn: bool = False


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


def as_text(runs: Sequence[Run]) -> Iterator[Text]:
    """Yield a line per run: trained tokens stand in brackets, `|` parts tokens."""
    branch = 0
    for run in runs:
        if run.branch != branch:
            branch = run.branch
            yield Text(f"  -- branch {branch}: its prompt is computed again --")
        tokens = [visible(token).replace("\n", "\\n") for token in run.tokens]
        label = "context" if run.turn is None else f"turn {run.turn}, trained"
        line = Text(f"  {label:>15}, {len(tokens):>4} tokens  ")
        if run.turn is None:
            if len(tokens) > LONGEST_RUN + 10:
                half = LONGEST_RUN // 2
                tokens[half:-half] = [f" [... {len(tokens) - LONGEST_RUN:,} tokens ...] "]
            yield line.append("|".join(tokens), CONTEXT)
        elif run.ends_turn:
            before = "".join(f"{token}|" for token in tokens[:-1])
            yield line.append("[").append(before, TRAINED).append(tokens[-1], END).append("]")
        else:
            yield line.append("[").append("|".join(tokens), TRAINED).append("]  (cut off: no end token)")


def show(found: Preflight, page: str | None) -> None:
    """Print a conversation and the findings; write them to a page of HTML, too, if asked to."""
    subject, shown, count = found.subject, found.shown, len(found.faults)
    console = Console(record=page is not None, soft_wrap=True, markup=False, highlight=False, emoji=False)
    counts = f"{len(subject.examples)} examples, {found.num_episodes} episodes, {found.seconds:.1f} s"
    console.print(Text(visible(f"{subject.name}: {counts}\n"), "bold"))
    if shown is not None:
        console.print(
            f"example {shown.example} as the policy {shown.policy!r} plays it; reward {shown.reward}:"
        )
        for line in as_text(runs_of(shown, subject.tokenizer, subject.end_token_ids)):
            console.print(line)
    console.print()
    for each in found.findings:
        name, _, text = visible(str(each)).partition(":")
        label = ("note ", "yellow") if each.is_note else ("FAULT ", "bold red")
        console.print(Text.assemble(label, (name, "bold"), f":{text}"))
    console.print(f"{counted(count, 'fault')}; --allow NAME accepts one" if count else "no fault found")
    if page is not None:
        console.save_html(page, code_format=PAGE)
        print(f"page: {page}")
