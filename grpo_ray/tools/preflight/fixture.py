"""The pytest fixture `preflight`: `def test_my_env(preflight): preflight("my_env:episode")`."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def preflight() -> Callable[..., Any]:
    """Return a function of a target and the options of `preflight`; it fails the test for each fault."""
    from grpo_ray.tools.preflight.preflight import preflight as run

    def checked(target: str | None = None, **options: Any) -> Any:
        found = run(target, **options)
        faults = [f"{each.name}: {each.where}\n  {each.text}\n  cure: {each.cure}" for each in found.faults]
        if faults:
            pytest.fail("\n".join(faults), pytrace=False)
        return found

    return checked
