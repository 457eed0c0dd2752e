"""The pytest fixture `preflight`: `def test_my_env(preflight): preflight("my_env:episode")`."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def preflight() -> Callable[..., Any]:
    """Return a function of a target and the other `PreflightOptions`; it fails the test for each fault."""
    from grpo_ray.tools.preflight.command import PreflightOptions
    from grpo_ray.tools.preflight.preflight import preflight as run

    def checked(target: str, **options: Any) -> Any:
        found = run(PreflightOptions(target, **options))
        if found.faults:
            pytest.fail("\n".join(map(str, found.faults)), pytrace=False)
        return found

    return checked
