"""Model FLOPs: the floating-point operations that training needs, whatever a device computes besides.

The count is that of Chowdhery et al. 2022 (PaLM, appendix B), as Narayanan et al. 2021 (Megatron-LM, appendix)
have it for recomputation and the output layer: a multiplication and an addition per value of a matrix and token
in the forward pass, twice that in the backward pass, and the scores and sums of attention over the keys that a
token really attends to. Not counted are embeddings, norms and other elementwise work, activations that are
recomputed, padding, and all but the first copy of shared tokens: they cost time, so they lower the utilization.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_ray.config import Config

Model = Any
"""A transformers model or a TransformerLM (learning/policy_model.py)."""

Lengths = Sequence[tuple[int, int, int]]
"""Per sequence: first tokens shared with one before it, all its tokens, and those that were sampled."""

DEVICE_PEAK = "memory/learner_device_peak_bytes"
EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")

# Dense peaks in 10^12 FLOP/s from NVIDIA's data sheets: bfloat16 on tensor cores with float32 accumulation, and
# float32 outside of them, as torch leaves TF32 off. The first name that the device's name contains counts.
PEAK_TFLOPS: Mapping[str, Mapping[torch.dtype, float]] = {
    name: {torch.bfloat16: bfloat16, torch.float32: float32}
    for name, bfloat16, float32 in (
        ("GB200", 2500, 80), ("B200", 2250, 75), ("GH200", 989, 67), ("H200 NVL", 835, 60), ("H200", 989, 67),
        ("H100 NVL", 835, 60), ("H100 PCIe", 756, 51), ("H100", 989, 67), ("H20", 148, 44), ("A100", 312, 19.5),
        ("A10", 125, 31.2), ("L40S", 362, 91.6), ("L40", 181, 90.5), ("L4", 121, 30.3),
        ("RTX A6000", 155, 38.7), ("RTX 5090", 209.5, 104.8), ("RTX 4090", 165.2, 82.6), ("RTX 3090", 71, 35.6),
    )
}  # fmt: skip


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak in FLOP/s of a GPU by the name that its driver reports; None if it is not known."""
    for name, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return 1e12 * peaks[dtype] if dtype in peaks else None
    return None


def num_tokens(lengths: Lengths) -> int:
    """Count the tokens, shared ones once."""
    return sum(length - shared for shared, length, _ in lengths)


def num_pairs(lengths: Lengths, window: int | None = None) -> int:
    """Count the pairs of a token and a key that it attends to: itself, and those before it in its sequence.

    With a `window` it attends only to that number of most recent keys, its own among them.
    """

    def of_first(length: int) -> int:  # the pairs of a sequence's first tokens
        seen = length if window is None else min(length, window)
        return seen * (seen + 1) // 2 + (length - seen) * seen

    return sum(of_first(length) - of_first(shared) for shared, length, _ in lengths)


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that its FLOPs follow from."""

    linear: float
    """Number of values in the matrices that a token is multiplied with, without the output layer. With experts:
    those of as many experts as a token takes."""
    linear_trained: float
    """Number of these that get a gradient."""
    output: int
    """Number of values in the output layer, which computes logits for sampled tokens only."""
    output_trained: int
    """Number of these that get a gradient: all or none."""
    attention_width: Mapping[int | None, float]
    """Sum over layers of heads x head size, by the window of the layer's attention (None: no window)."""

    @classmethod
    def of(cls, model: Model) -> "ModelSize":
        """Read the sizes of a transformers model or a TransformerLM from its parameters and configuration."""
        config, output = model.config.get_text_config(), model.get_output_embeddings().weight
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        shares = _active_shares(model, config)
        counted = [
            (shares.get(name, 1.0) * _num_values(p), p.requires_grad)
            for name, p in model.named_parameters()
            if p.ndim > 1 and not name.endswith("bias") and id(p) not in {*embeddings, id(output)}
        ]
        return cls(
            linear=sum(size for size, _ in counted),
            linear_trained=sum(size for size, is_trained in counted if is_trained),
            output=output.numel(),
            output_trained=output.numel() if output.requires_grad else 0,
            attention_width=_attention_width(config),
        )

    def forward_flops(self, lengths: Lengths) -> float:
        """Return the FLOPs of a forward pass: 2 per matrix value and token, 4 per unit of width and pair."""
        return 2 * self._products(lengths, self.linear, self.output) + 4 * self._attended(lengths)

    def training_flops(self, lengths: Lengths) -> float:
        """Return the FLOPs of a forward and a backward pass: 6 per matrix value, 4 if it has no gradient."""
        weights = 2 * self._products(lengths, self.linear_trained, self.output_trained)
        inputs = 2 * self._products(lengths, self.linear, self.output)
        return self.forward_flops(lengths) + inputs + weights + 8 * self._attended(lengths)

    def _products(self, lengths: Lengths, linear: float, output: int) -> float:
        return linear * num_tokens(lengths) + output * sum(sampled for _, _, sampled in lengths)

    def _attended(self, lengths: Lengths) -> float:
        return sum(width * num_pairs(lengths, window) for window, width in self.attention_width.items())


