"""Wires between a Sender and Inboxes: chunks, what must match, and ends that die, hang or never come.

Both ends run in this process, in threads, over gloo; an end that is killed or stopped is a process of its own.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from builders import schedule_config, tensors_of

from grpo_ray.transfer.messages import Meeting, TensorSpec, WeightSnapshot, WireError, chunks
from grpo_ray.transfer.sender import Sender
from grpo_ray.transfer.shared_pages import map_pages, pages_of
from grpo_ray.transfer.snapshot import check_snapshot, pack_weights
from grpo_ray.transfer.wire import Inbox, NcclChannel

CPU = torch.device("cpu")


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.rand(shape, generator=generator)) for name, shape in
            (("embed", (700, 300)), ("bias", (3,)), ("empty", (0, 4)), ("head", (300, 500)))]  # fmt: skip


def make_sender(timeout_s: float = 20.0) -> Sender:
    sync = {"transport": "collective", "phase_timeout_s": timeout_s}
    return Sender(schedule_config(algorithm={}, weight_sync=sync), "127.0.0.1", CPU, chunk_bytes=300_000)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def join(threads: ThreadPoolExecutor, sender: Sender, name: str = "a", inbox: Inbox | None = None) -> Inbox:
    inbox = inbox or Inbox()
    joining = threads.submit(inbox.join, sender.open_wire(name))
    sender.join_wire(name)
    joining.result(20)
    return inbox


def pack(sender: Sender, version: int, with_checksum: bool = False) -> WeightSnapshot:
    return sender.pack(tensors(version), version, torch.bfloat16, with_checksum)


def transfer(
    threads: ThreadPoolExecutor, sender: Sender, inbox: Inbox, snapshot: WeightSnapshot, name: str = "a"
) -> WeightSnapshot:
    sending = threads.submit(sender.send, name, snapshot.version)
    received = inbox.received(snapshot)
    sending.result(20)
    return received


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((4, 4, 4), 100, [(0, 12)]),
        ((4, 4, 4), 8, [(0, 8), (8, 12)]),
        ((4, 4, 4), 7, [(0, 4), (4, 8), (8, 12)]),
        ((4, 50, 4, 4), 10, [(0, 4), (4, 54), (54, 62)]),  # a tensor is never cut
        ((0, 8, 0), 8, [(0, 8)]),
        ((9,), 8, [(0, 9)]),
        ((), 8, []),
    ],
)
def test_chunks_by_hand(sizes: tuple[int, ...], limit: int, expected: list[tuple[int, int]]) -> None:
    offsets = np.cumsum([0, *sizes])
    specs = [TensorSpec(str(i), "uint8", (n,), int(offsets[i]), n) for i, n in enumerate(sizes)]
    found = list(chunks(specs, sum(sizes), limit))
    assert [(chunk.start, chunk.end) for chunk in found] == expected
    assert [spec for chunk in found for spec in chunk.specs] == specs


def test_versions_arrive_whole_in_the_same_pages(threads: ThreadPoolExecutor) -> None:
    sender = make_sender()
    inbox = join(threads, sender)
    for version in (1, 2, 3):
        snapshot = pack(sender, version, with_checksum=True)
        assert (snapshot.data.nbytes, snapshot.num_bytes) == (0, snapshot.wire_bytes)
        received = transfer(threads, sender, inbox, snapshot)
        check_snapshot(received)
        assert (received.version, received.wire_bytes) == (version, 0)
        whole = pack_weights(tensors(version), version, torch.bfloat16)
        assert received.specs == whole.specs
        here, there = tensors_of(received), tensors_of(whole)
        assert all(torch.equal(here[name], there[name]) for name in there)
        assert map_pages(pages_of(received.data)).numpy().tobytes() == received.data.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["version", "layout"])
def test_something_unexpected_is_refused_and_the_sender_told(threads: ThreadPoolExecutor, lie: str) -> None:
    sender = make_sender()
    inbox = join(threads, sender)
    snapshot = pack_much(sender, 7)
    renamed = tuple(replace(spec, name=f"{spec.name}.x") for spec in snapshot.specs)
    expected = replace(snapshot, version=8) if lie == "version" else replace(snapshot, specs=renamed)
    sending = threads.submit(sender.send, "a", 7)
    with pytest.raises(WireError, match=f"version {expected.version}, and version 7 came"):
        inbox.received(expected)
    assert isinstance(sending.exception(20), WireError)


def test_two_generators_are_sent_to_at_once(threads: ThreadPoolExecutor) -> None:
    sender = make_sender()
    inboxes = {name: join(threads, sender, name) for name in "ab"}
    snapshot = pack(sender, 1)
    sending = [threads.submit(sender.send, name, 1) for name in inboxes]
    received = [inboxes[name].received(snapshot) for name in "ba"]  # b first: neither waits for the other
    for future in sending:
        future.result(20)
    assert received[0].data.tobytes() == received[1].data.tobytes()


def test_messages_to_vllms_workers_keep_a_meeting_as_it_is() -> None:
    meeting = make_sender().open_wire("a")
    assert Meeting(**msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(meeting)))) == meeting


# ---- versions that the Learner keeps ----


def test_two_buffers_take_turns() -> None:
    sender = make_sender()
    places = []
    for version in range(1, 7):
        sender.release(version - 1)  # as a sync does that publishes it
        pack(sender, version)
        places.append(sender._kept[version][1].data_ptr())
        assert sorted(sender._kept) == [v for v in (version - 1, version) if v > 0]
    assert len(set(places)) == 2


def test_a_version_that_waits_to_be_published_is_not_overwritten(threads: ThreadPoolExecutor) -> None:
    sender = make_sender()
    first = pack(sender, 1)
    for version in (2, 3):
        pack(sender, version)
    received = transfer(threads, sender, join(threads, sender), first)
    assert received.data.tobytes()[:1000] == sender._kept[1][1].numpy().tobytes()[:1000]
    sender.release(3)
    with pytest.raises(WireError, match="version 1 is not kept"):
        sender.send("a", 1)


# ---- ends that fail ----


def join_and_hang(pipe: Connection) -> None:
    pipe.send("started")  # before the time for joining begins
    inbox = Inbox()
    inbox.join(pipe.recv())
    pipe.send("joined")
    time.sleep(1000)


Peer = Callable[[Sender, str], ForkProcess]


@pytest.fixture
def peer() -> Iterator[Peer]:
    """`peer(sender, name)`: start a Generator's end in another process, which joins and does nothing more."""
    processes, fork = [], multiprocessing.get_context("fork")

    def start(sender: Sender, name: str) -> ForkProcess:
        here, there = fork.Pipe()
        process = fork.Process(target=join_and_hang, args=(there,), daemon=True)
        process.start()
        processes.append(process)
        assert here.recv() == "started"
        here.send(sender.open_wire(name))
        sender.join_wire(name)
        assert here.recv() == "joined"
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def pack_much(sender: Sender, version: int) -> WeightSnapshot:
    """Pack more than TCP's buffers take, so that a send waits for its receiver."""
    return sender.pack([("w", torch.full((2**23,), float(version)))], version, torch.float32, False)


