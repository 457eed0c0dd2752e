"""A fault that a preflight found, and the cure of each kind."""

from dataclasses import dataclass

CURES = {
    "hangs": "await what takes long (an OpenAI client, too: AsyncOpenAI), and give each wait a limit",
    "crashes": "keep what may crash or exit in a process of its own",
    "raises": "return the reward of a wrong answer for a reply that cannot be read",
    "slow": "give each wait a limit of its own",
    "no_turn": "await session.chat or session.sample",
    "time_out_hidden": "let it raise (the episode then leaves its group), or raise the limit",
    "different_starts": "draw everything from random.Random(example.seed), which a group shares",
    "not_deterministic": "draw all that decides a turn or a reward from random.Random(example.seed)",
    "reads_clock": "let no clock decide a turn or a reward",
    "shared_state": "keep an episode's state in the episode function, and none in its module",
    "blocking_call": "await it (asyncio.sleep, an async client), or await asyncio.to_thread(...)",
    "left_behind": "close it in a `finally` or with `async with`, also if the episode is cancelled",
    "history_edited": "append reply.message as it is",
    "retokenised": "continue with (*prompt, *reply.token_ids, *session.encode(text))",
    "never_ends": "return when the task is solved or lost, and after a number of turns of your own",
    "growing_prompt": "append only what is new; the conversation already holds the rest",
    "satisfied_by_prompt": "grade what the response adds to the prompt, or ask for a form of answer",
    "cut_off_is_best": "return the reward of a failure when EpisodeEnded is raised, or let it pass",
    "constant_reward": "grade the truth with `grpo-ray reward`, and see where its answer is lost",
    "truth_earns_nothing": "grade the truth with `grpo-ray reward`, and see where its answer is lost",
    "no_reward_seen": "define solve(messages, example) in the module, which returns the next right reply",
    "calls_unread": "name the parser of the model's own format as episodes.tool_parser",
    "tokens_differ": "report this with the environment: these are not the tokens that were sampled",
    "no_generation_prompt": "end it with `{% if add_generation_prompt %}` and the header of a reply",
    "end_of_turn": "let a token of generation_config.json's eos_token_id follow the reply at once",
    "message_refused": "send no such message, or use a template that shows it",
    "message_dropped": "use a template that shows every message",
    "template_reads_clock": "fix the date by episodes.template_arguments, such as {date_string: 26 Jul 2024}",
}


@dataclass(frozen=True)
class Finding:
    """A fault, or a note that may be meant."""

    name: str  # of CURES
    text: str
    example: int | None = None
    policy: str = ""
    turn: int | None = None
    token: str = ""  # the text of the tokens at fault
    place: str = ""  # file:line of the user's code
    is_note: bool = False

    @property
    def cure(self) -> str:
        """The remedy."""
        return CURES[self.name]

    @property
    def where(self) -> str:
        """The example, policy, turn, token and line, as far as they are known."""
        parts = {
            "example {}": self.example, "policy {!r}": self.policy, "turn {}": self.turn, "at {!r}": self.token,
            "{}": self.place,
        }  # fmt: skip
        return ", ".join(part.format(value) for part, value in parts.items() if value not in (None, ""))

    def __str__(self) -> str:
        return f"{self.name}: {self.where}\n  {self.text}\n  cure: {self.cure}"
