"""A folder that one job fills over several starts, and that no other job may write to."""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_ray.config.schema import leaves
from grpo_ray.errors import RunError
from grpo_ray.records.durable import write_text
from grpo_ray.records.readable_rollouts import shortened
from grpo_ray.records.run_lock import check_still_held, locked

LOCK_NAME = ".lock"
MAX_VALUE_CHARACTERS = 200  # of a definition's value in an error
NOT_THERE = object()

Definition = Mapping[str, Any]
Differences = Callable[[Definition, Definition], list[str]]  # (before, now) -> one line per difference


class ResumableFolder:
    """A folder and its definition file, which says which job the folder belongs to.

    A start with the same definition resumes the job. Another definition, or anything else there, is refused.
    """

    def __init__(
        self, path: Path, definition_name: str, job: str, remedy: str, differences: Differences | None = None
    ) -> None:
        """Describe the folder; nothing is read or written yet.

        Args:
            definition_name: name of the definition file in the folder.
            job: what the folder holds, in one word, for errors.
            remedy: how to choose another folder, such as "give another --output".
            differences: compares two definitions; by default every value has to be equal.
        """
        self.path = path
        self.definition_path = path / definition_name
        self._job, self._remedy = job, remedy
        self._differences = differences or changed_values

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock on the folder, which is made if necessary; raises RunError with another holder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None
        return locked(self.path / LOCK_NAME, self.path)

    def check_lock(self) -> None:
        """Refuse to write on if another process holds the lock as well; raises RunError, which names it."""
        check_still_held(self.path / LOCK_NAME, self.path)

    def is_free(self, skeleton: Collection[Path] = (), ignored: Collection[str] = ()) -> bool:
        """Return whether the folder holds nothing of any job.

        Args:
            skeleton: subfolders that do not count as long as they are empty.
            ignored: names of entries that do not count.
        """
        # Left by a start that was killed.
        own = (LOCK_NAME, f".{LOCK_NAME}.writer", f".{self.definition_path.name}.partial")

        def is_foreign(entry: Path) -> bool:
            is_ours = entry.name in ignored or entry.name.startswith(own)
            return not is_ours and not (entry in skeleton and not any(entry.iterdir()))

        if not self.path.exists():
            return True
        return self.path.is_dir() and not any(map(is_foreign, self.path.iterdir()))

    def check_writable(self) -> None:
        """Refuse a path under which no file can be created; raises RunError with the reason and the remedy."""
        try:
            nearest = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def check(self, definition: Definition, is_partial: bool = False) -> None:
        """Refuse a folder that belongs to another job, holds something else, or cannot be written.

        Args:
            is_partial: `definition` is not complete yet; keys that it lacks are not compared.

        Raises:
            RunError: says what the folder holds and what to do.
        """
        if self.definition_path.exists():
            self._check_same(definition, is_partial)
        elif self.path.is_dir() and not self.is_free():
            raise RunError(
                f"{self.path} is not empty and holds no {self._job}; {self._remedy}, or move it away"
            )
        else:
            self.check_writable()

    def claim(self, definition: Definition) -> None:
        """Write the definition, which makes the folder this job's; raises as `check`."""
        self.check(definition)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.definition_path, json.dumps(definition, indent=1) + "\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def _check_same(self, definition: Definition, is_partial: bool) -> None:
        try:
            before = json.loads(self.definition_path.read_text(encoding="utf-8"))
            if is_partial:
                before = {key: value for key, value in before.items() if key in definition}
            differences = self._differences(before, json.loads(json.dumps(definition)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(f"{self.definition_path} is not readable ({error!r}); {self._remedy}") from error
        if differences:
            lines = "\n  ".join(differences)
            raise RunError(
                f"{self.path} holds another {self._job}; {self._remedy}, or move it away:\n  {lines}"
            )

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(f"{self.path} cannot be written ({error.strerror}); {self._remedy}")


def changed_values(before: Definition, now: Definition, prefix: str = "") -> list[str]:
    """Return one line for each value that differs, or that only one of the two has."""
    old, new = leaves(before), leaves(now)
    return [
        f"{prefix}{key}: was {_words(old.get(key, NOT_THERE))}, is {_words(new.get(key, NOT_THERE))}"
        for key in {**old, **new}
        if old.get(key, NOT_THERE) != new.get(key, NOT_THERE)
    ]


def _words(value: Any) -> str:
    if value is NOT_THERE:
        return "not there"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return shortened(json.dumps(value), MAX_VALUE_CHARACTERS)
