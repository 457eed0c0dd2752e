"""The benchmarks of `profiling/bench.py`: one module each, with `TITLE` and `run(options)`.

A module with `TAKES_OVERRIDES` accepts overrides of the configuration.
"""
