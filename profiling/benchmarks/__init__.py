"""What `profiling/bench.py` can measure: a module a benchmark, each with `TITLE` and `run(options)`.

`TAKES_OVERRIDES` is there where changes of the configuration mean something.
"""