@pytest.mark.slow
def test_a_receiver_that_dies_midway_ends_its_send_alone(threads: ThreadPoolExecutor, peer: Peer) -> None:
    sender = make_sender(timeout_s=60.0)
    snapshot, process, other = pack_much(sender, 1), peer(sender, "a"), join(threads, sender, "b")
    sending = threads.submit(sender.send, "a", 1)
    time.sleep(0.3)
    assert not sending.done()
    process.kill()
    killed = time.monotonic()
    assert isinstance(sending.exception(20), WireError)
    assert time.monotonic() - killed < 50  # not the limit of 60 s
    assert (transfer(threads, sender, other, snapshot, "b").data.view(np.float32) == 1).all()
    with pytest.raises(WireError, match="no wire to a"):
        sender.send("a", 1)
    again = join(threads, sender, "a")  # a replacement
    assert (transfer(threads, sender, again, snapshot).data.view(np.float32) == 1).all()


@pytest.mark.slow
def test_a_late_failure_spares_a_new_wire(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, replacements = make_sender(), []
    join(threads, sender)
    snapshot = pack(sender, 1)

    def fail_late(*_: object) -> None:
        replacements.append(join(threads, sender))
        raise WireError("silent")

    with monkeypatch.context() as patched:
        patched.setattr("grpo_ray.transfer.sender.send", fail_late)
        with pytest.raises(WireError, match="silent"):
            sender.send("a", 1)
    transfer(threads, sender, replacements[0], snapshot)


@pytest.mark.slow
def test_a_receiver_that_hangs_holds_its_send_for_the_limit(threads: ThreadPoolExecutor, peer: Peer) -> None:
    sender = make_sender(timeout_s=2.0)
    pack_much(sender, 1)
    os.kill(peer(sender, "a").pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WireError, match="gone or silent"):
        sender.send("a", 1)
    assert time.monotonic() - started > 1.5


@pytest.mark.slow
def test_a_dropped_wire_ends_what_the_receiver_waits_for(threads: ThreadPoolExecutor) -> None:
    sender = make_sender(timeout_s=60.0)
    inbox, snapshot = join(threads, sender), pack_much(sender, 1)
    receiving = threads.submit(inbox.received, snapshot)
    time.sleep(0.2)
    assert not receiving.done()
    sender.drop_wire("a")
    assert isinstance(receiving.exception(20), WireError)
    with pytest.raises(WireError, match="join a wire first"):
        inbox.received(snapshot)
    assert join(threads, sender, inbox=inbox) is inbox
    assert (transfer(threads, sender, inbox, snapshot).data.view(np.float32) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_end_that_waits_for_one_that_never_comes_gives_up(who: str) -> None:
    sender = make_sender(timeout_s=0.3)
    meeting = sender.open_wire("a")
    started = time.monotonic()
    with pytest.raises(WireError, match="did not come"):
        sender.join_wire("a") if who == "sender" else Inbox().join(meeting)
    with pytest.raises(WireError, match="no store at"):
        replace(meeting, port=1).store()
    assert time.monotonic() - started < 120


@pytest.mark.slow
def test_a_wire_dropped_while_it_is_joined_is_not_used(threads: ThreadPoolExecutor) -> None:
    sender = make_sender(timeout_s=5.0)
    meeting = sender.open_wire("a")
    joining = threads.submit(sender.join_wire, "a")
    time.sleep(0.2)
    sender.drop_wire("a")
    Inbox().join(meeting)
    assert "was dropped" in str(joining.exception(20))


def test_nothing_is_left_in_dev_shm_and_no_thread(threads: ThreadPoolExecutor) -> None:
    def shared() -> set[str]:
        """Return what is in shared memory but for what processes and engines of other tests put there."""
        others = ("sem.", "vllm_", "grpo_ray-adapter-")
        return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}

    before, num_threads = shared(), threading.active_count()
    sender = make_sender()
    inbox = join(threads, sender)
    transfer(threads, sender, inbox, pack(sender, 1))
    assert shared() <= before
    link = f"/proc/self/fd/{inbox._file.fileno()}"  # another thread may open a file of this number
    del inbox
    threads.shutdown()  # else it may hold its last call for a moment
    assert not os.path.exists(link) or "inbox" not in os.readlink(link), "the memory is free"
    sender.drop_wire("a")
    assert threading.active_count() <= num_threads + 1  # the pool's


def test_nothing_is_sent_on_a_communicator_that_is_being_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL frees it meanwhile; the abort also ends the transfer under way, which is no success."""
    began, aborting, calls = threading.Event(), threading.Event(), []

    class Communicator:
        disabled = False

        def broadcast(self, *_: object) -> None:
            calls.append("sent" if not aborting.is_set() else "sent during the abort")
            began.set()

        def destroy(self) -> None:
            aborting.set()
            time.sleep(0.05)
            self.disabled = True

    event = SimpleNamespace(query=aborting.is_set)
    channel: Any = object.__new__(NcclChannel)
    channel.device, channel._nccl, channel._lock = torch.device("cpu"), Communicator(), threading.Lock()
    channel._is_closed, channel._stream = False, SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [channel.send(torch.zeros(1), 20.0) for _ in range(3)])
        assert began.wait(20)
        channel.close()
        with pytest.raises(WireError, match="the wire was closed"):
            sending.result(20)
    assert calls == ["sent"]
