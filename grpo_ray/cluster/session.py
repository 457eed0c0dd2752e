"""The Ray session: joining or starting a cluster, and reserving the resources of a run.

Every process of a local Ray inherits the environment of the one that starts it, and keeps it readable in
/proc for as long as it lives. Variables that look like credentials are removed first.
"""

import contextlib
import os
import secrets
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_ray.cluster.placement import Node, amounts_of, bundles_of, joins_cluster, reservations, shortfalls
from grpo_ray.cluster.ray_internals import bootstrap_address, forget_cached_token, free_resources_by_node
from grpo_ray.cluster.reaper import dismiss, start_reaper
from grpo_ray.config import Config
from grpo_ray.config.run import Strategy
from grpo_ray.config.secrets import HUB_ACCESS, RAY_TOKEN, public_environment
from grpo_ray.errors import RunError


@contextlib.contextmanager
def connected(needs_hub: bool = False) -> Iterator[None]:
    """Make this process a driver of the cluster at RAY_ADDRESS, or of a local one, while the block lasts.

    Args:
        needs_hub: let a local cluster's actors inherit the variables to fetch a model, such as HF_TOKEN.

    Raises:
        RunError: RAY_ADDRESS is a dashboard's address or Ray Client's, or no Ray answers there in seconds.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("http"):
        raise RunError(
            f"RAY_ADDRESS is {address}, an address for submitting jobs; use grpo-ray submit CONFIG, or unset "
            "RAY_ADDRESS to train only on this machine"
        )
    if address.startswith("ray://"):
        raise RunError(
            f"RAY_ADDRESS is {address}, but a run must start on a node of the cluster; submit it with grpo-ray "
            "submit CONFIG --address http://HOST:8265"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; otherwise it warns
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that were abandoned with their actor
    with _own_cluster(HUB_ACCESS if needs_hub else ()) if address == "local" else _cluster_at(address):
        yield


def address_of_node(on_cluster: bool) -> str:
    """Return the address at which the run's other processes reach this one."""
    return str(ray.util.get_node_ip_address()) if on_cluster else "127.0.0.1"


LONGEST_FOLDER = 39  # of 107 bytes: "/ray/session_<time>_<pid>/sockets/plasma_store" has 68
# Each actor writes to the run's logs/ (remote_actor.py), so Ray need not forward its output.
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextlib.contextmanager
def _cluster_at(address: str) -> Iterator[None]:
    try:
        check_answers(bootstrap_address(address))
        with _signals_kept():
            ray.init(address=address, **QUIET)
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        raise RunError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error
    try:
        yield
    finally:
        _shut_down()


ANSWER_S = 5.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings
SETTINGS = 4  # the type of an HTTP/2 server's first frame, which is in the fourth byte


def check_answers(address: str) -> None:
    """Wait for the HTTP/2 settings that the head node at HOST:PORT sends at once; Ray itself waits for minutes.

    Raises:
        OSError: none listens there, or it does not answer within 5 s.
        ValueError: the address has no port, or something other than a head node answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("give HOST:PORT of the head node, such as 10.0.0.1:6379")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(HELLO)
        answer = connection.recv(9)
    if answer[3:4] != bytes((SETTINGS,)):
        raise ValueError("something other than a Ray head node answers; its port is 6379 by default")


@contextlib.contextmanager
def _own_cluster(secrets_kept: Collection[str]) -> Iterator[None]:
    """Start a Ray for this user and this run alone; it ends with this process, however the process ends."""
    enable_token_auth()
    folder = private_ray_folder()
    reaper = start_reaper()  # first, because Ray's agents outlive a driver that is killed while Ray starts
    try:
        with without_secrets(keep=secrets_kept), _signals_kept(signal.SIGHUP):
            try:
                ray.init(address="local", include_dashboard=False, _temp_dir=folder, **QUIET)
            except Exception as error:  # such as "The current node timed out during startup"
                raise RunError(f"Ray did not start on this machine: {error}") from error
        yield
    finally:
        _shut_down()
        dismiss(reaper)  # unless a signal left half of that to it


def _shut_down() -> None:
    """Shut Ray down in a thread, so that only a second signal, which ends the process, interrupts it."""
    with _signals_kept(), ThreadPoolExecutor(1) as thread:
        for work in (int, ray.shutdown):  # a signal while the thread starts would have it forgotten
            thread.submit(work).result()


@contextlib.contextmanager
def _signals_kept(*ignored: signal.Signals) -> Iterator[None]:
    """Keep what signals do while Ray starts, which has SIGTERM exit, or abort after 3 s; or while it ends.

    Processes that start now inherit what is ignored: a closed terminal is for the driver to answer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, *ignored)}
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        signal.alarm(0)  # of the handler in C++, which calls the one before it first
        raise KeyboardInterrupt from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def check_machine(config: Config, lacking: Sequence[str]) -> None:
    """Refuse, before Ray starts, a local run that needs vLLM or a resource (`lacking`) that is not here.

    Raises:
        RunError: as `placed`.
    """
    if not joins_cluster():
        engines = {"generator.engine": config.generator.engine}
        if config.distillation.teacher:
            engines["distillation.engine"] = config.distillation.engine
        needed = [f"{field}=torch" for field, engine in engines.items() if engine == "vllm"]
        if needed and find_spec("vllm") is None:
            raise RunError(
                "vLLM is not installed: pip install 'grpo_ray[cpu]', or 'grpo_ray[gpu]' for GPUs; or set "
                + " ".join(needed)
            )
        _refuse(lacking, "this machine lacks resources")


