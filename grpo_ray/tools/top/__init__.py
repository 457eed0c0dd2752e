"""`grpo-ray top`: watch a run in the terminal while it trains, from its files alone.

watch_run.py starts it and redraws; run_view.py reads the run's files, frame.py draws them, bottleneck.py finds
what slows the run down, learner_figures.py and rank_figures.py sum up the Learner and its ranks, and job.py
finds the run of a submitted job.
"""
