"""Losses, a reward and an engine with one fault each, and an experiment with all of them (docs/failures.md)."""
