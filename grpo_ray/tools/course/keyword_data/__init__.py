"""Making data sets: `grpo-ray data`."""
