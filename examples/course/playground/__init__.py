"""The command `playground`: the examples of Stanford CS336's lecture 17 (spring 2025), on this package's core.

play.py runs them. `sorting` trains a small model: settings.py, task.py, model.py, policy_gradient.py, and
comparison.py for several values of a setting. `baseline` and `frozen` have one file each; pictures.py draws.
"""
