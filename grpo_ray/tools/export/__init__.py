"""Whole models from checkpoints: an adapter merged into its base, in Hugging Face format."""
