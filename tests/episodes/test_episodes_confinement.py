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
from run_process import output_of

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.confinement import HINT, NO_MEMORY_HINT, SCRATCH, confine, hint_for, make_scratch
from grpo_ray.records.run_lock import remove_abandoned
from grpo_ray.rewards.isolation.landlock import landlock_version

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folders of these tests' processes out of the machine's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))


def attempts(
    *codes: str, readable: tuple[str, ...] = (), writable: tuple[str, ...] = (), gib: float = 1
) -> list[str]:
    """Run each code in a thread that a confined thread starts, as episodes are; return its end."""
    script = f"""
        import threading
        from grpo_ray.config.episodes import EpisodesConfig
        from grpo_ray.episodes.confinement import confine, make_scratch
        from grpo_ray.watch import memory  # as a worker does
        settings = EpisodesConfig(readable_paths={readable!r}, writable_paths={writable!r}, memory_gib={gib!r})
        confine(settings, make_scratch())
        def episode(code):
            try:
                exec(code, {{}})
                print("done")
            except (OSError, MemoryError) as error:
                print(type(error).__name__)
        for code in {[textwrap.dedent(code) for code in codes]!r}:
            thread = threading.Thread(target=episode, args=(code,))
            thread.start()
            thread.join()
    """
    return output_of(sys.executable, "-c", textwrap.dedent(script)).split()


FORKED_LOCK = "import multiprocessing; multiprocessing.get_context('fork').Lock()"


def ways_in(path: Path) -> list[str]:
    return [f"open('{path}').read()", f"open('{path}', 'w')", f"import os; os.remove('{path}')"]


@pytest.mark.slow
@needs_landlock
def test_only_named_paths_and_a_temporary_folder_are_open(tmp_path: Path) -> None:
    secret, data, out = (tmp_path / name for name in ("secret", "data", "out"))
    secret.write_text("key")
    data.mkdir()
    out.mkdir()
    (data / "file").write_text("text")
    ends = attempts(
        *ways_in(secret), *ways_in(data / "file"), f"open('{out}/new', 'w').write('x')",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        FORKED_LOCK,  # semaphores need a path of their own
        readable=(str(data),), writable=(str(out), "/dev/shm"),
    )  # fmt: skip
    denied = ["PermissionError"] * 2
    assert ends == ["PermissionError", *denied, "done", *denied, "done", "done", "done"]
    assert (secret.read_text(), (out / "new").read_text()) == ("key", "x")


@pytest.mark.slow
def test_modules_the_network_and_the_workers_own_memory_stay_and_memory_is_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        measured = "from grpo_ray.watch import memory; assert memory.resident_bytes(with_children=False)"
        imported = "import xml.dom.minidom, sqlite3, jinja2.sandbox"
        taken = ("x = bytearray(2 * 2**30)", "x = bytearray(2**28)")
        ends = attempts(connected, measured, imported, *taken, gib=0.5)
    assert ends == ["done", "done", "done", "MemoryError", "done"]


def test_errors_name_the_remedy() -> None:
    assert hint_for(PermissionError()) == HINT
    assert hint_for(MemoryError()) == NO_MEMORY_HINT
    assert hint_for(ValueError()) == ""


@pytest.mark.parametrize("field", ["readable_paths", "writable_paths"])
def test_paths_must_exist_on_each_node(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^episodes\.{field}: there is no '/absent'"):
        confine(EpisodesConfig.model_validate({field: (str(tmp_path), "/absent")}), str(tmp_path))


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


@pytest.fixture
def shared_file() -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.write(descriptor, b"of another process")
    os.close(descriptor)
    yield Path(name)
    Path(name).unlink(missing_ok=True)


@pytest.mark.slow
@needs_landlock
def test_the_processes_own_files_and_shared_memory_are_out_of_reach(shared_file: Path) -> None:
    codes = [
        *("open('/proc/self/environ')", "open('/proc/thread-self/environ')", "open('/proc/self/cmdline')"),
        *("import os; open(f'/proc/{os.getpid()}/environ')", "open('/proc/self/mem', 'rb')"),
        *(f"import os; os.listdir('{folder}')" for folder in ("/proc/self", "/proc/self/fd", "/dev/shm")),
        "open('/dev/shm/grpo-ray-test-of-another', 'w')",
        *ways_in(shared_file),
        FORKED_LOCK,
        IN_A_CHILD,  # of its last line
    ]
    assert dict(zip(codes, attempts(*codes), strict=True)) == dict.fromkeys(codes, "PermissionError")
    assert shared_file.read_text() == "of another process"


def test_folders_without_a_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    program = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        remove_abandoned(SCRATCH, str(tmp_path))
        assert other.is_dir()
        process.kill()
        process.wait()
    remove_abandoned(SCRATCH, str(tmp_path))
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
