"""Comparisons: the same job under several settings and seeds, and what came of it in tables and pictures."""
