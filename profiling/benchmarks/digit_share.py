"""A reward for responses of any length that every policy earns some of, for benchmarks that need learning."""


def share_of_digits(response: str, ground_truth: str) -> float:
    """Return the share of the response's characters that are digits; `ground_truth` is not read."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
