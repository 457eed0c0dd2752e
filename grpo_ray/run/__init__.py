"""One training run, from start to end. Read controller.py first; it reads top to bottom.

training.py starts and resumes a run, preflight.py checks it, and restores.py restarts it from checkpoints.
rollout_producer.py and generator_pool.py produce groups while controller.py trains and publishes.
"""
