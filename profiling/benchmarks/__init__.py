"""What `profiling/bench.py` can measure: a module a benchmark, each with `TITLE` and `run(options)`."""
