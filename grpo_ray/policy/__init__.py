"""The policy: the model that learns, and all that the Learner does with it on one batch.

For a step, `microbatch.py` lays sequences out in rows, as trees of segments that share prompts where
`layout.py` finds that the model's attention (`models/attention.py`) allows it; `log_probs.py` computes their
log-probabilities, and `forward_backward.py` adds up gradients of the objective. `master_weights.py` and
`optimizer.py` turn them into new weights. `reference.py` is the model that KL is measured against, and
`training_state.py` the optimizer's part of a checkpoint.

`ranks.py` is the Learner's processes among each other: `dealing.py` gives each its share of a batch,
`sharded_loading.py` and `shards.py` bring its part of the weights into memory and to disk, and `collectives.py`
times what they wait for.
"""
