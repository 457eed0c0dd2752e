"""An agent that knows only an address: the `openai` client, which offers one tool."""

import ssl
from typing import Any

import openai

from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

CERTIFICATES = ssl.create_default_context()  # loaded once: each client would read them, while the loop waits
COLORS = ["red", "green", "blue", "white"]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "See the ball.",
        "parameters": {"type": "object", "properties": {}},
    },
}


async def episode(session: Session, example: Example) -> float:
    messages: list[Any] = [{"role": "user", "content": example.question}]
    http = openai.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    arguments: Any = {"base_url": session.base_url, "api_key": "none", "max_retries": 0, "http_client": http}
    async with openai.AsyncOpenAI(**arguments) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK])
            message = answer.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == example.ground_truth)
            results = [(call.id, example.ground_truth) for call in message.tool_calls]
            messages += [message, *({"role": "tool", "tool_call_id": i, "content": c} for i, c in results)]
    return 0.0


def examples(seed: int) -> ExampleSets:
    balls = [Example("Which color has the ball?", color) for color in COLORS]
    return ExampleSets(balls * 64, balls * 8)
