"""`grpo-ray` without Ray and vLLM: one command per line of standard input."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

from grpo_ray.tools.cli import main


class Refused(MetaPathFinder):
    """Fails for Ray and vLLM as if they were not installed."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name in ("ray", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refused())
    for line in sys.stdin:
        status = main(line.split())
        print(f"status {status}: {line}", flush=True)
