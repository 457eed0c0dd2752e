"""A preflight from the target to its findings."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_ray.tools.preflight.checks import Plays, play_findings
from grpo_ray.tools.preflight.findings import Finding
from grpo_ray.tools.preflight.plays import Played, play
from grpo_ray.tools.preflight.subject import Subject, load_subject
from grpo_ray.tools.preflight.template import template_findings


@dataclass(frozen=True)
class Preflight:
    """The result of a preflight."""

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


def preflight(
    target: str | None = None,
    *,
    env: str | None = None,
    template: str | None = None,
    examples: str | None = None,
    num_examples: int = 3,
    seed: int = 0,
    allow: Collection[str] = (),
    overrides: Sequence[str] = (),
) -> Preflight:
    """Play an environment, or grade with a reward, and return what is wrong with it.

    Args:
        target: `module:function`, `file.py:function`, or a configuration.
        env: an environment of a package instead: `reasoning_gym:NAME`, `gymnasium:ID` or `verifiers:TASKSET`.
        template: a model, for its tokenizer and chat template, or a `.jinja` file; default: the configuration's
            model, or the plain chat of tiny models.
        examples: a file of questions and answers; default: `examples` in the module.
        num_examples: examples to play.
        allow: names of findings that are meant.

    Raises:
        ConfigError: the configuration is not valid.
        RunError: there is no such file.
        ValueError: there is no such function, environment, template or example.
    """
    started = time.monotonic()
    subject = load_subject(target, env, template, examples, seed, overrides)
    subject = replace(subject, examples=_spread(subject.examples, num_examples))
    found, plays = [*template_findings(subject)], Plays()
    if all(each.is_note for each in found):  # otherwise every episode would show the template's fault
        plays = play_all(subject, seed)
        found += play_findings(plays, subject.is_reward, subject.tokenizer)
    found = [replace(each, is_note=True) if each.name in allow else each for each in found]
    right = [each for each in plays.first.episodes.values() if each.policy.startswith("right")]
    shown = max(right, key=lambda each: len(each.turns), default=None)
    count = sum(len(each.episodes) for each in vars(plays).values())
    return Preflight(subject, found, shown, count, time.monotonic() - started)


def play_all(subject: Subject, seed: int) -> Plays:
    """Play the subject four times."""
    order = range(len(subject.examples))
    return Plays(
        first=play(subject, seed, order, only_scripts=False, watched="exceptions"),
        backwards=play(subject, seed, order[::-1], watched="calls"),
        again=play(subject, seed, order),
        shifted=play(subject, seed, order, shifted=True),
    )


def _spread(examples: Sequence[Any], number: int) -> list[Any]:
    """Return examples from the whole set."""
    if not examples:
        raise ValueError("there is no example to play; give --examples FILE, or define `examples`")
    return [examples[len(examples) * n // number] for n in range(min(number, len(examples)))]
