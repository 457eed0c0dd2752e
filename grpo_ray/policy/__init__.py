"""The policy: the model that learns, and all that the Learner does with it on one batch.

`model.py` is the interface of a policy, and `loading.py` opens the folder of one. For a step, `microbatch.py`
pads sequences, `response_logits.py` computes the distribution that the sampler drew from, and
`forward_backward.py` adds up gradients of the objective. `reference.py` is the model that KL is measured
against, and `training_state.py` the optimizer's part of a checkpoint. Small models without a download:
`tiny.py` builds one, `warmup.py` trains it a little, and `transformer_lm/` is the package's own implementation
of a Llama.
"""
