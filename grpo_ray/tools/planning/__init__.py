"""`grpo-ray plan`: the GPU memory that a configuration needs, and the time of a step; starts nothing."""
