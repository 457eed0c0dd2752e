"""Weights under the names and in the shapes of the checkpoint on the hub, which vLLM loads.

transformers 5 renames and fuses weights as it loads them: a Qwen3-MoE's `experts.0.gate_proj.weight`,
`experts.0.up_proj.weight`, `experts.1...` become one `experts.gate_up_proj`. `save_pretrained` reverts that
for a whole model; here it is reverted one group of weights at a time, without a second copy of the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from grpo_ray.learning.policy_model import PolicyModel


@dataclass(frozen=True)
class LazyWeight:
    """A weight that each `detach` computes or gathers, in the place of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    detach: Callable[[], Tensor]
    layer: nn.Module | None = None  # with the parameters that `detach` reads, if they are several
    keeps_dtype: bool = False  # it is sent in its own dtype


def in_hub_format(model: PolicyModel, weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the weights under their names on the hub; those of another shape there convert on `detach`.

    Weights of one group come one after another, and are converted together when the first is read. Reading
    them in order therefore holds one converted group at a time.

    Args:
        weights: tensors, or other things with `shape`, `dtype` and `detach`, by name in the model.
    """
    latest: dict[_Group, dict[str, Tensor]] = {}  # converted last, with those of its weights that were not read

    def read(name: str, group: _Group) -> Tensor:
        if name not in latest.get(group, {}):
            latest.clear()  # freed before the next are made
            latest[group] = group.convert()
        return latest[group].pop(name)

    found: list[tuple[str, Any]] = []
    for group in _groups(model, weights):
        if isinstance(group, _Group):
            found += (
                (name, LazyWeight(shape, group.dtype, partial(read, name, group)))
                for name, shape in group.shapes.items()
            )
        else:
            found.append(group)
    return found


@torch.no_grad()
def load_hub_format(model: PolicyModel, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights of `in_hub_format` into the model's parameters and persistent buffers.

    Raises:
        KeyError: a weight is missing.
    """
    for group in _groups(model, model_tensors(model)):
        if not isinstance(group, _Group):
            name, tensor = group
            tensor.copy_(weights[name])
            continue
        # Each value's place in the model is found by converting the numbers of the places.
        sizes = [tensor.shape.numel() for tensor in group.members.values()]
        places = torch.arange(sum(sizes)).split(sizes)
        shapes = (tensor.shape for tensor in group.members.values())
        numbered = {n: p.view(shape) for n, p, shape in zip(group.members, places, shapes, strict=True)}
        whole = torch.empty(sum(sizes), dtype=torch.float64)
        for name, place in revert_weight_conversion(group.model, numbered).items():
            whole[place.flatten()] = weights[name].double().cpu().flatten()
        for tensor, values in zip(group.members.values(), whole.split(sizes), strict=True):
            tensor.copy_(values.view(tensor.shape))


def model_tensors(model: PolicyModel) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, tied ones once."""
    yield from model.named_parameters()
    yield from persistent_buffers(model)


def persistent_buffers(model: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint has, such as a router's correction of its scores."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


class _Group:
    """Weights of a model that become weights of its checkpoint together."""

    def __init__(self, model: PreTrainedModel, members: Mapping[str, Any]) -> None:
        self.model, self.members = model, members
        empty = {name: torch.empty(weight.shape, device="meta") for name, weight in members.items()}
        reverted = revert_weight_conversion(model, empty)
        self.shapes = {name: tensor.shape for name, tensor in reverted.items()}  # by name in the checkpoint
        self.dtype: torch.dtype = next(iter(members.values())).dtype

    def convert(self) -> dict[str, Tensor]:
        """Read all members and return the checkpoint's weights, which may be views of them."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.members.items():
            read = weight.detach()
            # Reading the next may free this one, if it was gathered from the ranks.
            tensors[name] = read.clone() if len(self.members) > 1 else read
        converted: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return converted


def _groups(model: Any, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any] | _Group]:
    """Yield weights that keep their shape, renamed, and groups of those that do not, in the given order."""
    if not isinstance(model, PreTrainedModel) or not _conversions(model):
        yield from weights
        return
    reverse = [conversion.reverse_transform() for conversion in _conversions(model)[::-1]]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    found: dict[str, tuple[str, Any] | dict[str, Any]] = {}
    for name, weight in weights:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            found[renamed] = renamed, weight
        else:
            members = found.setdefault(renamed, {})
            assert isinstance(members, dict)
            members[name] = weight
    for entry in found.values():
        yield _Group(model, entry) if isinstance(entry, dict) else entry


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions that loaded the model's weights; for a new model, those of its class."""
    if getattr(model, "_weight_conversions", None) is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        # As in transformers: a prefix belongs to a checkpoint, and this model comes from none.
        model._weight_conversions = [one for one in known if not isinstance(one, PrefixChange)]
    return model._weight_conversions  # type: ignore[no-any-return]


def used_conversions(model: PolicyModel) -> list[str] | None:
    """Describe the conversions that loaded the model's weights, for `choose_conversions` in another process."""
    used = getattr(model, "_weight_conversions", None)
    return None if used is None else [_described(one) for one in used]


def choose_conversions(model: Any, used: Sequence[str] | None) -> None:
    """Have a model that was not loaded from files save its weights by those of its class's conversions.

    Raises:
        RuntimeError: one of them is not known here; the processes have different versions of transformers.
    """
    known = {} if used is None else {_described(one): one for one in get_model_conversion_mapping(model)}
    if used and (missing := set(used) - known.keys()):
        raise RuntimeError(f"this process has no conversion of weights {sorted(missing)}")
    model._weight_conversions = None if used is None else [known[one] for one in used]


def _described(conversion: Any) -> str:
    return f"{conversion!r} of {conversion.scope_prefix}"
