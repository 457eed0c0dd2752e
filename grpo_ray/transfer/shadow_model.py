"""The next weights of vLLM's model on a CPU, made beside the model that samples and then put in its place.

On a CPU vLLM packs the weights of every linear layer for its kernels, which takes longer than a copy of them.
So a second set of tensors is loaded and packed while the engine goes on sampling; `put_in_place` then exchanges
Python references alone. On GPUs little is packed, and there is no memory for a second set.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_KINDS = ("_parameters", "_buffers")


@dataclass
class _Pair:
    """An object of the model, its shadow, and the shadow's attributes before anything was loaded."""

    live: Any
    shadow: Any
    before: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Expected:
    """A parameter or buffer of the next version: calls of its loader, and the copies that they make."""

    tensor: torch.Tensor  # on the meta device, in the shape that a checkpoint fills
    loader: Callable[..., Any]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # target, source
    loaded: torch.Tensor | None = None


class ShadowModel:
    """A model's layers once more with the weights of the next version, sharing all else with the model.

    It cannot follow a layerwise reload by vLLM (the weights become NaN), so an engine uses one or the other.
    """

    def __init__(self, model: nn.Module, is_tied: bool, can_adopt: bool = True) -> None:
        """
        Args:
            is_tied: the embeddings are the output layer's weights as well.
            can_adopt: layers that pack their weights forget the tensors that they packed.
        """
        self._can_adopt, self._is_recording = can_adopt, False
        self._expected: dict[int, _Expected] = {}  # by the id of its tensor
        self._shadows: dict[int, Any] = {}  # by the id of the shadowed object
        self._sources: set[int] = set()  # addresses of memory that belongs to the snapshot
        self._pairs: list[_Pair] = []
        self.root: Any = self._shadow(model)
        by_place: dict[Any, torch.Tensor] = {}
        for pair in self._pairs:
            if isinstance(pair.live, nn.Module):
                self._expect(pair, by_place, is_tied)
                pair.modules = dict(pair.shadow._modules)
            pair.before = dict(vars(pair.shadow))

    def _shadow(self, live: Any) -> Any:
        """Return an object with the same attributes; modules below it and what packs them are shadows too."""
        if id(live) in self._shadows:
            return self._shadows[id(live)]
        shadow = self._shadows[id(live)] = object.__new__(type(live))
        vars(shadow).update(vars(live))
        self._pairs.append(_Pair(live, shadow))
        if isinstance(live, nn.Module):
            children = {name: module and self._shadow(module) for name, module in live._modules.items()}
            vars(shadow)["_modules"] = children
        if isinstance(vars(live).get("quant_method"), QuantizeMethodBase):
            shadow.quant_method = self._shadow(live.quant_method)
        if getattr(shadow, "moe_kernel", None) is not None:
            shadow.moe_kernel = None  # vLLM packs only experts that have no kernel yet
        return shadow

    def _expect(self, pair: _Pair, by_place: dict[Any, torch.Tensor], is_tied: bool) -> None:
        """Give a shadow layer tensors without values, in the shapes before packing, that record loading."""
        for kind, templates in zip(_KINDS, get_layerwise_info(pair.live).restore_metadata, strict=True):
            own = vars(pair.live)[kind]
            tensors = vars(pair.shadow)[kind] = dict(own)
            for name in [*own, *(name for name in templates if name not in own)]:
                template = templates.get(name, own.get(name))
                if template is None:
                    continue
                place = id(own[name]) if is_tied and name in own else (id(pair), name)
                if place not in by_place:
                    by_place[place] = self._recording(template, pair)
                tensors[name] = by_place[place]

    def _recording(self, template: torch.Tensor, pair: _Pair) -> Any:
        tensor: Any = restore_layer_refs(sanitize_layer_refs(to_meta_tensor(template), pair.live), pair.shadow)
        expected = _Expected(tensor, getattr(tensor, "weight_loader", default_weight_loader))
        self._expected[id(tensor)] = expected

        def weight_loader(*arguments: Any, **named: Any) -> Any:
            if self._is_recording:  # one loader calls another
                return expected.loader(*arguments, **named)
            expected.calls.append((arguments, named))
            self._is_recording = True
            try:
                with _Copies(expected.copies):
                    return expected.loader(*arguments, **named)
            finally:
                self._is_recording = False

        tensor.weight_loader = weight_loader
        return tensor

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Note the place of each weight, and return the names that got one; `pack` reads the values."""
        loaded: set[str] | None = self.root.load_weights(weights)
        return loaded

    def pack(self, num_threads: int = 1) -> None:
        """Load and pack layer by layer; afterwards the weights given to `load` are not read any more."""
        with ThreadPoolExecutor(num_threads, "pack_weights") as threads:
            list(threads.map(self._pack, self._groups()))
        for expected in self._expected.values():
            vars(expected.tensor).clear()  # its loader, which holds all that was loaded
        self._expected.clear()

    def _groups(self) -> list[list[_Pair]]:
        """Return the layers; those that share a tensor are in one group, and packed one after another."""
        groups: list[list[_Pair]] = []
        group_of: dict[int, list[_Pair]] = {}  # by the id of an expected tensor
        for pair in self._pairs:
            if isinstance(pair.live, nn.Module):
                tensors = [id(tensor) for kind in _KINDS for tensor in vars(pair.shadow)[kind].values()]
                expected = [tensor for tensor in tensors if tensor in self._expected]
                group = next((group_of[tensor] for tensor in expected if tensor in group_of), None)
                if group is None:
                    groups.append(group := [])
                group.append(pair)
                group_of |= dict.fromkeys(expected, group)
        return groups

    @torch.no_grad()
    def _pack(self, pairs: Iterable[_Pair]) -> None:
        for pair in pairs:
            if self._fill(pair):
                _process(pair.shadow)
                for tensor in [*pair.shadow._parameters.values(), *pair.shadow._buffers.values()]:
                    if tensor is not None and tensor.untyped_storage().data_ptr() in self._sources:
                        tensor.data = tensor.data.clone()

    def _fill(self, pair: _Pair) -> bool:
        """Give a layer what was loaded, and the model's own tensors beside it; tell if any was."""
        any_loaded = False
        for kind in _KINDS:
            own, tensors = vars(pair.live)[kind], vars(pair.shadow)[kind]
            for name, tensor in list(tensors.items()):
                expected = self._expected.get(id(tensor))
                if expected is None:
                    continue
                if expected.calls:
                    tensors[name], any_loaded = self._loaded(expected, pair), True
                elif name in own:
                    tensors[name] = own[name]
                else:
                    del tensors[name]
        return any_loaded

    def _loaded(self, expected: _Expected, pair: _Pair) -> Any:
        if expected.loaded is not None:  # tied
            return expected.loaded
        joined = _joined(expected) if self._can_adopt else None
        loaded: Any = materialize_meta_tensor(expected.tensor) if joined is None else joined
        if joined is not None:
            self._sources.add(joined.untyped_storage().data_ptr())
        loaded.weight_loader = expected.loader
        for arguments, named in expected.calls if joined is None else ():
            if "param" in named:
                expected.loader(*arguments, **{**named, "param": loaded})
            else:
                expected.loader(loaded, *arguments[1:], **named)
        expected.loaded = restore_layer_refs(sanitize_layer_refs(loaded, pair.shadow), pair.live)
        return loaded

    def put_in_place(self) -> None:
        """Give the model the new tensors, and whatever was made from them, in place of its own."""
        for pair in self._pairs:
            live, shadow = vars(pair.live), vars(pair.shadow)
            if isinstance(pair.live, nn.Module):
                live |= {kind: shadow[kind] for kind in _KINDS}
                changed = (
                    name
                    for name in shadow["_modules"]
                    if pair.modules.get(name) is not shadow["_modules"][name]
                )
                live["_modules"].update({name: shadow["_modules"][name] for name in changed})
            live.update(
                {
                    name: value
                    for name, value in shadow.items()
                    if name not in (*_KINDS, "_modules") and pair.before.get(name, self) is not value
                }
            )
            shadow.clear()  # a loader that outlives this would keep this version's weights
        self._pairs.clear()
        self._shadows.clear()


