"""The five actors of a run, and their parts; none of them imports Ray.

generator.py, scorer.py, trajectory_buffer.py, learner.py and weight_sync.py hold one actor each, and clients.py
declares every call to one. staleness.py is the rule that bounds the age of a token.
"""
