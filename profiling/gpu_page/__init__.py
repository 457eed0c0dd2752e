"""The parts of profiling/gpu.py; they need torch, transformers, pydantic, psutil and numpy, not Ray or vLLM.

shapes.py       the models, by the sizes of Qwen2.5, and the batches
steps.py        one step of the Learner, and a plain step to compare with
exactness.py    log-probabilities and gradients against float32 on the CPU
throughput.py   seconds, utilization and memory, each case in a process of its own
page.py         the results in Markdown
"""
