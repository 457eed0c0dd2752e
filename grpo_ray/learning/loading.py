"""Loading a policy with its weights, and checking them."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo_ray.config.model import Implementation
from grpo_ray.learning.attention import NAME as ATTENTION
from grpo_ray.learning.attention import tree_obstacle
from grpo_ray.learning.model_files import located, savable
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.transformer_lm import TransformerLM, check_llama, transformer_lm_of


def skeleton(path: str, trust_remote_code: bool, implementation: Implementation) -> PolicyModel:
    """Return the model without memory for its weights, to learn the names and shapes of its layers."""
    path = located(path)
    with torch.device("meta"):
        if implementation == "grpo_ray":
            return TransformerLM(check_llama(path))
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = _with_sdpa(
            AutoModelForCausalLM.from_config, config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    with suppress(OSError):  # a model need not have the file, which may name more end tokens than config.json
        model.generation_config = GenerationConfig.from_pretrained(path)
    return _prepared(model)


def load_policy(
    path: str, trust_remote_code: bool = False, implementation: Implementation = "transformers",
    dtype: torch.dtype = torch.float32,
) -> PolicyModel:  # fmt: skip
    """Load the model in evaluation mode (no dropout, since the sampler has none).

    Args:
        dtype: of the weights: float32 for those that are trained.

    Raises:
        ValueError: weights are missing, not finite or of a shape that does not match config.json; or
            TransformerLM does not support the model.
    """
    folder, is_own = located(path, weights=True), implementation == "grpo_ray"
    config = check_llama(folder) if is_own else None
    # Tensors that it cannot find are filled with random values.
    model, found = _with_sdpa(
        AutoModelForCausalLM.from_pretrained, folder, dtype=dtype,
        trust_remote_code=trust_remote_code and not is_own,
        ignore_mismatched_sizes=True, output_loading_info=True, use_safetensors=True,
    )  # fmt: skip
    model.tie_weights()  # by config.json, as vLLM does, also where a second copy in the files has other values
    if config is not None:
        model = transformer_lm_of(config, model, sorted(found["unexpected_keys"]), folder)
    if wrong := sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"model.path: {path!r} lacks tensors, or their shapes do not match its config.json: "
            f"{', '.join(wrong[:3])}{more}; copy or save the model again"
        )
    check_finite(model, path)
    return (model if is_own else _prepared(model)).eval()


def _with_sdpa(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a model with torch's attention, or its own where transformers offers no other."""
    try:
        return make(*args, attn_implementation="sdpa", **options)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return make(*args, attn_implementation="eager", **options)


def _prepared(model: Any) -> PolicyModel:
    if tree_obstacle(model) is None:
        model.set_attn_implementation(ATTENTION)
    elif getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # torch's own would not cap the scores, and says nothing
    if model.generation_config is not None:
        model.generation_config = savable(model.generation_config)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # or no context trains a token that pads, which may also end turns
    return model  # type: ignore[no-any-return]


def check_finite(model: PolicyModel, path: str) -> None:
    """Refuse a model with values that are NaN or infinite, with which neither sampling nor learning works.

    Raises:
        ValueError: names the first such tensor.
    """
    bad = {name: int((~torch.isfinite(p)).sum()) for name, p in model.named_parameters()}
    bad = {name: number for name, number in bad.items() if number}
    if bad:
        name, number = next(iter(bad.items()))
        size = model.get_parameter(name).numel()
        more = f", and some in {len(bad) - 1} of its other tensors" if len(bad) > 1 else ""
        raise ValueError(
            f"model.path: {number:,} of {size:,} values of {name!r} in {path!r} are NaN or infinite{more}; "
            "use a checkpoint from before the model broke"
        )


def cast_parameters(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Cast parameters in place; `model.to(dtype)` would also round buffers such as rotary frequencies."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
