"""The state that training resumes from: weights, optimizer, random generators and a moving reference.

A `TrainingState` is a copy in host memory, which any thread may write while training continues. On disk it is a
model in Hugging Face format, or an adapter in PEFT's, and `training/optimizer.safetensors`, with tensors
`adam/<weight>/<moment>`, `random/<device>` and `reference/<weight>` (of a reference that moves), and counters
in the file's metadata.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from grpo_ray.models.policy_model import PolicyModel
from grpo_ray.policy.adapters import has_adapter, save_adapter
from grpo_ray.policy.device import host_memory
from grpo_ray.policy.master_weights import MasterWeights
from grpo_ray.policy.optimizer import load_state, state_tensors
from grpo_ray.policy.reference import Reference
from grpo_ray.telemetry.durable import sync

FILE_NAME = "optimizer.safetensors"
ADAM, RANDOM, REFERENCE = "adam/", "random/", "reference/"  # prefixes of tensor names
RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingState:
    """Copies in host memory; tied weights share one copy."""

    weights: Tensors
    training: Tensors
    counters: dict[str, int]


def capture_state(
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
    reference: Mapping[str, torch.Tensor],
    spare: TrainingState | None = None,
) -> TrainingState:
    """Copy the state to host memory, over an earlier state that is not needed any more if one is given.

    Args:
        reference: the weights of a reference that moves.
        spare: its memory is page-locked if it was copied from a GPU; to lock memory takes longer than a copy.
    """
    kept = {REFERENCE + name: tensor for name, tensor in reference.items()}
    return TrainingState(
        weights=_copies(masters.state_dict(), spare.weights if spare else {}),
        training=_copies(
            {**_optimizer_tensors(masters, optimizer), **_random_tensors(), **kept},
            spare.training if spare else {},
        ),
        counters=dict(counters),
    )


def write_state(
    state: TrainingState, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, int]:
    """Write the state to an existing folder and flush it to disk; return the size of each file.

    Only the configuration of `model`, and of its adapter, is used.

    Raises:
        OSError: it could not be written.
    """
    training = folder / "training"
    training.mkdir(exist_ok=True)
    with _os_errors():
        if has_adapter(model):
            save_adapter(model, state.weights, folder)
        else:
            model.save_pretrained(folder, state_dict=dict(state.weights))
            _declare_float32(folder / "config.json")
        tokenizer.save_pretrained(folder)
        metadata = {name: str(count) for name, count in state.counters.items()}
        save_file(state.training, training / FILE_NAME, metadata=metadata)
    return _sync(folder, training)


def restore_state(
    training_folder: Path,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None = None,
) -> dict[str, int]:
    """Restore everything that `capture_state` copied except the weights; return the counters.

    The reference keeps its weights if the checkpoint has none for it.

    Raises:
        ValueError: the state belongs to another model.
    """
    path = training_folder / FILE_NAME
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        counters = {name: int(count) for name, count in (file.metadata() or {}).items()}
    state = _optimizer_state(tensors, list(masters.named))
    load_state(optimizer, state)
    moved = {name.removeprefix(REFERENCE): tensors[name] for name in tensors if name.startswith(REFERENCE)}
    if reference is not None and reference.moves and moved:
        reference.load(moved)
    torch.set_rng_state(tensors[RANDOM + "cpu"])
    if torch.cuda.is_available() and RANDOM + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RANDOM + "cuda"])
    return counters


def _declare_float32(path: Path) -> None:
    """Name the dtype of the written weights, where `save_pretrained` has named that of the model's copy."""
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n")


def _sync(folder: Path, training: Path) -> dict[str, int]:
    """Flush only the files written here: others may be writing to `training` at the same time."""
    files = [*(path for path in folder.iterdir() if path.is_file()), training / FILE_NAME]
    sizes = {str(path.relative_to(folder)): sync(path) for path in files}
    for path in (training, folder):
        sync(path)
    return sizes


def _optimizer_tensors(masters: MasterWeights, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state, named by weight; a weight that never had a gradient has none."""
    return {
        f"{ADAM}{name}/{moment}": tensor
        for name, parameter in masters.named.items()
        for moment, tensor in state_tensors(optimizer, parameter).items()
    }


def _optimizer_state(tensors: Tensors, names: list[str]) -> dict[int, Tensors]:
    """Return the state as in an optimizer's `state_dict`: by the weights' positions in `names`.

    Raises:
        ValueError: a weight is not in `names`.
    """
    positions = {name: position for position, name in enumerate(names)}
    state: dict[int, Tensors] = {}
    for key in filter(lambda key: key.startswith(ADAM), tensors):
        name, _, moment = key.removeprefix(ADAM).rpartition("/")
        if name not in positions:
            raise ValueError(f"the optimizer's state belongs to another model: this one has no weight {name}")
        state.setdefault(positions[name], {})[moment] = tensors[key]
    return state


def _random_tensors() -> Tensors:
    states = {RANDOM + "cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a Learner on the CPU of a GPU node must not make a context there
        states[RANDOM + "cuda"] = torch.cuda.get_rng_state()
    return states


def _copies(tensors: Mapping[str, torch.Tensor], spare: Mapping[str, torch.Tensor]) -> Tensors:
    """Return contiguous copies in host memory; tensors that share their memory share one copy."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            memory = spare.get(name)
            if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
                memory = host_memory(tensor)
            copies[key] = memory.copy_(tensor.detach(), non_blocking=True)
        result[name] = copies[key]
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return result


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert every error of a full disk to an OSError: Rust code raises a plain Exception for it."""
    try:
        yield
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if not isinstance(error, SafetensorError) and found is None:
            raise
        raise OSError(int(found[1]) if found else 0, str(error)) from error
