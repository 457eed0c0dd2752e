"""The state that training resumes from: weights, optimizer, random generators and a moving reference.

A `TrainingState` is a copy in host memory, which any thread may write while training continues. On disk it is a
model in Hugging Face format and `model.dtype`, or an adapter in PEFT's, and tensors `weights/<weight>`
(float32, if the model's are not), `adam/<weight>/<moment>`, `random/<device>`, `reference/<weight>` (of a
reference that moves) and `counters/<name>`. One rank writes them to `training/optimizer.safetensors`; several
write their shards to `training/state/`, through torch.distributed.checkpoint. Any number of ranks reads either.
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

from grpo_ray.learning.adapters import has_adapter, save_adapter
from grpo_ray.learning.device import host_memory
from grpo_ray.learning.hub_format import persistent_buffers
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.optimizer import load_state, state_tensors
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.reference import Reference
from grpo_ray.learning.sharded import local_part, sharded_like
from grpo_ray.learning.shards import Shards, gathered_weights, read_shards, shards_of, write_shards
from grpo_ray.records.durable import sync

FILE_NAME, FOLDER_NAME = "optimizer.safetensors", "state"
WEIGHTS, ADAM, RANDOM, REFERENCE, COUNTERS = "weights/", "adam/", "random/", "reference/", "counters/"
LARGEST_FILE = "5GB"  # of the Hugging Face folder
RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingState:
    """Copies in host memory, of this rank's shards if there are several; tied weights share one copy."""

    weights: Tensors
    training: Tensors
    shards: Shards  # of the tensors that are sharded


def capture_state(
    masters: MasterWeights, optimizer: torch.optim.Optimizer, counters: Mapping[str, float],
    reference: Mapping[str, torch.Tensor], spare: TrainingState | None = None,
) -> TrainingState:  # fmt: skip
    """Copy the state to host memory, over an earlier state that is not needed any more if one is given.

    Args:
        reference: the weights of a reference that moves.
        spare: its memory is page-locked if it was copied from a GPU; to lock memory takes longer than a copy.
    """
    weights = masters.state_dict()
    training = {
        **{
            f"{ADAM}{name}/{moment}": tensor
            for name, parameter in masters.named.items()
            for moment, tensor in state_tensors(optimizer, parameter).items()
        },
        **_random_tensors(),
        **{REFERENCE + name: tensor for name, tensor in reference.items()},
        **{COUNTERS + name: _exact(count) for name, count in counters.items()},
    }
    return TrainingState(
        weights=_copies(weights, spare.weights if spare else {}),
        training=_copies(training, spare.training if spare else {}),
        shards=shards_of({**weights, **training}),
    )


def write_state(
    state: TrainingState, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype,
    folder: Path, ranks: Ranks,
) -> dict[str, int]:  # fmt: skip
    """Write the state to an existing folder and flush it to disk; return the size of each file.

    Every rank writes, the first alone returns. Only the configuration of `model`, and of its adapter, is used.

    Args:
        dtype: of the model's folder; an adapter stays in float32.

    Raises:
        OSError: it could not be written.
    """
    training = folder / "training"
    wire = torch.float32 if has_adapter(model) else dtype
    wide = {id(weight): name for name, weight in reversed(state.weights.items()) if weight.dtype != wire}
    beside = {WEIGHTS + name: state.weights[name] for name in wide.values()}  # tied ones under their first name
    with os_errors():
        shards = {**state.shards, **{WEIGHTS + name: shard for name, shard in state.shards.items()}}
        if ranks.size > 1:  # makes the folder itself: an error of one rank alone would leave the others waiting
            write_shards({**beside, **state.training}, shards, training / FOLDER_NAME, ranks)
        else:
            training.mkdir(exist_ok=True)
        # The last that all ranks take part in: an error of the first below leaves none of them waiting.
        weights = gathered_weights(state.weights, shards, wire, ranks)
        if not ranks.is_first:
            return {}
        if has_adapter(model):
            save_adapter(model, weights, folder)
        else:
            weights |= {name: state.weights[name] for name, _ in persistent_buffers(model)}  # uncast
            model.save_pretrained(folder, state_dict=weights, max_shard_size=LARGEST_FILE)
            path = folder / "config.json"  # has the model's dtype; the written weights may have another
            named = {**json.loads(path.read_bytes()), "dtype": str(dtype).removeprefix("torch.")}
            path.write_text(json.dumps(named, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(folder)
        if ranks.size == 1:
            save_file({**beside, **state.training}, training / FILE_NAME)
    return _sync(folder, training)


def restore_state(
    training_folder: Path, masters: MasterWeights, optimizer: torch.optim.Optimizer,
    reference: Reference | None = None,
) -> dict[str, float]:  # fmt: skip
    """Restore everything that `capture_state` copied but weights in the model's folder; return the counters.

    The reference keeps its weights if the checkpoint has none for it.

    Raises:
        ValueError: the state belongs to another model.
    """
    tensors = _read(training_folder, masters)
    load_state(optimizer, _optimizer_state(tensors, list(masters.named)))
    masters.load(_part(tensors, WEIGHTS))
    moved = _part(tensors, REFERENCE)
    if reference is not None and reference.moves and moved:
        reference.masters.load(moved)
    random = _part(tensors, RANDOM)
    torch.set_rng_state(random["cpu"])
    if torch.cuda.is_available() and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return {name: count.item() for name, count in _part(tensors, COUNTERS).items()}


def _exact(count: float) -> torch.Tensor:
    return torch.tensor(count, dtype=torch.int64 if isinstance(count, int) else torch.float64)


def _read(training_folder: Path, masters: MasterWeights) -> Tensors:
    """Read the tensors, those of a sharded weight in its shards."""

    def like(name: str) -> torch.Tensor | None:
        weight = name.partition("/")[2]
        return masters.named.get(weight.rpartition("/")[0] if name.startswith(ADAM) else weight)

    path = training_folder / FILE_NAME
    if not path.exists():
        return read_shards(training_folder / FOLDER_NAME, like)
    with safe_open(path, framework="pt") as file:
        # Runs that began before ranks existed have their counters in the file's metadata.
        old = {
            COUNTERS + name: torch.tensor(int(n)) for name, n in (file.metadata() or {}).items() if n.isdigit()
        }
        return old | {name: sharded_like(file.get_tensor(name).clone(), like(name)) for name in file.keys()}  # noqa: SIM118


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _sync(folder: Path, training: Path) -> dict[str, int]:
    """Flush only the files written here: others may be writing to `training` at the same time."""
    own = [training / FILE_NAME, training / FOLDER_NAME, *folder.glob(f"training/{FOLDER_NAME}/*")]
    paths = [*(path for path in folder.iterdir() if path.is_file()), *filter(Path.exists, own)]
    sizes = {str(path.relative_to(folder)): sync(path) for path in paths if path.is_file()}
    for path in (*filter(Path.is_dir, own), training, folder):
        sync(path)
    return sizes


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
    """Return contiguous copies of this rank's parts in host memory; tensors of shared memory share one copy."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    result = {}
    for name, tensor in ((name, local_part(tensor)) for name, tensor in tensors.items()):
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            memory = spare.get(name)
            if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
                memory = host_memory(tensor)
            copies[key] = memory.copy_(tensor.detach(), non_blocking=True)
        result[name] = copies[key]
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return result


@contextmanager
def os_errors() -> Iterator[None]:
    """Convert every error of a full disk to an OSError: Rust code raises a plain Exception for it."""
    try:
        yield
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if not isinstance(error, SafetensorError) and found is None:
            raise
        raise OSError(int(found[1]) if found else 0, str(error)) from error
