"""Three sums in one conversation; the policy may think before each.

Fault: the thoughts are cut out of the replies before they are appended.
From: ART#726
Field: turn 1: the reply of turn 0, without its thoughts.
"""

import re

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets


async def episode(session: Session, example: Example) -> float:
    messages, num_right = list[dict[str, str]](), 0
    for term in example.question.split():
        messages.append({"role": "user", "content": f"What is {term} + {example.ground_truth}?"})
        reply = await session.chat(messages)
        answer = re.sub(r"<think>.*?</think>", "", reply.text, flags=re.DOTALL).strip()
        num_right += answer == str(int(term) + int(example.ground_truth))
        messages.append({"role": "assistant", "content": answer})
    return num_right / 3


def examples(seed: int) -> ExampleSets:
    found = [Example(f"{n} {n + 10} 0", str(n)) for n in range(1, 9)]
    return ExampleSets(found[2:], found[:2])
