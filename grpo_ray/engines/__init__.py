"""Inference engines behind one protocol: `vllm` for production, and `torch` as the reference."""

import hashlib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.schema import nearest_name
from grpo_ray.config.user_code import import_function
from grpo_ray.engines.base import Engine, TeacherEngine
from grpo_ray.types import StartingModel


def engine_seed(run_seed: int, generator: str, version: int, num_starts: int) -> int:
    """Return the seed of an engine; a replacement, or the engine of a resumed run, draws different noise.

    Args:
        version: of the weights that the engine starts with.
        num_starts: engines that this process has started under the Generator's name before.
    """
    text = f"{run_seed}/{generator}/{version}/{num_starts}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def derived_seed(seed: int, *place: int) -> int:
    """Return the seed of one of the places that draw apart from each other, below 2**63."""
    return int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one of a request's samples, counted from 0; the first has the request's own."""
    return seed if sample == 0 else derived_seed(seed, 0, sample)


def make_engine(config: Config, model_path: str, max_model_len: int, seed: int) -> Engine:
    """Return the configured engine; one of the user's own is called with these arguments."""
    if config.generator.engine == "torch":
        from grpo_ray.engines.torch_engine import TorchEngine

        return TorchEngine(config, model_path, max_model_len, seed)
    if ":" in config.generator.engine:
        own: Engine = import_function(config.generator.engine, "generator.engine")(
            config, model_path, max_model_len, seed
        )
        return own
    from grpo_ray.engines.vllm_engine import VllmEngine

    return VllmEngine(config, model_path, max_model_len, seed)


def make_teacher_engine(config: Config, start: StartingModel) -> TeacherEngine:
    """Return the configured engine with the teacher; `start` has the lengths and end tokens of the samples."""
    if config.distillation.engine == "torch":
        from grpo_ray.engines.torch_engine import TorchTeacher

        return TorchTeacher(config, start.end_token_ids)
    from grpo_ray.engines.vllm_engine import VllmTeacher

    return VllmTeacher(config, start.max_model_len)


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
