"""Everything that a run records: files, checkpoints, metrics, logs, console output and trackers."""
