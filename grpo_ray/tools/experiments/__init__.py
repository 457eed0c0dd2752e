"""Experiments: one job under several settings and seeds, compared in tables and figures."""
