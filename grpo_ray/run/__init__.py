"""One run from start to end. Start with controller.py, which reads top to bottom.

training.py starts and resumes; preflight.py checks; restores.py restarts from checkpoints; rollout_producer.py and
generator_pool.py produce groups while controller.py trains and publishes.
"""
