"""The parts of a Learner: the model that learns, and all that is done with it on one batch.

Models: `policy_model.py` is what the Learner and the torch engine ask of one, and how blocks are compiled or
recomputed; `loading.py` opens its folder. `attention.py` lets transformers' models attend in rows of
`families.py`, on GPUs with kernels of FlashAttention. `adapters.py` and `quantization.py` train a few
parameters on a frozen base, and `sharded.py` reads parameters spread over ranks. `transformer_lm/` is the
package's own implementation of a Llama.

A step: `sequences.py` makes a batch's sequences (`batch_advantages.py` where advantages need the whole batch),
`microbatch.py` lays them out in rows, as trees of segments that share prompts where `layout.py` finds that the
model's attention allows it; `log_probs.py` computes their log-probabilities, and `forward_backward.py` adds up
gradients of the objective. `master_weights.py` and `optimizer.py` turn them into new weights. `reference.py` is
the model that KL is measured against, and `training_state.py` the optimizer's part of a checkpoint.

`ranks.py` is the Learner's processes among each other: `microbatch.py` deals each its share of a batch, and
`sharded_loading.py` and `shards.py` bring its part of the weights into memory and to disk.
"""
