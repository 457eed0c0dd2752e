"""The configuration of placement: the nodes that actors run on."""

from typing import Literal

from grpo_ray.config.section import NonNegativeFloat, Section

Strategy = Literal["pack", "spread", "strict_spread", "colocate"]


class PlacementConfig(Section):
    """Nodes of the Generators, Learner and Scorer; one placement group holds all that they reserve."""

    strategy: Strategy = "pack"
    """`pack`: on few nodes. `spread`: on many. `strict_spread`: each on its own. `colocate`: all on one."""
    wait_s: NonNegativeFloat = 0.0
    """Seconds to wait for missing resources, such as for an autoscaler or another job; 0 refuses at once."""
