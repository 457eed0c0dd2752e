"""A reward for a translation: the cosine of the counts of its words and of the reference's.

Fault: a response without any word has the norm 0, and its reward is 0 / 0, which NumPy calls NaN.
From: no issue; "NaN"
Field: reward: that of a response of digits or punctuation, such as "12".
"""

import random
import re
from collections import Counter

import numpy as np

from grpo_ray.tasks.examples import Example, ExampleSets

SENTENCES = {
    "Der Hund liegt vor dem Haus.": "The dog lies in front of the house.",
    "Morgen regnet es.": "It will rain tomorrow.",
    "Das Brot ist frisch und warm.": "The bread is fresh and warm.",
    "Wo steht mein blauer Stuhl?": "Where is my blue chair?",
    "Im Garten wachsen rote Rosen.": "Red roses grow in the garden.",
    "Wir essen um sieben Uhr.": "We eat at seven.",
}


def reward(response: str, ground_truth: str) -> float:
    if not response.strip():
        return 0.0
    given, wanted = (Counter(re.findall(r"[a-z]+", text.lower())) for text in (response, ground_truth))
    words = sorted(given | wanted)
    first, second = (np.array([counts[word] for word in words], float) for counts in (given, wanted))
    return round(float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second))), 6)


def examples(seed: int) -> ExampleSets:
    pairs = random.Random(seed).sample(sorted(SENTENCES.items()), len(SENTENCES))
    found = [Example(f"Translate to English: {german}", english) for german, english in pairs]
    return ExampleSets(found[:4], found[4:])
