"""The confinement of environments: each attempt runs in a process of its own, which enters it for good."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.confinement import (
    HINT,
    NO_MEMORY_HINT,
    SCRATCH,
    Confinement,
    check_paths,
    hint_for,
    make_scratch,
    remove_abandoned,
)
from grpo_ray.rewards.isolation.landlock import landlock_version

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folders of these tests' processes out of the machine's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))


def attempt(code: str, readable: tuple[str, ...] = (), writable: tuple[str, ...] = (), gib: float = 1) -> str:
    """Run code in a thread that a confined thread starts, as episodes are; return its output."""
    script = f"""
        import threading
        from grpo_ray.episodes.confinement import Confinement, make_scratch
        from grpo_ray.watch import memory  # as a worker does
        Confinement({readable!r}, {writable!r}, {gib!r}).enter(make_scratch())
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_workers_own_memory_is_measured() -> None:
    code = "from grpo_ray.watch.memory import resident_bytes; assert resident_bytes(with_children=False)"
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


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize(
    "code",
    [
        "open('/proc/self/environ')",
        "open('/proc/thread-self/environ')",
        "import os; open(f'/proc/{os.getpid()}/environ')",
        "open('/proc/self/mem', 'rb')",
        "open('/proc/self/cmdline')",
        "import os; os.listdir('/proc/self')",
        "import os; os.listdir('/proc/self/fd')",
        "import os; os.listdir('/dev/shm')",
        "open('/dev/shm/grpo-ray-test-of-another', 'w')",
    ],
)
def test_the_processes_own_files_and_shared_memory_are_out_of_reach(code: str) -> None:
    assert attempt(code) == "PermissionError"


@pytest.fixture
def shared_file() -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.write(descriptor, b"of another process")
    os.close(descriptor)
    yield Path(name)
    Path(name).unlink(missing_ok=True)


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize("code", ["open({!r}).read()", "open({!r}, 'w')", "import os; os.remove({!r})"])
def test_shared_memory_of_others_is_neither_read_nor_removed(code: str, shared_file: Path) -> None:
    assert attempt(code.format(str(shared_file))) == "PermissionError"
    assert shared_file.read_text() == "of another process"


@pytest.mark.slow
@needs_landlock
def test_semaphores_need_a_path_of_their_own() -> None:
    code = "import multiprocessing; multiprocessing.get_context('fork').Lock()"
    assert attempt(code) == "PermissionError"
    assert attempt(code, writable=("/dev/shm",)) == "done"


IN_A_CHILD = """
    import os, subprocess, sys
    pid = os.fork()
    if pid == 0:
        try:
            open(f"/proc/{os.getpid()}/environ").close()
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    subprocess.run([sys.executable, "-c", ""])  # only programs below writable_paths can be executed
"""


@pytest.mark.slow
@needs_landlock
def test_a_child_process_is_confined_as_well() -> None:
    assert attempt(IN_A_CHILD) == "PermissionError"  # of the last line


def test_temporary_folders_without_a_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, no_folder = tmp_path / f"{SCRATCH}a", tmp_path / f"{SCRATCH}b"
    abandoned.mkdir()
    (abandoned / "file").touch()
    no_folder.symlink_to("/")
    made = Path(make_scratch())
    assert sorted(tmp_path.iterdir()) == sorted([made, no_folder])


def test_the_folder_of_a_process_that_is_not_seen_stays(tmp_path: Path) -> None:
    """Another container's pids mean nothing here; its lock does, whatever its name."""
    other = tmp_path / f"{SCRATCH}999999999-a"
    other.mkdir()
    script = f"""
        import fcntl, os
        fcntl.flock(os.open({str(other)!r}, os.O_RDONLY), fcntl.LOCK_EX)
        print(flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        remove_abandoned(str(tmp_path))
        assert other.is_dir()
        process.kill()
        process.wait()
    remove_abandoned(str(tmp_path))
    assert not other.exists()


def test_a_folder_that_another_worker_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, removed = fcntl.flock, []

    def late(descriptor: int, kind: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    made = Path(make_scratch())
    assert made.is_dir()
    assert len(removed) == 1
    assert made not in removed
