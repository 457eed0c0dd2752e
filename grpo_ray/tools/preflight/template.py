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
    """Yield what is wrong with the tokenizer's chat template, if it has one."""
    tokenizer = subject.tokenizer
    if not tokenizer.chat_template or subject.settings.renderer is not None:
        return
    arguments = subject.settings.template_arguments

    def shown(messages: list[dict[str, str]], is_prompt: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **arguments
        )
        return text

    if shown([HELLO]) == shown([HELLO], is_prompt=False):
        yield Finding(
            "no_generation_prompt",
            "the template ends a prompt without the beginning of a reply, so the policy would have to sample "
            "the header of its own turn",
            "end the template with `{% if add_generation_prompt %}` and the header of an assistant message",
            token=shown([HELLO])[-40:],
        )
    ends = [tokenizer.convert_ids_to_tokens(token) for token in subject.end_token_ids]
    _, _, behind = shown([HELLO, REPLY, HELLO], is_prompt=False).partition(REPLY["content"])
    between, _, _ = behind.partition(HELLO["content"])
    if not any(end in between for end in ends):
        yield Finding(
            "end_of_turn",
            f"the template ends a reply with {between[:40]!r}, which holds none of the tokens that end one in "
            f"sampling ({', '.join(ends)}): the policy would talk on to its limit, and its end is never trained",
            "name the token in eos_token_id of generation_config.json, or let the template write eos_token",
            token=between[:40],
        )
    elif not between.startswith(tuple(ends)) and (
        early := between[: min(between.index(e) for e in ends if e in between)]
    ):
        yield Finding(
            "end_of_turn",
            f"the template writes {early!r} between a reply and its end token; a sampled reply ends without it",
            "let the end token follow the reply's content at once",
            token=early,
        )
    for role, messages in PROBES:
        try:
            text = shown(messages)
        except Exception as error:  # the template's own
            yield Finding(
                "message_refused", f"the template refuses a {role} message: {error}", "", is_note=True
            )
            continue
        if missing := [m["content"] for m in messages if m["content"] not in text]:
            yield Finding(
                "message_dropped",
                f"the template does not show {missing[0]!r} in a conversation with a {role} message",
                "use a template that shows every message",
            )
    if "strftime_now" in tokenizer.chat_template and "date_string" not in arguments:
        yield Finding(
            "template_reads_clock",
            "the template writes today's date, so prompts change at midnight and a resumed run differs",
            "fix it by episodes.template_arguments, such as {date_string: 26 Jul 2024}",
            is_note=True,
        )
