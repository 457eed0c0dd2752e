"""The policy: the model that learns, and all that the Learner does with it on one batch.

`loading.py` opens the folder of a model (`models/policy_model.py` is the interface). For a step,
`microbatch.py` lays sequences out in rows, as trees of `segments.py` that share prompts where `layout.py`
finds that the model's attention (`attention.py`) allows it; `log_probs.py` computes their log-probabilities,
and `forward_backward.py` adds up gradients of the objective. `master_weights.py` and `optimizer.py` turn them
into new weights. `reference.py` is the model that KL is measured against, and `training_state.py` the
optimizer's part of a checkpoint. `adapters.py` and `quantization.py` train a few parameters on a frozen base.
"""
