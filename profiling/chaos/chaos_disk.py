"""A disk for one run, an ext4 in a file, which can fill up, freeze, answer with errors, or lose its power.

    DISK/image    the file
    DISK/disk     mounted here; the run's folder lies in it
    DISK/view     the same once more, for reading what the run has written while `cover` hides it

It needs root and a mount namespace of its own (`in_own_namespace`), with which every mount vanishes.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GIB = 2**30
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
WITHOUT_LOG = 2  # what is not on the disk yet is lost, the journal included
NAMESPACE = "GRPO_RAY_CHAOS_NAMESPACE"

INIT, FORGET, INTERRUPT, BATCH_FORGET = 26, 2, 36, 42  # operations of a FUSE file system
REQUEST, ANSWER = struct.Struct("<IIQ24x"), struct.Struct("<IiQ")
INIT_ANSWER = struct.pack("<IIIIHHIIHHI28x", 7, 31, 2**16, 0, 16, 12, 2**16, 1, 16, 0, 0)


def in_own_namespace(arguments: Sequence[str]) -> bool:
    """Start this program again in a mount namespace of its own; return whether it runs in one."""
    if NAMESPACE not in os.environ and os.geteuid() == 0:
        command = ["unshare", "--mount", "--propagation=private", sys.executable, *arguments]
        os.execvpe(command[0], command, {**os.environ, NAMESPACE: "1"})
    return NAMESPACE in os.environ


class Disk:
    """The disk below `folder`, mounted from `mount` to `unmount`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.view, self._image = folder / "disk", folder / "view", folder / "image"
        self._filler = self.view / "filler"
        self._cover: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        """Mount the disk, after making it if there is none."""
        for path in (self.path, self.view):
            path.mkdir(parents=True, exist_ok=True)
        if not self._image.exists():
            with self._image.open("wb") as file:
                file.truncate(GIB)
            _run("mkfs.ext4", "-q", "-m", "0", str(self._image))
        _run("mount", "-o", "loop,noatime", str(self._image), str(self.path))
        _run("mount", "--bind", str(self.path), str(self.view))

    def unmount(self) -> None:
        self.thaw()
        deadline = time.monotonic() + 20.0
        for path in (self.view, self.path):
            while subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is in use and cannot be unmounted")
                time.sleep(0.2)

    # Faults

    def fill(self) -> None:
        """Leave not one free block."""
        fill(self._filler)

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Let every write wait, even for a process that is killed, until `thaw`."""
        _run("fsfreeze", "--freeze", str(self.view))

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.view)], capture_output=True, check=False)

    def cover(self, folder: Path, error: int | None) -> None:
        """Let every access to a folder fail with this error, or, without one, wait until `uncover`."""
        self._cover = subprocess.Popen([sys.executable, __file__, str(folder), str(error or 0)])
        while f" {folder} fuse " not in Path("/proc/self/mounts").read_text():
            time.sleep(0.05)

    def uncover(self, folder: Path) -> None:
        """End the file system over the folder; what waits for it gets an error then."""
        assert self._cover is not None
        self._cover.kill()
        self._cover.wait()
        _run("umount", "--lazy", str(folder))

    @staticmethod
    def make_read_only(folder: Path) -> None:
        _run("mount", "--bind", str(folder), str(folder))
        _run("mount", "-o", "remount,bind,ro", str(folder))

    @staticmethod
    def make_writable(folder: Path) -> None:
        _run("umount", "--lazy", str(folder))

    def heal(self, folder: Path) -> None:
        """Undo every fault."""
        self.thaw()
        self.empty()
        if self._cover is not None:
            self._cover.kill()
            self._cover.wait()
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)

    def cut_power(self) -> None:
        """Lose everything that is not on the disk yet; the processes that use it must be killed, too."""
        descriptor = os.open(self.view, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def restore_power(self) -> None:
        self.unmount()
        self.mount()


def fill(path: Path) -> None:
    """Let a file take every free block of its file system."""
    with path.open("wb", buffering=0) as file:
        size = 0
        for step in (GIB // 16, GIB // 256, 2**14, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def serve_errors(folder: str, error: int) -> None:
    """Be the file system at `folder`: every request gets the error, or no answer if it is 0."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if ctypes.CDLL(None, use_errno=True).mount(b"chaos", folder.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    while True:
        request = os.read(device, 2**20)
        _, operation, number = REQUEST.unpack(request[: REQUEST.size])
        if operation == INIT:
            os.write(device, ANSWER.pack(ANSWER.size + len(INIT_ANSWER), 0, number) + INIT_ANSWER)
        elif error and operation not in (FORGET, BATCH_FORGET, INTERRUPT):
            os.write(device, ANSWER.pack(ANSWER.size, -error, number))


if __name__ == "__main__":
    serve_errors(sys.argv[1], int(sys.argv[2]))
