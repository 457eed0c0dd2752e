"""The names of vLLM's engine arguments, read without importing vLLM, which takes seconds and starts CUDA."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from grpo_ray.config.schema import nearest_name


def check_engine_args(names: Iterable[str], section: str = "generator") -> None:
    """Refuse names in `<section>.engine_args` that vLLM does not know; where it is missing, actors check them.

    Raises:
        ValueError: names the first unknown one, and the nearest that exists.
    """
    known = _known_names() if names else None
    for name in names:
        if known is not None and name not in known:
            nearest = nearest_name(name, sorted(known))
            hint = f"; did you mean {nearest}?" if nearest else ""
            raise ValueError(f"{section}.engine_args: vLLM has no argument {name!r}{hint}")


def _known_names() -> frozenset[str] | None:
    """Return the fields of AsyncEngineArgs, from its source; None if they are not to be found there."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    classes = re.findall(
        r"^class (?:Async)?EngineArgs\b.*\n((?:[ ].*\n|\n)+)", source.read_text(), re.MULTILINE
    )
    return frozenset(re.findall(r"^    (\w+) *:", "".join(classes), re.MULTILINE)) or None
