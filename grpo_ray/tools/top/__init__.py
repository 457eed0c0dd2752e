"""`grpo-ray top`: watch a run in the terminal while it trains, from its files alone.

watch_run.py finds the run, also that of a submitted job, and redraws; run_view.py reads its files, frame.py
draws them, bottleneck.py finds what slows it down or fails, and learner_figures.py sums up the Learner's ranks.
"""
