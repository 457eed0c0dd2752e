"""Where a task's examples are: a file here, or the files of a dataset on the hub, downloaded once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.utils import filter_repo_objects

from grpo_ray.config.task import ExamplesTaskConfig

SUFFIXES = (".parquet", ".jsonl")  # of a split that is there as both, the first is read
CARD = "README.md"


@dataclass(frozen=True)
class Source:
    name: str  # for messages
    files: tuple[Path, ...]


def train_source(task: ExamplesTaskConfig) -> Source:
    """Where the training examples are; downloads them if they are on the hub and not in its cache.

    Raises:
        ValueError: the hub does not give the dataset, or it has no such subset or split.
    """
    return _source(task, "train_path", task.train_path, task.train_split)


def validation_source(task: ExamplesTaskConfig) -> Source:
    """As `train_source`, for validation."""
    return _source(task, "validation_path", task.validation_path, task.validation_split)


def source_names(task: ExamplesTaskConfig) -> tuple[str, str]:
    """What messages call train's and validation's examples."""
    return _name(task.train_path, task.train_split), _name(task.validation_path, task.validation_split)


def _source(task: ExamplesTaskConfig, field: str, path: str, split: str) -> Source:
    if not is_hub_dataset(path):
        return Source(path, (Path(path),))
    try:
        return Source(_name(path, split), _hub_files(path, task.subset, split, task.revision))
    except _Absent as absent:
        raise ValueError(f"task.{field}: the dataset {path!r} on the hub {absent}") from None
    except Exception as error:  # the client's network library has errors of its own
        raise ValueError(
            f"task.{field}: {path!r} is no file here, and the hub did not give the dataset: {error} "
            "Give the path of a .jsonl or .parquet file, or the name of a dataset as owner/name; where "
            f"there is no network, bring it first: hf download --repo-type dataset {path}"
        ) from error


def _name(path: str, split: str) -> str:
    return f"{path} ({split})" if is_hub_dataset(path) else path


def is_hub_dataset(path: str) -> bool:
    """Whether it names a dataset on a hub (`owner/name`) rather than a file here."""
    is_path = path.startswith(("/", "./", "../", "~")) or Path(path).suffix in (*SUFFIXES, ".json", ".csv")
    return path.count("/") == 1 and not is_path and not Path(path).exists()


class _Absent(Exception):
    """What the dataset does not have."""


def _hub_files(name: str, subset: str | None, split: str, revision: str | None) -> tuple[Path, ...]:
    """The split's files in the hub's local cache, in the order of their names."""

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))

    card = download([CARD]) / CARD
    configs = (metadata_load(card) or {}).get("configs") if card.exists() else None
    patterns = _listed(configs, subset, split) if configs else _guessed(subset, split)
    folder = download(patterns)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    chosen = sorted(filter_repo_objects(names, allow_patterns=patterns))
    for suffix in SUFFIXES:
        if files := tuple(folder / name for name in chosen if name.endswith(suffix)):
            return files
    raise _Absent(
        f"has no .parquet or .jsonl file for the split {split!r}{f' of {subset!r}' if subset else ''}; look at "
        "its files there, and set task.subset and the split. The hub keeps a Parquet version of most datasets "
        "under task.revision = refs/convert/parquet"
    )


def _listed(configs: Sequence[Mapping[str, Any]], subset: str | None, split: str) -> list[str]:
    """The patterns that the dataset's card gives for the files of a split."""
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
    """The patterns of each split: a card has a list of splits, or a pattern or several of its only one."""
    entries = [data_files] if isinstance(data_files, str) else data_files
    splits: dict[str, list[str]] = {}
    for entry in entries:
        name, paths = (entry["split"], entry["path"]) if isinstance(entry, Mapping) else ("train", entry)
        splits.setdefault(name, []).extend(_as_list(paths))
    return splits


def _as_list(paths: str | Iterable[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def _guessed(subset: str | None, split: str) -> list[str]:
    """By their names, where the card is silent: `main/train-00000.parquet`, `main/train/0000.parquet`."""
    prefix = "" if subset in (None, "default") else f"{subset}/"
    return [f"{prefix}{start}{split}{end}*" for start in ("", "*/") for end in (".", "-", "_", "/")]
