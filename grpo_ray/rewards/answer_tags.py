"""The response format: a thought, `</think> <answer>`, an answer, `</answer>`."""

THINK = "<think>"
OPENING = "</think> <answer>"
CLOSING = "</answer>"


def read_answer(response: str) -> str | None:
    """The stripped text between the answer tags; None when the response is not in the format.

    The prompt already ends in `<think>`, or else the response begins with it. Each tag must stand exactly
    once: with a second answer the policy could hedge, and with a second `</think>` it is not clear which
    part was the thought.
    """
    response = response.strip().removeprefix(THINK)
    if THINK in response:
        return None
    if any(response.count(tag) != 1 for tag in ("</think>", "<answer>", CLOSING)):
        return None
    _, opening, rest = response.partition(OPENING)
    answer, closing, _ = rest.partition(CLOSING)
    return answer.strip() if opening and closing else None
