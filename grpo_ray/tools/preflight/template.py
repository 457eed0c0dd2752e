"""Faults of a chat template, which are the same in every episode."""

from collections.abc import Iterator

from grpo_ray.tools.preflight.findings import Finding
from grpo_ray.tools.preflight.subject import Subject

HELLO, REPLY = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "A reply, in full."}
PROBES = (
    ("system", [{"role": "system", "content": "A system message."}, HELLO]),
    ("user", [HELLO, REPLY, {"role": "user", "content": "A second message."}]),
)


def template_findings(subject: Subject) -> Iterator[Finding]:
    """Yield what is wrong with the tokenizer's chat template, if there is one that prompts are made by."""
    tokenizer = subject.tokenizer
    if not tokenizer.chat_template or not subject.has_chat or subject.settings.renderer is not None:
        return
    arguments = subject.settings.template_arguments

    def shown(messages: list[dict[str, str]], is_prompt: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **arguments
        )
        return text

    if shown([HELLO]) == shown([HELLO], is_prompt=False):
        text = (
            "a prompt ends without the header of a reply, so the policy would sample the header, and train it"
        )
        yield Finding("no_generation_prompt", text, token=shown([HELLO])[-40:])
    ends = [tokenizer.convert_ids_to_tokens(token) for token in subject.end_token_ids]
    _, _, behind = shown([HELLO, REPLY, HELLO], is_prompt=False).partition(REPLY["content"])
    between, _, _ = behind.partition(HELLO["content"])
    first = min((between.index(end) for end in ends if end in between), default=None)
    if first is None:
        named = ", ".join(ends)
        text = (
            f"a reply ends with none of the tokens that end one in sampling ({named}): no end is ever trained"
        )
        yield Finding("end_of_turn", text, token=between[:40])
    elif first > 0:
        text = f"{between[:first]!r} stands between a reply and its end token; a sampled reply ends without it"
        yield Finding("end_of_turn", text, token=between[:first])
    for role, messages in PROBES:
        try:
            text = shown(messages)
        except Exception as error:  # the template's own
            yield Finding("message_refused", f"it refuses a {role} message: {error}", is_note=True)
            continue
        if lacking := [message["content"] for message in messages if message["content"] not in text]:
            yield Finding("message_dropped", f"it does not show {lacking[0]!r} next to a {role} message")
    if "strftime_now" in tokenizer.chat_template and "date_string" not in arguments:
        text = "it writes today's date: prompts change at midnight, and a resumed run differs"
        yield Finding("template_reads_clock", text, is_note=True)
