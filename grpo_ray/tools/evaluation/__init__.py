"""`grpo-ray evaluate`: a run's actors, without the Learner, sample and grade (evaluate.py).

The summary is the same as that of validation during training: records/evaluation_summary.py.
"""
