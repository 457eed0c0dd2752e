"""Processes that know the port of ranks or of a wire, but not the secret: they get no seat, and run no code.

A stranger here is a process of its own that uses torch alone, as another user of the machine would.
"""

import contextlib
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from builders import Touch, tensors_of
from rank_workers import SECRET, meeting, on_ranks
from test_wire import CPU, join, make_sender, pack, tensors, transfer
from test_wire import threads as threads
from torch.distributed import HashStore, TCPStore

from grpo_ray.errors import FORGED
from grpo_ray.learning.ranks import Ranks, Seat
from grpo_ray.learning.rendezvous import NUM_BYTES, SignedStore, open_store, prove
from grpo_ray.transfer.messages import WireError
from grpo_ray.transfer.wire import Inbox, NcclChannel

LIMIT = timedelta(minutes=2)


def take_a_ranks_seat(store: TCPStore, ready: Any, trace: Path) -> None:
    store.set("here/1", "")
    ready.set()
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=LIMIT)
    dist.new_group(backend="gloo", timeout=LIMIT)
    dist.all_gather_object([None, None], Touch(trace))


def take_a_wires_seat(store: TCPStore, ready: Any, trace: Path) -> None:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = LIMIT, [gloo.create_device(hostname="127.0.0.1")]
    ready.set()
    group = gloo(dist.PrefixStore("a/1", store), 1, 2, options)
    group.recv([torch.zeros(24, dtype=torch.uint8)], 0, 0).wait()


def overwrite(store: Any, ready: Any, trace: Path) -> None:
    ready.set()
    while not (keys := store.list_keys()):
        time.sleep(0.001)
    for key in keys:
        store.set(key, pickle.dumps(Touch(trace)))
    store.set("overwritten", "")


def _run(deed: Callable[..., None], port: int, ready: Any, trace: Path) -> None:
    deed(TCPStore("127.0.0.1", port, timeout=LIMIT), ready, trace)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`stranger(deed, port)`: start a process that does it, and return once it is about to."""
    processes, fork = [], multiprocessing.get_context("fork")
    trace = tmp_path / "trace"

    def start(deed: Callable[..., None], port: int) -> None:
        ready = fork.Event()
        process = fork.Process(target=_run, args=(deed, port, ready, trace), daemon=True)
        process.start()
        processes.append(process)
        assert ready.wait(LIMIT.total_seconds())

    yield start
    for process in processes:
        process.kill()
        process.join()
    assert not trace.exists(), "the stranger's code ran"


def test_the_strangers_pickle_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touch(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


def joined(seat: Seat) -> list[int]:
    return Ranks(seat).gathered(seat.rank)


def seat_at(port: int) -> Seat:
    """Return the first seat of two."""
    return Seat(
        rank=0, size=2, replicas=1, ranks_per_node=2, host="127.0.0.1", port=port, start_timeout_s=60.0,
        collective_timeout_s=60.0, secret=SECRET,
    )  # fmt: skip


@pytest.mark.slow
def test_a_stranger_in_a_ranks_seat_is_refused_and_runs_nothing(stranger: Callable[..., None]) -> None:
    store = meeting()
    stranger(take_a_ranks_seat, store.port)
    with pytest.raises(RuntimeError, match=f"here/1 was written by a process that {FORGED}"):
        Ranks(seat_at(store.port))


def joined_after_the_deed(seat: Seat) -> str:
    """Join, the second rank only once the store is overwritten; return the error."""
    if seat.rank == 1:
        TCPStore(seat.host, seat.port, timeout=LIMIT).wait(["overwritten"])
    try:
        return str(joined(seat))
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_whose_store_is_overwritten_fail_and_those_after_them_meet(stranger: Callable[..., None]) -> None:
    store = meeting()
    stranger(overwrite, store.port)
    for outcome in on_ranks(2, joined_after_the_deed, port=store.port):
        assert f"here/0 was written by a process that {FORGED}" in outcome
    assert on_ranks(2, joined) == [[0, 1], [0, 1]]


def in_anothers_place(seat: Seat, its_rank: int) -> str:
    """Join with a store that believes everything, as if the rank had come to the others' ports first."""
    known = seat.secret if seat.rank != its_rank else bytes(NUM_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_ray.learning.ranks.SignedStore", lambda store, secret: store)
        try:
            Ranks(Seat(**{**vars(seat), "secret": known}))
        except RuntimeError as error:
            return str(error)
    return "joined"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "replicas", "its_rank"), [(2, 1, 1), (3, 1, 0), (4, 2, 3)])
@pytest.mark.kept("3-1-0")
def test_a_stranger_on_a_ranks_connections_is_noticed_by_all(size: int, replicas: int, its_rank: int) -> None:
    for rank, outcome in enumerate(on_ranks(size, in_anothers_place, its_rank, replicas=replicas)):
        if rank != its_rank:
            assert f"seat {its_rank} of {size}" in outcome, rank
            assert FORGED in outcome, rank


def addresses(seat: Seat) -> set[str]:
    """Return where this process listens once it has joined the others; its parent's sockets do not count."""
    before = listening()
    ranks = Ranks(seat)
    ranks.gathered(0)
    return {ip for ip, _ in listening() - before}


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_stores_and_ranks_listen_at_their_own_address_alone() -> None:
    before = listening()
    store = open_store("127.0.0.1")
    assert listening() - before == {("127.0.0.1", store.port)}
    assert on_ranks(2, addresses) == [{"127.0.0.1"}] * 2


