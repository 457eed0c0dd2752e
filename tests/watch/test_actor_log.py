"""The log of an actor: its own output and its child processes', in files of bounded size."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_ray.watch import actor_log
from grpo_ray.watch.actor_log import older, redirect_output, shorten

LIMIT = 20_000
ACTOR = """
import subprocess, sys, time
from pathlib import Path
from grpo_ray.watch import actor_log
actor_log.MAX_BYTES, actor_log.LOOK_EVERY_S = LIMIT, 0.01
actor_log.redirect_output(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
for number in range(3000):
    os.write(1, f"child {number:6d} {'x' * 85}\\\\n".encode())
    time.sleep(0.0003)
'''])
while child.poll() is None:
    print(f"actor {'y' * 85}", flush=True)
    time.sleep(0.003)
while Path(sys.argv[1]).stat().st_size > LIMIT:  # until it is shortened, and then not again
    time.sleep(0.01)
print("the end", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_log_is_bounded_and_holds_the_newest_output_of_all_processes(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "generator-0.log"
    subprocess.run(
        [sys.executable, "-c", ACTOR.replace("LIMIT", str(LIMIT)), str(log)], check=True, timeout=600
    )
    assert sorted(path.name for path in log.parent.iterdir()) == ["generator-0.log", "generator-0.log.1"]
    # 300 kB and more were written. A file exceeds the limit by what is written between two looks at it.
    assert log.stat().st_size < 4 * LIMIT
    assert older(log).stat().st_size < 4 * LIMIT
    before, after = older(log).read_text().splitlines(), log.read_text().splitlines()
    lines = before + after
    assert lines[-1] == "the end"
    numbers = [[int(line.split()[1]) for line in part if line.startswith("child ")] for part in (before, after)]
    assert all(part == sorted(part) for part in numbers)
    assert max(map(max, filter(None, numbers))) > 2900  # a few are lost as the log is shortened
    assert sum(map(len, numbers)) > 20
    assert any(line.startswith("actor ") for line in lines)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_log, "MAX_BYTES", 40)


@pytest.mark.usefixtures("small")
def test_the_end_of_a_large_log_is_kept_from_a_whole_line_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab") as writer:
        writer.write(b"".join(b"line %d\n" % number for number in range(100)))
        writer.flush()
        shorten(log)
        assert log.read_bytes() == b""
        assert older(log).read_bytes() == b"line 96\nline 97\nline 98\nline 99\n"
        writer.write(b"later\n")
        writer.flush()
        shorten(log)
        assert log.read_bytes() == b"later\n"
        writer.write(b"much later " * 5 + b"\n")
        writer.flush()
        shorten(log)
    assert older(log).read_bytes() == b""  # one line longer than the limit: nothing of it


@pytest.mark.usefixtures("small")
def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    log, mine = tmp_path / "logs" / "a.log", tmp_path / "mine"
    mine.write_text("mine")
    log.parent.mkdir()
    log.write_bytes(b"line\n" * 100)
    for name in (".a.log.partial", ".a.log.1.partial", "a.log.1", "b.log"):
        (log.parent / name).symlink_to(mine)
    shorten(log)
    with pytest.raises(OSError, match="symbolic links"):
        redirect_output(log.parent / "b.log")
    assert mine.read_text() == "mine"
    assert older(log).read_bytes().startswith(b"line\n")


@pytest.mark.usefixtures("small")
def test_a_log_that_cannot_be_copied_stays(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"line\n" * 100)
    older(log).mkdir()
    with pytest.raises(OSError, match="directory"):
        shorten(log)
    assert log.read_bytes() == b"line\n" * 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
