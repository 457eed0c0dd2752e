"""The outcomes of a campaign: FOLDER/results.jsonl, one line per fault and per audited run, and tables."""

import json
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS

NOT_RECOVERED, NOT_POSSIBLE = "NOT RECOVERED", "not possible"
BUDGET_USED_UP = "ended by its budget, resumed"  # with default budgets, which are per hour


@dataclass(frozen=True)
class Record:
    """One fault, or two at once."""

    scenario: str
    seed: int
    commit: str
    step: int  # of the newest line at the injection
    faults: tuple[str, ...]
    what: str  # what was done
    outcome: str
    wrong: tuple[str, ...]  # what must not be
    seconds: float  # until the run had recovered and made progress

    def __str__(self) -> str:
        wrong = f"; WRONG: {'; '.join(self.wrong)}" if self.wrong else ""
        return f"{' + '.join(self.faults)}: {self.outcome} in {self.seconds:.1f} s ({self.what}){wrong}"

    @property
    def is_as_it_must_be(self) -> bool:
        """True if a fault alone had its outcome; after two at once the run need only recover."""
        if self.outcome == NOT_RECOVERED or self.wrong:
            return False
        return (
            len(self.faults) > 1
            or self.outcome == BUDGET_USED_UP
            or FAULTS[self.faults[0]].is_as_it_must_be(self.outcome)
        )


@dataclass(frozen=True)
class Audited:
    """One run of the campaign at its end."""

    scenario: str
    seed: int
    commit: str
    num_steps: int
    num_groups: int
    num_completions: int
    problems: tuple[str, ...]


class Results:
    """The file of a campaign's results; it grows, so that an interrupted campaign continues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"

    def add(self, result: Record | Audited) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    @property
    def records(self) -> list[Record]:
        return [Record(**_tuples(row)) for row in self._rows() if "faults" in row]

    @property
    def audits(self) -> list[Audited]:
        return [Audited(**_tuples(row)) for row in self._rows() if "problems" in row]

    def is_audited(self, scenario: str, seed: int) -> bool:
        return any((audited.scenario, audited.seed) == (scenario, seed) for audited in self.audits)

    def num_drawn(self) -> Counter[str]:
        return Counter(fault for record in self.records for fault in record.faults)

    def _rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def table(results: Results) -> tuple[str, bool]:
    """Return the tables in Markdown, and whether every outcome is as it must be and every audit clean."""
    records = [record for record in results.records if record.outcome != NOT_POSSIBLE]
    alone: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        alone[record.faults[0] if len(record.faults) == 1 else "two at once"].append(record)
    kinds = {fault for record in records for fault in record.faults}
    num_faults = sum(len(record.faults) for record in records)
    odd = [record for record in records if not record.is_as_it_must_be]
    lines = [f"{num_faults} faults of {len(kinds)} kinds, {len(odd)} not as they must be.", ""]
    lines += ["| fault | times | outcome | seconds: median | largest |", "|---|---|---|---|---|"]
    lines += [_line(name, alone[name]) for name in [*FAULTS, "two at once"] if name in alone]
    pairs = [f"{' + '.join(r.faults)} ({r.outcome})" for r in alone["two at once"]]
    lines += ["", f"Two at once: {'; '.join(pairs)}."] if pairs else []
    lines += ["", *_run_lines(results, records)]
    lines += (
        ["", "Not as it must be:", "", *(f"- {r.scenario}, after step {r.step}: {r}" for r in odd)]
        if odd
        else []
    )
    is_clean = all(not audited.problems for audited in results.audits)
    return "\n".join(lines), not odd and is_clean


def _line(name: str, records: Sequence[Record]) -> str:
    outcomes = Counter(record.outcome for record in records)
    seconds = [record.seconds for record in records]
    said = ", ".join(f"{outcome} {n}" if len(outcomes) > 1 else outcome for outcome, n in outcomes.items())
    if name == "two at once":
        said = "below"
    return f"| {name} | {len(records)} | {said} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"


def _run_lines(results: Results, records: Sequence[Record]) -> list[str]:
    lines = ["| scenario | seed | commit | faults | steps | groups | completions | audit |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for audited in results.audits:
        ours = [
            record for record in records if (record.scenario, record.seed) == (audited.scenario, audited.seed)
        ]
        num_faults = sum(len(record.faults) for record in ours)
        found = f"{len(audited.problems)} problems" if audited.problems else "clean"
        counts = f"{num_faults} | {audited.num_steps} | {audited.num_groups} | {audited.num_completions}"
        lines.append(f"| {audited.scenario} | {audited.seed} | {audited.commit} | {counts} | {found} |")
    return lines
