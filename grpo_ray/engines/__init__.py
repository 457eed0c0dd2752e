"""Inference engines behind one protocol: `vllm` for production, and `torch` as the reference."""

from grpo_ray.config import Config
from grpo_ray.engines.base import Engine


def make_engine(config: Config, model_path: str, max_model_len: int, index: int) -> Engine:
    """Return the configured engine of Generator `index`, which also determines its seed."""
    seed = config.run.seed + 1000 * index
    options = config.generator, config.model.dtype
    if config.generator.engine == "torch":
        from grpo_ray.engines.torch_engine import TorchEngine

        # A synchronous run is exact: samples must not depend on which requests arrive together.
        is_exact = config.weight_sync.max_lag == 0
        return TorchEngine(
            model_path, *options, seed, config.model.trust_remote_code, joins_requests=not is_exact,
            implementation=config.model.implementation,
        )  # fmt: skip
    from grpo_ray.engines.vllm_engine import VllmEngine

    return VllmEngine(model_path, *options, max_model_len, seed, config.model.trust_remote_code)
