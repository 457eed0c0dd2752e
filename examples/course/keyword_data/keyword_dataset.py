"""A dataset being written: each verified pair is on disk at once, and the finished files appear together."""

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_ray.errors import RunError
from grpo_ray.records.durable import replacing, sync_tree
from grpo_ray.records.json_lines import JsonLines, read_lines
from grpo_ray.records.resumable_folder import Definition, ResumableFolder
from grpo_ray.rewards.builtin import keyword_inclusion_reward_fn
from grpo_ray.tasks.keywords import Keywords

TRAIN_FRAC = 0.8
FEWEST_PAIRS = 5  # the fewest with at least one pair for validation


@dataclass(frozen=True)
class KeywordPair:
    """One line of a file: `{"prompt": "...", "answer": "...", "keywords": ["tree", "boat"]}`."""

    prompt: str
    answer: str
    keywords: Keywords


def has_keywords(answer: str, keywords: Keywords) -> bool:
    """Return whether the answer has every keyword, by the task's reward."""
    return keyword_inclusion_reward_fn(answer, ", ".join(keywords))["answer_reward"] == 1.0


class KeywordDataset:
    """The dataset in `folder`; until it is finished its pairs are in the folder `<name>.unfinished`."""

    def __init__(self, folder: Path, definition: Definition) -> None:
        """Start the dataset, or resume it from what an earlier start with the same `definition` left.

        Raises:
            RunError: the folder is not empty, cannot be written, or belongs to another definition.
        """
        folder = folder if folder.name else folder.resolve()  # "." has no name
        self.folder, self.unfinished = folder, folder.with_name(f"{folder.name}.unfinished")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists already, and is not overwritten; give another --output")
        self._resumable = ResumableFolder(
            self.unfinished, "definition.json", "keyword dataset", "give another --output"
        )
        self._resumable.claim(definition)
        path = self.unfinished / "pairs.jsonl"
        self._lines = JsonLines(path)
        rows = read_lines(path) if path.exists() else []
        pairs = (KeywordPair(row["prompt"], row["answer"], tuple(row["keywords"])) for row in rows)
        self.pairs = {pair.keywords: pair for pair in pairs}

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock on the unfinished dataset.

        Raises:
            RunError: another process holds the lock.
        """
        return self._resumable.lock()

    def add(self, pair: KeywordPair) -> None:
        """Write a pair to disk.

        Raises:
            RunError: it could not be written.
        """
        assert has_keywords(pair.answer, pair.keywords)
        if error := self._lines.append(asdict(pair)):
            raise RunError(f"{error}; make room, then run the same command to resume")
        self.pairs[pair.keywords] = pair

    def finish(self, wanted: Sequence[Keywords]) -> tuple[int, int]:
        """Write `train.jsonl` and `validation.jsonl` in the order of `wanted`; return the size of each.

        Raises:
            RunError: there are too few pairs.
        """
        pairs = [self.pairs[keywords] for keywords in wanted if keywords in self.pairs]
        if len(pairs) < FEWEST_PAIRS:
            raise RunError(
                f"only {len(pairs)} of {len(wanted)} prompts got an answer with all of the keywords, and "
                f"{FEWEST_PAIRS} are needed; raise --max-attempts, or give another --prompt or --model"
            )
        num_train = min(round(TRAIN_FRAC * len(pairs)), len(pairs) - 1)
        with replacing(self.folder) as partial:
            shutil.rmtree(partial, ignore_errors=True)  # an earlier start may have been killed here
            partial.mkdir()
            _write(partial / "train.jsonl", pairs[:num_train])
            _write(partial / "validation.jsonl", pairs[num_train:])
            shutil.copy(self._resumable.definition_path, partial)
            sync_tree(partial)
        shutil.rmtree(self.unfinished)
        return num_train, len(pairs) - num_train


def _write(path: Path, pairs: Sequence[KeywordPair]) -> None:
    path.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs), encoding="utf-8")
