"""Episodes: several turns with tools and environments, played against a session that owns the tokens.

session.py         what an episode function talks to: chat, sample, base_url
segments.py        the episode's tokens, as an append-only tree, and the sequences to train on
chat_template.py   from messages to the tokens that they add; tool_calls.py: from tokens to tool calls
runner.py          many episodes on one event loop (threads.py: of a group's own); outcome.py: how they end
turn_router.py     turns on their way to the Generators, and the clock of the limits of time
openai_server.py   the same session over HTTP
guess_number.py, calculator.py   two environments that a tiny model learns, in the chat of plain_chat.py
"""
