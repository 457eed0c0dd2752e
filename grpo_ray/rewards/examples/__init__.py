"""Reward functions to start from: `task.reward=grpo_ray.rewards.examples.json_object:reward_fn`."""
