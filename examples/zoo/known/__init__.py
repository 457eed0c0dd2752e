"""Environments, rewards and chat templates with one fault each, written beside the checks that find them."""
