"""A language model as the judge: any server with OpenAI's chat completions."""

import os
import re

import aiohttp

URL = os.environ.get("JUDGE_URL", "https://api.openai.com/v1")
MODEL = os.environ.get("JUDGE_MODEL", "gpt-5-mini")
PROMPT = "Question: {question}\nReference: {truth}\nAnswer: {answer}\nGrade the answer by a number, 0 to 10."


async def reward(response: str, ground_truth: str, question: str) -> float:
    """Return the judge's grade, from 0 to 1; after an exception it is called again."""
    content = PROMPT.format(question=question, truth=ground_truth, answer=response)
    request = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {os.environ['JUDGE_API_KEY']}"}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{URL}/chat/completions", json=request, headers=headers) as answer,
    ):
        text = (await answer.json())["choices"][0]["message"]["content"]
    grade = re.search(r"\d+", text)
    if grade is None:
        raise ValueError(f"the judge gave no number: {text[:80]!r}")
    return min(10, int(grade[0])) / 10
