"""One run around the heart: checks before it, its start, restores, signals, and supervised steps before it."""
