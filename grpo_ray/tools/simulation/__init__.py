"""`grpo-ray simulate`: the run's own code on simulated engines, in virtual time (docs/lab/scale.md)."""
