"""Stanford CS336's lecture 17 (spring 2025, policy gradients): its small examples, on this package's core."""
