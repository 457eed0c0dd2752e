"""Models: the interface of a policy, loading and checking one, and what may be done to its layers.

`policy_model.py` is what the Learner and the torch engine ask of a model, and `loading.py` opens its folder.
`attention.py` lets transformers' models attend in rows of `segments.py`, on GPUs with the kernels of
`attention_kernels.py`. `adapters.py` and `quantization.py` train a few parameters on a frozen base, `blocks.py`
compiles or recomputes blocks, and `sharded.py` reads parameters spread over ranks. `transformer_lm/` is
the package's own implementation of a Llama; `tiny.py` builds a small model, and `warmup.py` trains it a little,
for runs on a CPU.
"""
