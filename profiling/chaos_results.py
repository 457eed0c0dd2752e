"""The outcomes of the faults: one line per fault in FOLDER/seed-N/faults.jsonl, and a table of all."""

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS

from grpo_ray.tools.audit.audit import AuditReport

NOT_RECOVERED = "NOT RECOVERED"
MARKS = "<!-- chaos -->", "<!-- /chaos -->"


@dataclass(frozen=True)
class Record:
    """One fault, or two at once."""

    seed: int
    step: int  # of the newest line at the injection
    faults: tuple[str, ...]
    what: str  # what was done
    outcome: str
    seconds: float  # until the run had recovered and made progress

    def __str__(self) -> str:
        return f"{' + '.join(self.faults)}: {self.outcome} in {self.seconds:.1f} s ({self.what})"

    @property
    def place(self) -> str:
        return f"{' + '.join(self.faults)}: {self.outcome} (seed {self.seed}, after step {self.step})"

    @property
    def is_as_it_must_be(self) -> bool:
        """True if a fault alone had one of its outcomes; after two at once the run need only recover."""
        if self.outcome == NOT_RECOVERED or "still there" in self.what or "instead of" in self.what:
            return False
        return len(self.faults) > 1 or self.outcome in FAULTS[self.faults[0]].outcomes


@dataclass(frozen=True)
class Result:
    """One seed's run."""

    name: str
    records: tuple[Record, ...]
    audit: dict[str, Any] | None  # AuditReport's fields
    comparison: dict[str, Any] | None


def add_record(folder: Path, record: Record) -> None:
    with (folder / "faults.jsonl").open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def write_audit(folder: Path, report: AuditReport) -> None:
    (folder / "audit.json").write_text(json.dumps(asdict(report), indent=1))


def read_results(folder: Path) -> list[Result]:
    return [_read_result(seed) for seed in sorted(folder.glob("seed-*")) if (seed / "faults.jsonl").exists()]


def _read_result(folder: Path) -> Result:
    rows = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    records = tuple(Record(**{**row, "faults": tuple(row["faults"])}) for row in rows)
    files = (folder / "audit.json", folder / "comparison.json")
    audit, comparison = (json.loads(file.read_text()) if file.exists() else None for file in files)
    return Result(folder.name, records, audit, comparison)


def table(results: Sequence[Result]) -> tuple[str, bool]:
    """Return the table in Markdown, and whether every outcome is as it must be."""
    records = [record for result in results for record in result.records]
    lines = ["| fault | times | outcome | seconds: median | largest |", "|---|---|---|---|---|"]
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_name[record.faults[0] if len(record.faults) == 1 else "two at once"].append(record)
    lines += [_line(name, by_name[name]) for name in [*FAULTS, "two at once"] if name in by_name]
    pairs = [f"{' + '.join(r.faults)} ({r.outcome})" for r in by_name["two at once"]]
    lines += ["", f"Two at once: {'; '.join(pairs)}."] if pairs else []
    lines += ["", *_run_lines(results)]
    odd = [record for record in records if not record.is_as_it_must_be]
    lines += ["", "Not as it must be:", "", *(f"- {record.place}" for record in odd)] if odd else []
    audited = all(result.audit is not None and not result.audit["problems"] for result in results)
    compared = all(result.comparison is None or result.comparison["is_within"] for result in results)
    return "\n".join(lines), not odd and audited and compared


def _line(name: str, records: Sequence[Record]) -> str:
    outcomes = Counter(record.outcome for record in records)
    seconds = [record.seconds for record in records]
    said = ", ".join(f"{outcome} {n}" if len(outcomes) > 1 else outcome for outcome, n in outcomes.items())
    if name == "two at once":
        said = "below"
    return f"| {name} | {len(records)} | {said} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"


def _run_lines(results: Sequence[Result]) -> list[str]:
    lines = ["| run | faults | steps | groups | completions | audit | validation reward | undisturbed |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for result in results:
        num_faults = sum(len(record.faults) for record in result.records)
        audit, comparison = result.audit, result.comparison
        if audit is None:
            lines.append(f"| {result.name} | {num_faults} | | | | not done | | |")
            continue
        found = f"{len(audit['problems'])} problems" if audit["problems"] else "clean"
        reward = f"{comparison['reward']:.3f} ± {comparison['error']:.3f}" if comparison else ""
        others = f"{comparison['others']}, step {comparison['step']}" if comparison else ""
        counts = f"{audit['num_steps']} | {audit['num_groups']} | {audit['num_completions']}"
        lines.append(f"| {result.name} | {num_faults} | {counts} | {found} | {reward} | {others} |")
    return lines


def write_table(path: Path, text: str) -> None:
    """Write the table between the marks in the file, which are appended if it has none."""
    before = path.read_text() if path.exists() else ""
    if MARKS[0] not in before:
        before += f"\n{MARKS[0]}\n{MARKS[1]}\n"
    block = f"{MARKS[0]}\n{text}\n{MARKS[1]}"
    pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
    path.write_text(re.sub(pattern, lambda _: block, before, flags=re.DOTALL))
