"""A preflight from the target to its findings."""

import time
from dataclasses import dataclass, replace
from typing import Any, get_args

from grpo_ray.config.schema import nearest_name
from grpo_ray.tools.preflight.checks import Plays, play_findings, template_findings
from grpo_ray.tools.preflight.command import PreflightOptions
from grpo_ray.tools.preflight.findings import CURES, Finding
from grpo_ray.tools.preflight.plays import Kind, Play, Played, play
from grpo_ray.tools.preflight.subject import Subject, load_subject


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
    found, plays = [*template_findings(subject)], Plays()
    if all(each.is_note for each in found):  # otherwise every episode would show the template's fault
        played: dict[Kind, Play] = {}
        for kind in get_args(Kind):
            played[kind] = play(subject, options.seed, kind)
            if played[kind].failure is not None:  # that of the others would be the same
                break
        plays = Plays(**played)
        found += play_findings(plays, subject.is_reward, subject.tokenizer)
    found = [replace(each, is_note=True) if each.name in options.allow else each for each in found]
    right = [each for each in plays.first.episodes.values() if each.policy.startswith("right")]
    shown = max(right, key=lambda each: len(each.turns), default=None)
    count = sum(len(each.episodes) for each in vars(plays).values())
    return Preflight(subject, found, shown, count, time.monotonic() - started)
