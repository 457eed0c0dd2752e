"""`grpo-ray top`: a run in the terminal while it goes on, from its files alone."""
