"""Losses, a reward and an engine with one fault each, for `grpo-ray experiment failures` (docs/failures.md)."""
