"""A pytest plugin (`-p mutant_recorder`) that records which lines each test file executes, and its seconds.

It writes coverage's files to the folder in the environment variable MUTANT_RECORDS, and `tests.json` from the
process that hands out the tests. A file's lines begin with its first test: every worker has imported all test
files by then, so an import's lines belong to none.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from coverage import Coverage

PACKAGE = Path(__file__).parents[2] / "grpo_ray"
FOLDER = Path(os.environ["MUTANT_RECORDS"])
coverage = Coverage(FOLDER / ".coverage", data_suffix=True, source=[str(PACKAGE)], config_file=False)
seconds: dict[str, float] = defaultdict(float)
failed: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Start before conftest.py imports a module of the package."""
    coverage.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count the lines from here on for the test's file."""
    coverage.switch_context(_file(item.nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a phase of a test; with xdist, the process that hands out the tests sees those of all workers."""
    seconds[_file(report.nodeid)] += report.duration
    if report.failed:
        failed.add(_file(report.nodeid))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process has recorded."""
    coverage.stop()
    coverage.save()
    if not hasattr(session.config, "workerinput"):
        (FOLDER / "tests.json").write_text(json.dumps({"seconds": seconds, "failed": sorted(failed)}))


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]
