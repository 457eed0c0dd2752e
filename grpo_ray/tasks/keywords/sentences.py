"""A grammar of simple sentences around given nouns: `The tree hid our boat near the bird.`"""

import random
from collections.abc import Sequence

DETERMINERS = ("the", "the", "our", "that", "my")
VERBS = ("found", "followed", "watched", "hid", "moved", "touched", "liked", "passed")
PREPOSITIONS = ("near", "behind", "beside", "under", "with", "without")
QUALITIES = ("quiet", "new", "alone", "missing", "ready", "gone")


def sentence(rng: random.Random, nouns: Sequence[str]) -> str:
    """Write a sentence with the nouns in order: subject, object, then places; or `The tree was new.`

    All words are treated as nouns.
    """
    subject, *others = (f"{rng.choice(DETERMINERS)} {noun}" for noun in nouns)
    if not others:
        return _written(f"{subject} was {rng.choice(QUALITIES)}")
    clause = f"{subject} {rng.choice(VERBS)} {others[0]}"
    places = (f" {rng.choice(PREPOSITIONS)} {phrase}" for phrase in others[1:])
    return _written(clause + "".join(places))


def _written(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
