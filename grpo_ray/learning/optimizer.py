"""The optimizer of the Learner: AdamW over the float32 weights, with moments of 4, 2 or 1 bytes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from grpo_ray.config import LearnerConfig
from grpo_ray.errors import require_bitsandbytes
from grpo_ray.learning.device import Offload

Tensors = dict[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: LearnerConfig) -> torch.optim.Optimizer:
    """Make AdamW with fused updates, which take no temporary copies of all weights.

    On a CPU they take a third of the time of the others, with results that agree to float32's rounding.

    Raises:
        ValueError: bitsandbytes is not installed, and the configuration asks for it.
    """
    options: dict[str, Any] = {
        "lr": config.learning_rate, "betas": config.betas, "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }  # fmt: skip
    if config.moments == "8bit":
        require_bitsandbytes("learner.moments", config.moments, "bfloat16")
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **options)
        return optimizer
    kind = torch.optim.AdamW if config.moments == "float32" else NarrowAdamW
    return kind(parameters, fused=True, **options)


class NarrowAdamW(torch.optim.AdamW):
    """AdamW that keeps its moments in bfloat16 and computes each weight's update in float32.

    As in the training of DeepSeek-V3 (2024, section 3.3.2), with rounding to the nearest. A moment that changes
    by less than 1 in 512 per step never moves; beyond 1 in 256 it does. This limits betas; see LearnerConfig.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.nn.Parameter, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
        mean, square = wide = [state[name].float() for name in MOMENTS]
        adamw(
            [parameter], [parameter.grad], [mean], [square], [], [state["step"]], fused=True, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], eps=group["eps"],
            weight_decay=group["weight_decay"], maximize=False,
        )  # fmt: skip
        for name, moment in zip(MOMENTS, wide, strict=True):
            state[name].copy_(moment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # casts to the dtype of the weights
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in MOMENTS}


def state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> Tensors:
    """Return the state of one weight for a checkpoint; a weight that never had a gradient has none."""
    state = optimizer.state.get(parameter, {})
    # The table of bitsandbytes' 8-bit values is a constant that all weights share.
    return {name: torch.as_tensor(value) for name, value in state.items() if not name.startswith("qmap")}


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[int, Tensors]) -> None:
    """Restore what `state_tensors` returned, by the positions of the weights."""
    is_8bit = hasattr(optimizer, "name2qmap")
    restored = {
        position: {**tensors, **(_of_bitsandbytes(optimizer, tensors) if is_8bit else {})}
        for position, tensors in state.items()
    }
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def _of_bitsandbytes(optimizer: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the parts of a weight's state that a checkpoint has in another form, or not at all."""
    found: dict[str, Any] = {"step": int(tensors["step"])}
    if "absmax1" in tensors:
        optimizer.fill_qmap()
        found |= {"qmap1": optimizer.name2qmap["dynamic"], "qmap2": optimizer.name2qmap["udynamic"]}
    return found


def learning_rate(config: LearnerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1, in a run of `num_steps`.

    It depends on nothing else, so a resumed run continues it exactly. After the warm-up the values are those of
    transformers' schedules `linear` and `cosine_with_min_lr`, which count steps from 0. With w steps of warm-up
    step w has the peak, and so does step w + 1.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * (step / warmup)
    if config.lr_schedule == "constant":
        return peak
    progress = min(1.0, (step - 1 - warmup) / (num_steps - warmup))
    left = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, offload: Offload) -> None:
    """Move the optimizer's state to the weights' new device; fused updates need its counters there as well."""
    states = optimizer.state.values()
    offload.move([v for state in states for v in state.values() if isinstance(v, torch.Tensor)], device)
    for state in states:  # sharded ones
        state |= {name: value.to(device) for name, value in state.items() if isinstance(value, torch.Tensor)}
