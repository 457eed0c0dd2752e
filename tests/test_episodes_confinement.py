"""The confinement of environments: each attempt runs in a process of its own, which enters it for good."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.confinement import (
    HINT,
    NO_MEMORY_HINT,
    SCRATCH,
    Confinement,
    _scratch_folder,
    check_paths,
    hint_for,
)
from grpo_ray.rewards.isolation.landlock import landlock_version

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")


def attempt(code: str, readable: tuple[str, ...] = (), writable: tuple[str, ...] = (), gib: float = 1) -> str:
    """Run code in a thread that a confined thread starts, as episodes are; return its output."""
    script = f"""
        import threading
        from grpo_ray.episodes.confinement import Confinement
        Confinement({readable!r}, {writable!r}, {gib!r}).enter()
        def episode():
            try:
                exec({textwrap.dedent(code)!r}, {{}})
                print("done")
            except (OSError, MemoryError) as error:
                print(type(error).__name__)
        thread = threading.Thread(target=episode)
        thread.start()
        thread.join()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@needs_landlock
def test_other_files_are_neither_read_nor_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    assert attempt(f"open({str(secret)!r}).read()") == "PermissionError"
    assert attempt(f"open({str(secret)!r}, 'w')") == "PermissionError"
    assert attempt(f"import os; os.remove({str(secret)!r})") == "PermissionError"
    assert secret.read_text() == "key"


@pytest.mark.slow
@needs_landlock
def test_named_paths_and_a_temporary_folder_are_open(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    out.mkdir()
    (data / "file").write_text("text")
    assert attempt(f"open({str(data / 'file')!r}).read()", readable=(str(data),)) == "done"
    assert attempt(f"open({str(data / 'file')!r}, 'w')", readable=(str(data),)) == "PermissionError"
    assert attempt(f"open({str(out / 'new')!r}, 'w').write('x')", writable=(str(out),)) == "done"
    assert (out / "new").read_text() == "x"
    assert attempt("import tempfile; tempfile.TemporaryFile().write(b'x')") == "done"


def test_the_workers_own_memory_is_measured() -> None:
    code = "from grpo_ray.telemetry.memory import resident_bytes; assert resident_bytes(with_children=False)"
    assert attempt(code) == "done"


@pytest.mark.slow
def test_modules_are_imported_and_the_network_stays(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt(f"import socket; socket.create_connection(('127.0.0.1', {port}))") == "done"
    assert attempt("import xml.dom.minidom, sqlite3, jinja2.sandbox") == "done"


@pytest.mark.slow
def test_memory_is_limited() -> None:
    assert attempt("x = bytearray(2 * 2**30)", gib=0.5) == "MemoryError"
    assert attempt("x = bytearray(2**28)", gib=0.5) == "done"


def test_errors_name_the_remedy() -> None:
    assert hint_for(PermissionError()) == HINT
    assert hint_for(MemoryError()) == NO_MEMORY_HINT
    assert hint_for(ValueError()) == ""


def test_paths_must_exist(tmp_path: Path) -> None:
    check_paths(EpisodesConfig(readable_paths=(str(tmp_path),)))
    with pytest.raises(ValueError, match=r"episodes\.writable_paths: there is no '/absent'"):
        check_paths(EpisodesConfig(writable_paths=("/absent",)))
    assert Confinement.of(EpisodesConfig(confined=False)) is None


def test_temporary_folders_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive = tmp_path / f"{SCRATCH}999999999-a", tmp_path / f"{SCRATCH}{os.getpid()}-b"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "file").touch()
    made = Path(_scratch_folder())
    assert sorted(tmp_path.iterdir()) == sorted([alive, made])


def test_another_worker_may_remove_the_same_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / f"{SCRATCH}999999999-gone"])
    assert Path(_scratch_folder()).is_dir()
