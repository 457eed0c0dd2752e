"""A policy without its adapter and its quantization: plain layers with the weights that Generators get."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_ray.config import Config
from grpo_ray.config.model import ModelConfig
from grpo_ray.learning.adapters import has_adapter, load_adapter, load_trained, merged, trained_parameters
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.model_files import at_commit, check_local_model, is_local
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.quantization import is_quantized
from grpo_ray.records.adapter_files import is_adapter
from grpo_ray.tools.trust import code_of_base, refuse_code


def base_folder(config: Config, run_reward_code: bool = False) -> str:
    """Return the folder or hub name of the model that a run began with; a tiny one is built if necessary.

    Args:
        run_reward_code: build it also by a function that the configuration names; a folder may be a stranger's.

    Raises:
        RunError: it takes such a function.
        ValueError: the folder has no usable model, or neither hub nor cache knows the name.
    """
    if config.model.tiny is not None:
        refuse_code(() if run_reward_code else code_of_base(config))
        from grpo_ray.run.tiny_model import tiny_model_folder

        return str(tiny_model_folder(config))
    assert config.model.path is not None
    if is_local(config.model.path):
        check_local_model(config.model.path)
    elif "@" not in config.model.path:  # it has no commit: a folder elsewhere, or of an earlier release
        at_commit(config.model.path)
    return config.model.path


def checkpoint_policy(config: Config, folder: Path, run_reward_code: bool = False) -> tuple[PolicyModel, str]:
    """Return a checkpoint's policy, with an adapter merged, and the path of the model that has its tokenizer.

    Raises:
        RunError, ValueError: as `base_folder` and `merged_policy`; or the folder has no usable model.
    """
    model, path = config.model, str(folder)
    if model.adapter is not None and is_adapter(folder):
        path = base_folder(config, run_reward_code)
        return merged_policy(path, model, folder), path
    check_local_model(path)
    return load_policy(path, model.trust_remote_code, model.implementation), path


def merged_policy(base: str, config: ModelConfig, adapter: Path) -> PolicyModel:
    """Return a plain model in `model.dtype` with the adapter in a folder merged into its base.

    One layer is merged at a time, in place, to the last bit as the Learner merges it for a weight sync.

    Raises:
        ValueError: the base or the adapter cannot be used, or they do not belong together.
    """
    assert config.adapter is not None
    config = config.model_copy(update={"adapter": config.adapter.model_copy(update={"path": None})})
    model = load_trained(base, config, torch.device("cpu"))
    load_adapter(model, adapter)
    dtype = getattr(torch, config.dtype)
    cast_parameters((p for _, p in trained_parameters(model)), dtype)  # as the Learner computes
    for name, layer in list(model.named_modules()):
        is_inside = ".base_layer" in name  # replaced with the layer around it
        if hasattr(layer, "base_layer") or (is_quantized(getattr(layer, "weight", None)) and not is_inside):
            model.set_submodule(name, _plain(layer, dtype))
    assert has_adapter(model)
    del model.peft_config
    return model.requires_grad_(True)


def _plain(layer: Any, dtype: torch.dtype) -> nn.Linear:
    base = getattr(layer, "base_layer", layer)
    with torch.device("meta"):
        plain = nn.Linear(base.in_features, base.out_features, base.bias is not None)
    plain.weight = nn.Parameter(merged(layer).to(dtype))
    plain.bias = base.bias
    return plain.eval()
