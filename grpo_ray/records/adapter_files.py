"""An adapter's files in PEFT's format, told apart by the base that it was trained on."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from grpo_ray.config.model import AdapterConfig

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the tensors' names
FIELDS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "dora"}  # PEFT's and ours
DIGEST = "base_sha256"  # in the file's metadata, which peft ignores
OTHER_KINDS = "alpha_pattern", "use_qalora", "alora_invocation_tokens"  # of PEFT, which compute something else
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base, too
WINDOW_BYTES, NUM_WINDOWS = 4096, 16


def is_adapter(folder: Path) -> bool:
    """Return whether a folder, such as a checkpoint, holds an adapter in PEFT's format."""
    return (folder / CONFIG).is_file()


def checked_config(folder: Path, base: str) -> Mapping[str, Any]:
    """Return PEFT's configuration of an adapter; refuse a folder without one, or with that of another base.

    Raises:
        ValueError: the files are missing or damaged, or name another base by its digest.
    """
    for name in (CONFIG, FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"model.adapter.path: {str(folder)!r} has no {name}; give a folder in PEFT's format, such as a "
                "checkpoint of a run with model.adapter"
            )
    try:
        saved = dict(json.loads((folder / CONFIG).read_bytes()))
        with safe_open(folder / FILE, framework="numpy") as file:
            digest = (file.metadata() or {}).get(DIGEST)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"model.adapter.path: {str(folder)!r} is damaged ({error}); copy it again") from None
    if saved.get("peft_type") != "LORA":
        raise ValueError(f"model.adapter.path: {str(folder)!r} is of kind {saved.get('peft_type')}, not LORA")
    _refuse_other_kinds(folder, saved)
    own = base_digest(base)
    if digest and own and digest != own:
        raise ValueError(
            f"model.adapter.path: {str(folder)!r} is the adapter of another base "
            f"({saved.get('base_model_name_or_path')}), with other weights than {base!r}; set model.path to "
            "the base that it was trained on. A tiny model needs the release that built it"
        )
    return saved


def _refuse_other_kinds(folder: Path, saved: Mapping[str, Any]) -> None:
    others = [name for name in OTHER_KINDS if saved.get(name)]
    if str(saved.get("init_lora_weights")).startswith(OTHER_BASES):
        others.append("init_lora_weights")
    if others:
        raise ValueError(
            f"model.adapter.path: {str(folder)!r} has {others[0]}={saved[others[0]]!r}, which would be "
            "ignored; merge it into its base with PEFT, and give that as model.path"
        )


def saved_config(folder: Path) -> tuple[str, AdapterConfig]:
    """Return the base that an adapter in PEFT's format names, and its configuration.

    Raises:
        ValueError: the folder has no usable adapter of this kind.
    """
    try:
        saved = json.loads((folder / CONFIG).read_bytes())
        own = {field: saved[name] for name, field in FIELDS.items() if name in saved}
        targets = saved["target_modules"]
        base = "@".join(filter(None, (str(saved["base_model_name_or_path"]), saved.get("revision"))))
        config = AdapterConfig(**own, target_modules=tuple(sorted(targets)))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be used ({error!r}); copy the adapter again") from error
    _refuse_other_kinds(folder, saved)
    if isinstance(targets, str):
        raise ValueError(f"{folder / CONFIG}: target_modules is the pattern {targets!r}; give a list of names")
    return base, config


def base_digest(path: str) -> str | None:
    """Return a digest of a model's weights; None if they are not on this machine.

    It is of each file's name and size, and of 16 windows of 4 KiB in it, so that it takes no time with large
    models. It does not see a change between the windows; training changes all of a file.
    """
    folder = folder_of_model(path)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for window in range(NUM_WINDOWS):
                data.seek(size * window // NUM_WINDOWS)
                digest.update(data.read(WINDOW_BYTES))
    return digest.hexdigest()[:32]


def folder_of_model(path: str) -> Path | None:
    """Return the folder of a local model, or of one of the hub in its cache; None: it is in neither."""
    if (Path(path) / "config.json").exists():
        return Path(path)
    name, _, revision = path.partition("@")
    known = name.count("/") == 1 and not name.startswith((".", "/"))
    cached = try_to_load_from_cache(name, "config.json", revision=revision or None) if known else None
    return Path(cached).parent if isinstance(cached, str) else None
