"""`grpo-ray preflight`: its options, what it prints, and its exit status."""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Argument, Command, Option, natural, positive


@dataclass(frozen=True)
class PreflightOptions:
    target: Annotated[
        str,
        Argument(
            "TARGET", "MODULE:FUNCTION or FILE.py:FUNCTION (an episode, a reward, a TRL class), or a CONFIG"
        ),
    ]
    overrides: Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes to a CONFIG")] = ()
    template: Annotated[
        str | None, Option("MODEL", "the model with the tokenizer and chat template to use, or a .jinja file")
    ] = None
    examples: Annotated[
        str | None,
        Option("FILE", "questions and answers (.jsonl, .parquet, .csv); default: `examples` in the module"),
    ] = None
    num_examples: Annotated[int, Option("N", "examples to play (default: %(default)s)", type=positive)] = 3
    seed: Annotated[int, Option("N", "seed of examples and policies (default: %(default)s)", type=natural)] = 0
    allow: Annotated[tuple[str, ...], Option("FAULT", "accept the fault of this name; repeatable")] = ()
    json: Annotated[str | None, Option("FILE", "write the result as JSON; - prints only that")] = None
    html: Annotated[str | None, Option("FILE", "write the findings and a conversation as a web page")] = None


def _preflight(options: PreflightOptions) -> int:
    from grpo_ray.tools.preflight.preflight import preflight, show

    with shown_plainly(), contextlib.redirect_stdout(sys.stderr):  # a module may print as it is imported
        for path in [Path(each) for each in (options.json, options.html) if each and each != "-"]:
            is_new = not path.exists()
            path.open("a").close()  # an error comes now, and not after all plays
            if is_new:
                path.unlink()
        found = preflight(options)
    if options.json != "-" or options.html:
        with contextlib.redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
            show(found, options.html)
    if options.json == "-":
        print(json.dumps(found.as_json()))
    elif options.json is not None:
        Path(options.json).write_text(json.dumps(found.as_json(), indent=1) + "\n")
    return 1 if found.faults else 0


PREFLIGHT = Command(
    "preflight", PreflightOptions, _preflight, "check an environment or a reward by playing it",
    "Play an environment, or call a reward, with policies that have the answer, wander, or are random. Needs "
    "no Ray, vLLM or weights. Exit status 1: it found a fault; 2: it could not start.",
)  # fmt: skip
