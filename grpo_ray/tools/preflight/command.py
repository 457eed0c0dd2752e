"""`grpo-ray preflight`: its options, what it prints, and its exit status."""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.records.episode_metrics import counted
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command, Option, positive

if TYPE_CHECKING:
    from grpo_ray.tools.preflight.preflight import Preflight


@dataclass(frozen=True)
class PreflightOptions:
    target: Annotated[
        str | None,
        Argument(
            "TARGET", "MODULE:FUNCTION or FILE.py:FUNCTION (an episode, a reward, a TRL class), or a CONFIG"
        ),
    ] = None
    overrides: Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes to a CONFIG")] = ()
    env: Annotated[
        str | None, Option("NAME", "instead: reasoning_gym:NAME, gymnasium:ID or verifiers:TASKSET")
    ] = None
    template: Annotated[
        str | None,
        Option("MODEL", "the model with the tokenizer and chat template to use, or a .jinja file"),
    ] = None
    examples: Annotated[
        str | None,
        Option("FILE", "questions and answers (.jsonl, .parquet); default: `examples` in the module"),
    ] = None
    num_examples: Annotated[int, Option("N", "examples to play (default: %(default)s)", type=positive)] = 3
    seed: Annotated[int, Option("N", "seed of examples and policies (default: %(default)s)")] = 0
    allow: Annotated[tuple[str, ...], Option("FAULT", "accept the fault of this name; repeatable")] = ()
    json: Annotated[str | None, Option("FILE", "write the result as JSON; - prints only that")] = None
    html: Annotated[str | None, Option("FILE", "write the findings and a conversation as a web page")] = None


def _preflight(options: PreflightOptions) -> int:
    from grpo_ray.tools.preflight.preflight import preflight

    with shown_plainly(), contextlib.redirect_stdout(sys.stderr):  # a module may print as it is imported
        found = preflight(options)
    if options.json == "-":
        print(json.dumps(found.as_json()))
    else:
        print_found(found, options.html)
        if options.json is not None:
            Path(options.json).write_text(json.dumps(found.as_json(), indent=1) + "\n")
    return 1 if found.faults else 0


def print_found(found: "Preflight", page: str | None = None) -> None:
    """Print one conversation as tokens, then the findings; write them to a page if asked to."""
    from grpo_ray.tools.preflight.show import as_text, runs_of, write_page

    subject, shown = found.subject, found.shown
    counts = f"{len(subject.examples)} examples, {found.num_episodes} episodes, {found.seconds:.1f} s"
    print_visible(f"{subject.name}: {counts}")
    runs = [] if shown is None else runs_of(shown, subject.tokenizer, subject.end_token_ids)
    if shown is not None:
        print_visible(
            f"\nexample {shown.example} as the policy {shown.policy!r} plays it; reward {shown.reward}:"
        )
        for line in as_text(runs, sys.stdout.isatty()):
            print(line)
    print()
    for each in found.findings:
        print_visible(f"{'note' if each.is_note else 'FAULT'} {each}")
    count = len(found.faults)
    print(f"{counted(count, 'fault')}; --allow NAME accepts one" if count else "no fault found")
    if page is not None:
        write_page(Path(page), f"Preflight of {subject.name}", counts, runs, found.findings)
        print(f"page: {page}")


PREFLIGHT = Command(
    "preflight", PreflightOptions, _preflight, "check an environment or a reward by playing it",
    "Play an environment, or call a reward, with policies that have the answer, wander, or are random. Needs "
    "no Ray, vLLM or weights. Exit status 1: it found a fault; 2: it could not start.",
)  # fmt: skip
