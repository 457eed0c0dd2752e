"""GRPO for language models as a small set of Ray actors around vLLM."""

__version__ = "0.1.0"
