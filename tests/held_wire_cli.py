"""The command line with a Learner that waits between header and weights while a file `hold` is there.

The first argument is the file's folder; `held` appears there once a transfer waits.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from any_reward_cli import AnyRewardScorer

from grpo_ray.cluster import hosting
from grpo_ray.core.learner import Learner
from grpo_ray.tools.cli import main

HEADER_BYTES = 24


class HeldLearner(Learner):
    folder = Path()

    def __init__(self, *args: Any) -> None:
        from grpo_ray.transfer.wire import GlooChannel

        send, folder = GlooChannel.send, self.folder

        def held(channel: GlooChannel, part: torch.Tensor, timeout_s: float) -> None:
            while part.numel() > HEADER_BYTES and (folder / "hold").exists():
                (folder / "held").touch()
                time.sleep(0.01)
            send(channel, part, timeout_s)

        GlooChannel.send = held  # type: ignore[method-assign]
        super().__init__(*args)


if __name__ == "__main__":
    HeldLearner.folder = Path(sys.argv[1])
    hosting.Scorer = AnyRewardScorer  # type: ignore[misc]
    hosting.Learner = HeldLearner  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
