"""Models: the interface of a policy, and those that need no download.

`policy_model.py` is what the Learner and the torch engine ask of a model. `transformer_lm/` is the package's
own implementation of a Llama. `tiny.py` builds a small model, and `warmup.py` trains it a little, for runs on
a CPU.
"""
