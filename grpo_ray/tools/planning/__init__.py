"""`grpo-ray plan`: whether a configuration fits its devices, and how long a step would take; starts nothing."""