@dataclass
class WorkCount:
    """The model FLOPs and trained tokens of passes, added up until `Performance.take`."""

    flops: float = 0.0
    trained_tokens: int = 0


class Performance:
    """The figures of one step after another, per device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._num_devices = config.learner.num_ranks
        self._device, self._peak_flops = device, _peak_flops(config, device)

    def take(self, work: WorkCount, seconds: float) -> dict[str, float]:
        """Return the figures of the step that did `work` in `seconds` on all devices; begin those of the next.

        Those that cannot be known are absent: the utilization without a known peak, the memory on a CPU.
        """
        seconds *= self._num_devices
        metrics = {"perf/tokens_per_s_per_device": work.trained_tokens / seconds}
        if self._peak_flops is not None:
            metrics["perf/mfu"] = work.flops / seconds / self._peak_flops
        if self._device.type == "cuda":
            metrics[DEVICE_PEAK] = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        work.flops, work.trained_tokens = 0.0, 0
        return metrics


def _peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the device's peak in FLOP/s in `model.dtype`; None if no data sheet and no user gives it."""
    if config.learner.peak_tflops is not None:
        return 1e12 * config.learner.peak_tflops
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), getattr(torch, config.model.dtype))


def _num_values(parameter: Any) -> int:
    """Return the number of values in a matrix; one in 4 bits has two of them per byte."""
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())


def _active_shares(model: Model, config: Any) -> dict[str, float]:
    """Return the share of the experts that a token takes, by the name of each matrix of experts."""
    experts = {name: p for name, p in model.named_parameters() if EXPERT.search(name)}
    if not experts:
        return {}
    names = "num_experts_per_tok", "top_k_experts"  # Gemma 4 has the second
    taken = next((number for name in names if (number := getattr(config, name, None))), 1)
    listed = max(int(EXPERT.search(name)[1] or 0) for name in experts) + 1  # type: ignore[index]
    return {name: taken / (p.shape[0] if p.ndim == 3 else listed) for name, p in experts.items()}


def _attention_width(config: Any) -> dict[int | None, float]:
    """Return `ModelSize.attention_width`; layers of other kinds, such as linear attention, have no pairs."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    widths: defaultdict[int | None, float] = defaultdict(float)
    for place, kind in enumerate(getattr(config, "layer_types", None) or [default] * config.num_hidden_layers):
        own = config.per_layer_config[place] if getattr(config, "is_heterogeneous", False) else config
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        # Keys and values have heads of different sizes in models with latent attention.
        key_dim, value_dim = (getattr(own, f"{side}_head_dim", None) or head_dim for side in ("qk", "v"))
        if kind in ("full_attention", "sliding_attention"):
            at = window if kind == "sliding_attention" else None
            widths[at] += own.num_attention_heads * (key_dim + value_dim) / 2
    return dict(widths)
