"""Reward functions to start your own from: `task.reward=grpo_ray.rewards.examples.json_object:reward_fn`."""
