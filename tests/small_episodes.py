"""A small task of episodes for whole runs, with rewards that a random model earns sometimes.

An episode has one to three turns. Some conversations drop their first reply, which begins a branch; some
episodes return rewards per turn; some run into the limit of turns.
"""

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs


def question(number: int) -> str:
    return f"Say a number above {number}."


async def talk(session: Session, example: Example) -> Outcome:
    """Ask again until a reply is odd; the reward is the share of odd replies."""
    number = int(example.ground_truth)
    messages = [{"role": "user", "content": example.question}]
    rewards: list[float] = []
    for _ in range(5 if number % 7 == 6 else 3):
        reply = await session.chat(messages)
        rewards.append(value(reply.text))
        if rewards[-1] and number % 2:
            break
        if number % 5 == 4:  # an edited history
            messages = [messages[0], {"role": "user", "content": "Again, without me."}]
        else:
            messages += [reply.message, {"role": "user", "content": f"No. More than {number}?"}]
    metrics = {"asked": float(len(rewards))}
    of_turns = tuple(rewards) if number % 3 == 0 else None
    return Outcome(sum(rewards) / len(rewards), of_turns, metrics)


async def one_turn(session: Session, example: Example) -> float:
    reply = await session.chat([{"role": "user", "content": example.question}])
    return value(reply.text)


def value(text: str) -> float:
    """Return the reward of a reply: 1 for half of all texts."""
    return float(sum(text.encode()) % 2)


def reward(response: str, ground_truth: str) -> float:
    """Grade a plain response as `one_turn` does."""
    return value(response)


def examples(seed: int) -> ExampleSets:
    train = [Example(question(n), str(n)) for n in range(24)]
    return ExampleSets(train, [Example(question(n), str(n)) for n in range(24, 28)])


def warmup_pairs(seed: int, num_pairs: int) -> Pairs:
    """Return pairs that the tokenizer is learned from."""
    return [(f"{question(n % 40)}\n>\n", f"{n} I say. No. Again, without me.") for n in range(num_pairs)]


def a_list(seed: int) -> list[Example]:
    return [Example("", "")]


def no_pairs(seed: int, num_pairs: int) -> Pairs:
    return []


def half_pairs(seed: int, num_pairs: int) -> list[str]:
    return ["1 + 1 ="] * num_pairs


def none_at_all(seed: int) -> ExampleSets:
    return ExampleSets([], [])
