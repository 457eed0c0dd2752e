"""`grpo-ray audit`: check a run's files for contradictions."""
