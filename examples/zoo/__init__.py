"""Environments and rewards to try a checker on: broken ones, and ones that are right."""