NODES_MAY_COME = ". For nodes that are still coming, such as an autoscaler's, set placement.wait_s"
GRACE_S = 10.0  # for resources that another job is about to release
RAY_STRATEGY: dict[Strategy, str] = {
    "pack": "PACK", "spread": "SPREAD", "strict_spread": "STRICT_SPREAD",
    "colocate": "STRICT_PACK",  # of a single bundle
}  # fmt: skip


Placement = Mapping[str, dict[str, Any]]
"""Each actor's resources and bundle, for `ActorClass.options`, also when it is restarted."""


def _options(config: Config, group: PlacementGroup | None) -> Placement:
    """Return the options of the actors; `group` is None if none of them reserves anything."""
    wanted = reservations(config).items()
    options: Placement = {name: {"num_gpus": own["GPU"], "num_cpus": own["CPU"]} for name, own in wanted}
    for index, bundle in enumerate(bundles_of(config)):
        for name in bundle.actors:
            options[name]["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, index)
    return options


@contextlib.contextmanager
def placed(config: Config) -> Iterator[Placement]:
    """Reserve the run's resources on the cluster's nodes; Ray releases them when this process dies.

    Raises:
        RunError: names each resource, how much each actor needs, and how much there is; at once, or after
            `placement.wait_s`.
    """
    wait_s = config.placement.wait_s
    if not wait_s:
        _refuse(shortfalls(config, _nodes()), "the cluster lacks resources", NODES_MAY_COME)
    bundles = [dict(bundle.resources) for bundle in bundles_of(config)]
    if not bundles:
        yield _options(config, None)
        return
    group = placement_group(bundles, strategy=RAY_STRATEGY[config.placement.strategy])
    try:
        if not group.wait(wait_s or GRACE_S):
            _refuse_busy(config, wait_s)
        yield _options(config, group)
    finally:
        remove_placement_group(group)


def _nodes(free: bool = False) -> list[Node]:
    """Return the cluster's living nodes, with the total or the free resources of each."""
    left = free_resources_by_node() if free else {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(node["NodeManagerAddress"], left.get(node["NodeID"], {}) if free else node["Resources"])
        for node in alive
    ]


def _refuse_busy(config: Config, wait_s: float) -> NoReturn:
    """Refuse a run for which Ray has found no place: report what is missing, or what is in use."""
    waited = f"after {wait_s:g} s (placement.wait_s) " if wait_s else ""
    _refuse(shortfalls(config, _nodes()), f"{waited}the cluster lacks resources")
    nodes = _nodes(free=True)
    lacking = shortfalls(config, nodes, "free") or ["the free resources are on several nodes"]
    free = "; ".join(f"{node.name}: {amounts_of(node.resources) or 'nothing'}" for node in nodes)
    raise RunError(
        f"{waited}the cluster is busy: {'; '.join(lacking)}. Free: {free}. Stop what uses it, or wait for it "
        "with placement.wait_s"
    )


def _refuse(lacking: Sequence[str], what: str, also: str = "") -> None:
    if lacking:
        raise RunError(
            f"{what}: {'; '.join(lacking)}. Run it on a larger cluster, or lower generator.num_generators, "
            "learner.num_ranks, or num_gpus and num_cpus of generator, learner, scorer, distillation and "
            f"episodes (0 GPUs runs on the CPU){also}"
        )


@contextlib.contextmanager
def without_secrets(keep: Collection[str] = ()) -> Iterator[None]:
    """Remove the secrets from `os.environ` while processes are started; restore them afterwards.

    Ray's raylet starts every worker, so no actor ever sees a variable that the raylet did not inherit.
    """
    public = public_environment(os.environ, keep)
    hidden = {name: value for name, value in os.environ.items() if name not in public}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def enable_token_auth() -> None:
    """Set an access token for the Ray that this process is about to start; call it before `ray.init`.

    Ray turns token authentication on for a local Ray, but takes the token from ~/.ray/auth_token, which it
    writes with the umask's permissions (usually 0644) and never changes. A token given by RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH is kept; RAY_AUTH_MODE=disabled turns authentication off.

    The token stays in `os.environ`: Ray's processes read it there, and so do threads of a Ray that is shutting
    down. The next Ray of this process has the same one.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if not any(os.environ.get(name) for name in RAY_TOKEN):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    forget_cached_token()


def private_ray_folder() -> str:
    """Return a folder for the sessions of a local Ray that no other user of the machine can enter.

    Ray makes world-writable folders with sockets and packages in them, by default in /tmp/ray.

    Raises:
        RunError: the folder exists, but other users can enter it; or its path is too long for Ray's sockets.
    """
    folder = Path(tempfile.gettempdir()) / f"grpo_ray-{os.getuid()}"
    if (length := len(os.fsencode(folder))) > LONGEST_FOLDER:
        raise RunError(
            f"{folder} has {length} bytes; Ray's sockets allow {LONGEST_FOLDER}: set a shorter TMPDIR"
        )
    with contextlib.suppress(FileExistsError):  # also of a file, or of a link to nowhere
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not is_private:
        raise RunError(f"{folder}: must be a folder that only you can enter; remove it, or set another TMPDIR")
    return str(folder / "ray")  # one deeper, because Ray makes the folder that it is given world-writable
