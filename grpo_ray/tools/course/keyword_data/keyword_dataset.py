"""A dataset in the making: every verified pair is on the disk at once, the finished files appear together."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ray.errors import RunError
from grpo_ray.rewards.builtin import keyword_inclusion_reward_fn
from grpo_ray.tasks.keywords.pairs import KeywordPair
from grpo_ray.tasks.keywords.word_list import Keywords
from grpo_ray.telemetry.durable import replacing, sync_tree
from grpo_ray.telemetry.json_lines import JsonLines, read_lines

TRAIN_FRAC = 0.8
DEFINITION = "definition.json"  # how the dataset was made
FEWEST_PAIRS = 5  # of fewer, a fifth is none


def has_keywords(answer: str, keywords: Keywords) -> bool:
    """Return True if the answer has every keyword, as the task's reward counts them."""
    return keyword_inclusion_reward_fn(answer, ", ".join(keywords))["answer_reward"] == 1.0


class KeywordDataset:
    """The dataset of `folder`; until it is finished its pairs are in the folder `<name>.unfinished`."""

    def __init__(self, folder: Path, definition: Mapping[str, Any]) -> None:
        """Begin, or go on with what an earlier start of the same `definition` left.

        Raises:
            RunError: the folder is not empty, cannot be written, or was begun with another definition.
        """
        folder = folder if folder.name else folder.resolve()  # "." has no name
        self.folder, self.unfinished = folder, folder.with_name(f"{folder.name}.unfinished")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder}: is there already, and is not overwritten; give another --output")
        try:
            self.unfinished.mkdir(parents=True, exist_ok=True)
            self._keep_definition(definition)
            path = self.unfinished / "pairs.jsonl"
            self._lines = JsonLines(path)
            rows = read_lines(path) if path.exists() else []
        except OSError as error:
            raise RunError(
                f"{self.unfinished}: cannot be written ({error.strerror}); give another --output"
            ) from None
        pairs = (KeywordPair(row["prompt"], row["answer"], tuple(row["keywords"])) for row in rows)
        self.pairs = {pair.keywords: pair for pair in pairs}

    def _keep_definition(self, definition: Mapping[str, Any]) -> None:
        path, text = self.unfinished / DEFINITION, json.dumps(definition, indent=1) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise RunError(
                f"{self.unfinished}: holds pairs that were begun with other options ({path.name} has them); "
                "give those again, remove the folder, or give another --output"
            )
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")

    def add(self, pair: KeywordPair) -> None:
        """Write a pair down.

        Raises:
            RunError: the disk does not take it.
        """
        assert has_keywords(pair.answer, pair.keywords)
        if error := self._lines.append(pair.to_json()):
            raise RunError(f"{error}; make room, and start again to go on")
        self.pairs[pair.keywords] = pair

    def finish(self, wanted: Sequence[Keywords]) -> tuple[int, int]:
        """Write `train.jsonl` and `validation.jsonl` in the order of `wanted`; returns how many each has.

        Raises:
            RunError: there are too few pairs.
        """
        pairs = [self.pairs[keywords] for keywords in wanted if keywords in self.pairs]
        if len(pairs) < FEWEST_PAIRS:
            raise RunError(
                f"only {len(pairs)} of {len(wanted)} prompts got an answer with all of the keywords, and "
                f"{FEWEST_PAIRS} are needed; raise --max-attempts, or take another --prompt or --model"
            )
        num_train = min(round(TRAIN_FRAC * len(pairs)), len(pairs) - 1)
        with replacing(self.folder) as partial:
            shutil.rmtree(partial, ignore_errors=True)  # an earlier start may have been killed here
            partial.mkdir()
            _write(partial / "train.jsonl", pairs[:num_train])
            _write(partial / "validation.jsonl", pairs[num_train:])
            shutil.copy(self.unfinished / DEFINITION, partial)
            sync_tree(partial)
        shutil.rmtree(self.unfinished)
        return num_train, len(pairs) - num_train


def _write(path: Path, pairs: Sequence[KeywordPair]) -> None:
    path.write_text("".join(json.dumps(pair.to_json()) + "\n" for pair in pairs), encoding="utf-8")
