"""The section `placement` of the configuration."""

from typing import Literal

from grpo_ray.config.section import NonNegativeFloat, Section

Strategy = Literal["pack", "spread", "strict_spread", "colocate"]


class PlacementConfig(Section):
    """Which nodes Generators, Learner and Scorer are on; one placement group holds what they reserve."""

    strategy: Strategy = "pack"
    """`pack`: on few nodes. `spread`: on many. `strict_spread`: on a node each. `colocate`: all on one node."""
    wait_s: NonNegativeFloat = 0.0
    """Seconds to wait for what the cluster lacks, as for an autoscaler or another job; 0 refuses at once."""