@pytest.mark.slow
def test_a_stranger_in_a_generators_seat_is_refused_and_the_generator_joins_the_next_wire(
    threads: ThreadPoolExecutor, stranger: Callable[..., None]
) -> None:
    sender = make_sender(timeout_s=60.0)
    stranger(take_a_wires_seat, sender.open_wire("a").port)
    with pytest.raises(WireError, match=FORGED):
        sender.join_wire("a")
    found = tensors_of(transfer(threads, sender, join(threads, sender), pack(sender, 1)))
    for name, tensor in tensors(1):
        assert torch.equal(found[name], tensor.bfloat16())


@pytest.mark.slow
def test_a_wire_whose_store_is_overwritten_fails_at_both_ends(
    threads: ThreadPoolExecutor, stranger: Callable[..., None]
) -> None:
    sender = make_sender(timeout_s=2.0)
    place = sender.open_wire("a")
    stranger(overwrite, place.port)
    joining = threads.submit(sender.join_wire, "a")
    TCPStore(place.host, place.port, timeout=LIMIT).wait(["overwritten"])
    with pytest.raises(WireError, match=FORGED):
        Inbox().join(place)
    assert isinstance(joining.exception(60), WireError)


@pytest.mark.parametrize("ends", ["sender", "receiver"])
def test_a_stranger_with_a_wires_connection_is_noticed_before_any_weights(
    ends: str, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store believes everything, as if the stranger had come to the other end's port first."""
    monkeypatch.setattr("grpo_ray.learning.rendezvous.SignedStore", lambda store, secret: store)
    sender, inbox = make_sender(timeout_s=20.0), Inbox()
    place = sender.open_wire("a")
    without = replace(place, secret=bytes(NUM_BYTES))
    if ends == "sender":
        sender._meetings["a"] = without
    joining = threads.submit(inbox.join, place if ends == "sender" else without)
    with pytest.raises(WireError, match=FORGED):
        sender.join_wire("a")
    assert FORGED in str(joining.exception(60))
    with pytest.raises(WireError, match="join a wire first"):
        inbox.received(pack(sender, 1))


def test_an_nccl_wire_proves_every_seat(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that broadcasts between threads stands for NCCL's; the third worker has no secret."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    place = make_sender().open_wire("a")
    table, barrier = dict[int, torch.Tensor](), threading.Barrier(3, timeout=60)

    def end(rank: int, secret: bytes) -> str:
        channel: Any = object.__new__(NcclChannel)
        channel.device, channel._stream = CPU, SimpleNamespace(wait_stream=lambda stream: None)

        def broadcast(part: torch.Tensor, timeout_s: float, root: int) -> None:
            if rank == root:
                table[root] = part.clone()
            barrier.wait()
            part.copy_(table[root])
            barrier.wait()

        channel._broadcast, channel._rank, channel._timeout_s = broadcast, rank, place.timeout_s
        try:
            prove(secret, place.key, rank, 3, channel.exchange)
        except RuntimeError as error:
            return str(error)
        return "proved"

    for secrets, expected in (
        ([place.secret] * 3, ["proved"] * 3),
        ([place.secret, place.secret, b""], [f"seat 2 of 3 (a/1) is taken by a process that {FORGED}"] * 2),
    ):
        assert list(threads.map(end, range(3), secrets))[: len(expected)] == expected


# ---- the proof and the store ----


def proved(*exchanges: Callable[[int, Sequence[bytes]], Sequence[bytes]]) -> None:
    """Have rank 0 of 2 prove the other seat, which answers the challenge and the answer by what is given."""
    turns = iter(exchanges)
    prove(SECRET, "ours", 0, 2, lambda parts: next(turns)(0, parts))


def test_what_a_rank_itself_sends_proves_nothing() -> None:
    """A stranger that sends everything back, or asks another group's rank, has no answer."""
    back = [lambda _, parts: [parts[1], parts[1]]] * 2
    with pytest.raises(RuntimeError, match=FORGED):
        proved(*back)

    def of_another(group: str, rank: int, size: int) -> None:
        """Pass the challenge on to a real process of another group, or another seat, and its answer back."""
        asked: list[bytes] = []

        def challenge(_: int, parts: Sequence[bytes]) -> Sequence[bytes]:
            asked.extend(parts)
            return [bytes(NUM_BYTES)] * 2

        def answer(_: int, parts: Sequence[bytes]) -> Sequence[bytes]:
            given: list[Sequence[bytes]] = []

            def exchange(parts: Sequence[bytes]) -> Sequence[bytes]:
                given.append(parts)
                return [asked[1]] * size

            with contextlib.suppress(RuntimeError):
                prove(SECRET, group, rank, size, exchange)
            return [given[1][0]] * 2

        proved(challenge, answer)

    of_another("ours", 1, 2)  # the process that belongs there
    for group, rank, size in (("other", 1, 2), ("ours", 2, 3)):
        with pytest.raises(RuntimeError, match=FORGED):
            of_another(group, rank, size)


def test_a_value_counts_with_its_secret_under_its_key_alone() -> None:
    plain = HashStore()
    ours, theirs = SignedStore(plain, SECRET), SignedStore(plain, bytes(NUM_BYTES))
    for value in ("text", b"\x00bytes\xff", b""):
        ours.set("key", value)
        assert ours.get("key") == (value.encode() if isinstance(value, str) else value)
    ours.wait(["key"])
    theirs.set("forged", b"value")
    plain.set("moved", plain.get("key"))
    plain.set("short", "x")
    for key in ("forged", "moved", "short"):
        with pytest.raises(RuntimeError, match=f"{key} was written by a process that {FORGED}"):
            ours.get(key)
        with pytest.raises(RuntimeError, match=FORGED):
            ours.wait([key])


def test_a_secret_is_in_no_text_of_a_seat_or_a_meeting() -> None:
    place = make_sender().open_wire("a")
    assert "secret" not in repr(place) + repr(seat_at(1))
    assert len({place.secret, make_sender().open_wire("a").secret, bytes(NUM_BYTES)}) == 3
