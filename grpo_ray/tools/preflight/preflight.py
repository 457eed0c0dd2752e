"""A preflight from the target to its findings, and a conversation as the tokens that would be trained."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from grpo_ray.config.schema import nearest_name
from grpo_ray.errors import counted
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.preflight.checks import play_findings, template_findings
from grpo_ray.tools.preflight.command import PreflightOptions
from grpo_ray.tools.preflight.plays import CURES, Finding, Kind, Play, Played, play
from grpo_ray.tools.preflight.subject import Subject, load_subject

LONGEST_RUN = 60  # tokens shown of a stretch of context: its beginning and its end
TRAINED, END, CONTEXT = "green", "bold green reverse", "dim"
PAGE = (
    "<!doctype html><meta charset=utf-8><title>Preflight</title><style>{stylesheet}</style>"
    "<pre style='white-space:pre-wrap;font:14px/1.7 ui-monospace,monospace'>{code}</pre>"
)


@dataclass(frozen=True)
class Preflight:
    subject: Subject
    findings: list[Finding]
    shown: Played | None  # the episode with the most turns of a policy that knows the answer
    num_episodes: int
    seconds: float

    @property
    def faults(self) -> list[Finding]:
        return [each for each in self.findings if not each.is_note]

    def as_json(self) -> dict[str, Any]:
        """Return the result for other programs; the keys of a finding are its fields."""
        findings = [{**vars(each), "cure": each.cure, "where": each.where} for each in self.findings]
        return {
            "target": self.subject.name, "passed": not self.faults, "findings": findings,
            "num_examples": len(self.subject.examples), "num_episodes": self.num_episodes,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


def preflight(options: PreflightOptions) -> Preflight:
    """Play an environment, or grade with a reward, and return what is wrong with it.

    Raises:
        ConfigError: the configuration is not valid.
        RunError: there is no such file.
        ValueError: there is no such function, template or example, or no fault of an allowed name.
    """
    for name in options.allow:
        if name not in CURES:
            nearest = nearest_name(name, [*CURES])
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(CURES)}"
            raise ValueError(f"--allow {name}: there is no such fault; {hint}")
    started = time.monotonic()
    subject = load_subject(options)
    found, plays = [*template_findings(subject)], defaultdict[Kind, Play](Play)
    # Otherwise every episode would show the template's fault.
    if all(each.is_note or each.name in options.allow for each in found):
        for kind in get_args(Kind):
            plays[kind] = play(subject, options.seed, kind)
            if plays[kind].failure is not None:  # that of the others would be the same
                break
        found += play_findings(plays, subject.is_reward, subject.tokenizer)
    found = [replace(each, is_note=True) if each.name in options.allow else each for each in found]
    right = [each for each in plays["first"].episodes.values() if each.policy.startswith("right")]
    shown = max(right, key=lambda each: len(each.turns), default=None)
    count = sum(len(each.episodes) for each in plays.values())
    return Preflight(subject, found, shown, count, time.monotonic() - started)


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
