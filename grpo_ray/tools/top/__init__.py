"""`grpo-ray top`: watch a run in the terminal while it trains, from its files alone.

run_view.py reads the run's files, and frame.py draws them again and again. bottleneck.py finds what slows a run
down, and sums up the Learner's ranks.
"""
