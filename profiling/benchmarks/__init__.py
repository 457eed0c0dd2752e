"""The benchmarks of `profiling/bench.py`: one module per benchmark, with `TITLE` and `run(options)`.

A module also has `TAKES_OVERRIDES` if it takes changes to the configuration.
"""
