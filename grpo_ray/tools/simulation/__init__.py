"""`grpo-ray simulate`: the run's own code on simulated engines and Learner, in virtual time (docs/lab/scale.md)."""
