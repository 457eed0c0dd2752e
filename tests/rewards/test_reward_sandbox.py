"""The sandbox of grading workers: each line of docs/threats.md, tried as root and as another user."""

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from run_process import output_of
from sandbox_attempts import CASES, GAPS

from grpo_ray.config import Config
from grpo_ray.rewards.isolation.confinement import Protection, protection_here
from grpo_ray.rewards.isolation.landlock import Ruleset
from grpo_ray.rewards.isolation.readable import readable_paths
from grpo_ray.run import preparation

Outcomes = dict[str, dict[str, dict[str, str]]]
REFUSALS = {"EPERM", "EACCES", "EMFILE", "MemoryError", "ValueError", "RuntimeError"}

full = pytest.mark.skipif(
    protection_here().landlock < 6
    or not protection_here().has_filter
    or platform.machine() != "x86_64"
    or os.geteuid() != 0,
    reason="needs root, a kernel with all parts, and the processor of the attempts' numbers",
)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Make all attempts, in all cases; not in one of pytest's folders, which only their owner can enter."""
    script = Path(__file__).parents[1] / "sandbox_attempts.py"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # another user's children work in it
        outcomes: Outcomes = json.loads(output_of(sys.executable, script, folder))
    return outcomes


@full
@pytest.mark.slow
def test_a_worker_cannot_do_what_the_page_on_threats_denies_and_a_free_process_can(outcomes: Outcomes) -> None:
    text = " ".join(Path("docs/threats.md").read_text().split())
    assert outcomes["free"].keys() == outcomes["root"].keys() == outcomes["nobody"].keys()
    for promise, done in outcomes["free"].items():
        assert promise in text
        assert set(done.values()) == {"done"}, done
        for user in ("root", "nobody"):
            denied = outcomes[user][promise]
            assert denied.keys() == done.keys()
            assert set(denied.values()) <= REFUSALS, denied


# ---- kernels that offer less ----


@full
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, (_, level) in CASES.items() if level and name != "root"])
def test_the_gaps_that_are_stated_are_those_that_there_are(outcomes: Outcomes, case: str) -> None:
    stated = "; ".join(CASES[case][1].gaps)
    found = {name: result for results in outcomes[case].values() for name, result in results.items()}
    for gap, names in GAPS.items():
        let_through = [found[name] == "done" for name in names]
        assert let_through == [gap in stated] * len(names), (gap, stated)


def test_a_kernel_that_offers_everything_gives_no_notice() -> None:
    assert Protection(landlock=1, has_filter=True).notices == ()  # the filter holds what Landlock 1 does not
    (notice,) = Protection(landlock=2, has_filter=False).notices
    assert "Landlock 2, no filter of system calls" in notice
    assert "truncate files; open TCP connections; signal processes" in notice
    (notice,) = Protection(landlock=0, has_filter=True).notices
    assert "could read every file, and the memory and environment of processes, of this user (docs/" in notice
    assert "no Landlock" in notice


@pytest.mark.slow
def test_a_run_says_at_its_start_what_its_kernel_does_not_hold(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "protection_here", lambda: Protection(landlock=0, has_filter=True))
    notices = preparation.check_files(tiny_config).notices
    assert not [notice for notice in notices if "isolated" in notice]  # its reward needs no process
    task = tiny_config.task.model_copy(update={"reward": "r1_zero"})
    notices = preparation.check_files(tiny_config.model_copy(update={"task": task})).notices
    assert [notice for notice in notices if "grading is less isolated on this machine (no Landlock" in notice]


# ---- files that a worker may read ----


def test_readable_files_leave_out_what_is_hidden_and_what_is_no_module_of_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, project = tmp_path / "home", tmp_path / "home" / "project"
    for folder in (home / ".ray", project / ".git", project / "data", home / "package", home / "papers"):
        folder.mkdir(parents=True)
    for file in (home / "rewards.py", home / "keys.txt", home / "package" / "__init__.py", project / ".env"):
        file.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", [str(home), str(project), str(tmp_path)])
    readable = {path for path in readable_paths() if path.startswith(str(tmp_path))}
    assert readable == {str(home / "rewards.py"), str(home / "package"), str(project / "data")}
    assert str(project / ".env") in readable_paths([str(project / ".env")])
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match=r"scorer\.readable_paths: there is no '/no/such'; give files"):
        Ruleset(["/no/such"], version=1)
    assert {*os.listdir("/proc/self/fd")} <= {*opened}  # nor is a ruleset left open
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError))  # as of another user's folder
    assert not [path for path in readable_paths() if path.startswith(str(tmp_path))]
