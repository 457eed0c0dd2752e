"""Run the command `grpo-ray` as `python -m grpo_ray`."""

import sys

from grpo_ray.tools.cli import main

sys.exit(main())
