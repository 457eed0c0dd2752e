"""grpo_ray: GRPO for language models on Ray and vLLM.

    run = grpo_ray.train("configs/quickstart.yaml", local=True)

docs/python.md describes these names; everything else is internal.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_ray.api import Run, evaluate, read_rollouts, train

__version__ = "0.2.0"
__all__ = ["Run", "evaluate", "read_rollouts", "train"]


def __getattr__(name: str) -> Any:
    """Import the interface when it is used: the command line and the actors need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_ray import api

    return getattr(api, name)


_find_all = importlib.metadata.packages_distributions


class _Packages(Mapping[str, list[str]]):
    """The distributions of each package, found at a look-up: the one of its name, or all that have it.

    transformers asks for those of all packages as it is imported, of which each process needs three. All take
    0.7 s of CPU, as the list of every installed file is read. It is here, as each process imports this first.
    """

    def __init__(self) -> None:
        importlib.metadata.packages_distributions = _find_all  # for the next that asks

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _find_all()

    def __getitem__(self, package: str) -> list[str]:
        if not package.startswith("flash_attn"):  # which several distributions have
            with suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.metadata(package)["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


importlib.metadata.packages_distributions = _Packages