def _process(layer: Any) -> None:
    """Do as vLLM does once a layer has been loaded."""
    quant_method = getattr(layer, "quant_method", None)
    if isinstance(quant_method, QuantizeMethodBase):
        quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()


def _joined(expected: _Expected) -> torch.Tensor | None:
    """Return the tensor as a view of its sources, if they lie in memory one after another as in it."""
    target = expected.tensor
    copies = sorted(expected.copies, key=lambda pair: pair[0].storage_offset())
    if not copies or not target.is_contiguous():
        return None
    first, place = copies[0][1], 0
    for to, source in copies:
        fits = (
            not source.is_meta
            and source.dtype == target.dtype
            and source.numel() == to.numel()
            and source.is_contiguous()
            and to.is_contiguous()
            and to.untyped_storage()._cdata == target.untyped_storage()._cdata
            and source.untyped_storage()._cdata == first.untyped_storage()._cdata
            and to.storage_offset() - target.storage_offset() == place
            and source.storage_offset() - first.storage_offset() == place
        )
        if not fits:
            return None
        place += to.numel()
    if place != target.numel():
        return None
    view = torch.empty(0, dtype=target.dtype)
    view.set_(first.untyped_storage(), first.storage_offset(), target.shape, target.stride())
    view.__class__ = target.__class__
    view.__dict__ = target.__dict__.copy()
    return view


class _Copies(TorchDispatchMode):
    """Records the copies between tensors."""

    def __init__(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._found.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))
