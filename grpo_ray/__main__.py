"""`python -m grpo_ray` is the command `grpo-ray`."""

import sys

from grpo_ray.tools.cli import main

sys.exit(main())
