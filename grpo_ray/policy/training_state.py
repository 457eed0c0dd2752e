"""The state that training resumes from: weights, optimizer, random generators and a moving reference.

A `TrainingState` is a copy in host memory, which any thread may write while training continues. On disk it is a
model in Hugging Face format and `training/optimizer.safetensors`, with tensors `adam/<weight>/<moment>`,
`random/<device>` and `reference/<weight>` (of a reference that moves), and counters in the file's metadata.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from grpo_ray.policy.model import PolicyModel
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
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
    reference: Mapping[str, torch.Tensor],
) -> TrainingState:
    """Copy the state to host memory; `reference` holds the weights of a reference that moves."""
    kept = {REFERENCE + name: tensor for name, tensor in reference.items()}
    return TrainingState(
        weights=_copies(model.state_dict()),
        training=_copies({**_optimizer_tensors(model, optimizer), **_random_tensors(), **kept}),
        counters=dict(counters),
    )


def write_state(
    state: TrainingState, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the state to an existing folder and flush it to disk; of `model` only the configuration is used.

    Raises:
        OSError: it could not be written.
    """
    training = folder / "training"
    training.mkdir(exist_ok=True)
    with _os_errors():
        model.save_pretrained(folder, state_dict=dict(state.weights))
        tokenizer.save_pretrained(folder)
        metadata = {name: str(count) for name, count in state.counters.items()}
        save_file(state.training, training / FILE_NAME, metadata=metadata)
    _sync(folder, training)


def restore_state(
    training_folder: Path,
    model: PolicyModel,
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
    state = _optimizer_state(tensors, [name for name, _ in model.named_parameters()])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    moved = {name.removeprefix(REFERENCE): tensors[name] for name in tensors if name.startswith(REFERENCE)}
    if reference is not None and reference.moves and moved:
        reference.load(moved)
    torch.set_rng_state(tensors[RANDOM + "cpu"])
    if torch.cuda.is_available() and RANDOM + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RANDOM + "cuda"])
    return counters


def _sync(folder: Path, training: Path) -> None:
    """Flush only the files written here: others may be writing to `training` at the same time."""
    for path in (*(path for path in folder.iterdir() if path.is_file()), training / FILE_NAME):
        sync(path)
    for path in (training, folder):
        sync(path)


def _optimizer_tensors(model: PolicyModel, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state, named by weight; a weight that never had a gradient has none."""
    return {
        f"{ADAM}{name}/{moment}": tensor
        for name, parameter in model.named_parameters()
        for moment, tensor in optimizer.state.get(parameter, {}).items()
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
    if torch.cuda.is_available():
        states[RANDOM + "cuda"] = torch.cuda.get_rng_state()
    return states


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return contiguous copies in host memory; tensors that share their memory share one copy."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        result[name] = copies[key]
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
