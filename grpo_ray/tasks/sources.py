"""The files of a task's examples: a local file, or those of a dataset on the hub, downloaded once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import metadata_load, snapshot_download

from grpo_ray.config.task import ExamplesTaskConfig

SUFFIXES = (".parquet", ".jsonl")  # a split with both kinds is read from the first
LOCAL_SUFFIXES = (".jsonl", ".parquet", ".csv")
FILE_KINDS = ".jsonl, .parquet or .csv"
CARD = "README.md"


@dataclass(frozen=True)
class Source:
    """The files that examples are read from."""

    name: str  # for messages
    files: tuple[Path, ...]


def source_names(task: ExamplesTaskConfig) -> tuple[str, str]:
    """Return the names that messages use for the train and the validation examples."""
    return _name(task.train_path, task.train_split), _name(task.validation_path, task.validation_split)


def source_of(task: ExamplesTaskConfig, part: Literal["train", "validation"]) -> Source:
    """Return the files of these examples; those of a dataset on the hub are downloaded into its cache.

    Raises:
        ValueError: the dataset cannot be downloaded, or it has no such subset or split.
    """
    field, split = f"{part}_path", getattr(task, f"{part}_split")
    if not is_hub_dataset(path := getattr(task, field)):
        return Source(path, (Path(path),))
    try:
        return Source(_name(path, split), _hub_files(path, task.subset, split, task.revision))
    except _Absent as absent:
        raise ValueError(f"task.{field}: the dataset {path!r} on the hub {absent}") from None
    except Exception as error:  # the client's network library has errors of its own
        raise ValueError(
            f"task.{field}: {path!r} is not a local file; give the path of a {FILE_KINDS} file. "
            f"Downloading it as a dataset (owner/name) failed: {str(error).strip().partition(chr(10))[0]} "
            f"Without a network, download it beforehand: hf download --repo-type dataset {path}"
        ) from error


def _name(path: str, split: str) -> str:
    return f"{path} ({split})" if is_hub_dataset(path) else path


def is_hub_dataset(path: str) -> bool:
    """Return True if the path names a dataset on a hub (`owner/name`) rather than a local file."""
    is_path = path.startswith(("/", "./", "../", "~")) or Path(path).suffix in (*LOCAL_SUFFIXES, ".json")
    return path.count("/") == 1 and not is_path and not Path(path).exists()


class _Absent(Exception):
    """The dataset lacks the subset, split or files asked for."""


def _hub_files(name: str, subset: str | None, split: str, revision: str | None) -> tuple[Path, ...]:
    """Download the split's files into the hub's local cache; return their paths, sorted by name."""

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))

    card = download([CARD]) / CARD
    configs = (metadata_load(card) or {}).get("configs") if card.exists() else None
    patterns = _listed(configs, subset, split) if configs else _guessed(subset, split)
    patterns = [f"{pattern}*" if pattern.endswith("/") else pattern for pattern in patterns]
    folder = download(patterns)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    chosen = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
    folders = sorted({name.partition("/")[0] for name in chosen if "/" in name})
    if subset is None and not configs and len(folders) > 1:
        raise _Absent(f"has several folders with it; set task.subset to one of {', '.join(folders)}")
    for suffix in SUFFIXES:
        if files := tuple(folder / name for name in chosen if name.endswith(suffix)):
            return files
    raise _Absent(
        f"has no .parquet or .jsonl file for the split {split!r}{f' of {subset!r}' if subset else ''}; look at "
        "its files there, and set task.subset and the split. For most datasets the hub has a Parquet version: "
        "set task.revision to refs/convert/parquet"
    )


def _listed(configs: Sequence[Mapping[str, Any]], subset: str | None, split: str) -> list[str]:
    """Return the patterns that the dataset's card lists for the files of a split."""
    subsets = {str(config.get("config_name", "default")): config for config in configs}
    if subset is None:
        defaults = [name for name, config in subsets.items() if config.get("default") or name == "default"]
        candidates = defaults or list(subsets)
        if len(candidates) > 1:
            raise _Absent(f"has several subsets; set task.subset to one of {', '.join(subsets)}")
        subset = candidates[0]
    if subset not in subsets:
        raise _Absent(f"has no subset {subset!r}; set task.subset to one of {', '.join(subsets)}")
    splits = _splits(subsets[subset].get("data_files", []))
    if splits and split not in splits:
        raise _Absent(f"has no split {split!r} in {subset!r}; set it to one of {', '.join(splits)}")
    return splits[split] if splits else _guessed(subset, split)


def _splits(data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split; a card has a list of splits, or just the patterns of its only one."""
    entries = [data_files] if isinstance(data_files, str) else data_files
    splits: dict[str, list[str]] = {}
    for entry in entries:
        name, paths = (entry["split"], entry["path"]) if isinstance(entry, Mapping) else ("train", entry)
        splits.setdefault(name, []).extend([paths] if isinstance(paths, str) else paths)
    return splits


def _guessed(subset: str | None, split: str) -> list[str]:
    """Return usual names for a card that lists no files: `main/train-0.parquet`, `main/train/0000.parquet`."""
    prefix = "" if subset in (None, "default") else f"{subset}/"
    return [f"{prefix}{start}{split}{end}*" for start in ("", "*/") for end in (".", "[-_][0-9]", "/")]
