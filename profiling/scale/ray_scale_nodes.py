"""Ray nodes on this machine, by Ray's own `cluster_utils`: cheaper to start than those of chaos_cluster.py."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

import psutil

OPTIONS: Mapping[str, Any] = {"object_store_memory": 200 * 2**20, "include_dashboard": False}
SETTINGS: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    # A killed node does not answer at all; one that is short of CPUs answers health checks late.
    "RAY_health_check_initial_delay_ms": "10000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000", "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "180", "RAY_agent_register_timeout_ms": "120000",
}  # fmt: skip


class Nodes:
    """A head node, where the driver runs, and further nodes with room for all actors on half of them."""

    def __init__(self, num_nodes: int, settings: Mapping[str, str]) -> None:
        """
        Args:
            settings: environment variables of the nodes, and of this process from now on.
        """
        self._environment = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32), **settings}
        os.environ.update(self._environment)  # before Ray is imported, which reads it once
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **OPTIONS})
        self._nodes: list[Any] = [self._join() for _ in range(num_nodes)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a driver of this cluster."""
        return {**self._environment, "RAY_ADDRESS": str(self._cluster.address)}

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def lose(self, index: int) -> None:
        """Kill a node with everything on it, as if its power were cut."""
        node, self._nodes[index] = self._nodes[index], None
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def is_up(self, index: int) -> bool:
        return self._nodes[index] is not None

    def rejoin(self, index: int) -> None:
        self._nodes[index] = self._join()

    def close(self) -> None:
        self._cluster.shutdown()

    def _join(self) -> Any:
        return self._cluster.add_node(wait=False, num_cpus=1, **OPTIONS)
