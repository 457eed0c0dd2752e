"""The only uses of Ray's private interfaces, where Ray 2.60 has no public one."""

from collections.abc import Mapping
from typing import Any, cast

from ray._private.internal_api import node_stats
from ray._private.services import get_ray_address_from_environment
from ray._private.state import available_resources_per_node


def free_resources_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return the unreserved resources of each node, by its id; `ray.available_resources` only has their sum."""
    return cast("Mapping[str, Mapping[str, float]]", available_resources_per_node())


def bootstrap_address(address: str) -> str:
    """Return HOST:PORT of the head node; for `auto` of this machine's, or raises ConnectionError."""
    return cast("str", get_ray_address_from_environment(address, None))


def spilled_bytes_of(node: Mapping[str, Any]) -> int:
    """Return the bytes that a node's object store has spilled to disk so far; waits 30 s for a node that hangs.

    Args:
        node: an entry of `ray.nodes()`.

    Raises:
        grpc.RpcError: the node does not answer.
    """
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    stats = node_stats(*address, include_memory_info=False)
    return int(stats.store_stats.spilled_bytes_total)


def forget_cached_token() -> None:
    """Make Ray read its access token again; importing Ray has cached the previous one."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()
