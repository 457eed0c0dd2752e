"""Reward functions to start from: `task.reward=examples.rewards.json_object:reward_fn`."""
