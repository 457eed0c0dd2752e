"""Text of a policy, a run's folder or an exception, made harmless for a terminal and honest for a reader.

A terminal obeys escape sequences: they move the cursor, change the window's title, write to the clipboard.
Other characters cannot be seen, or reorder the text around them. All of them are shown as Python writes them in
a string, such as `\\x1b`. The report's page does the same in web/elements.js; a test compares the two sets.
"""

import re

# C0 but for tab and newline, DEL and C1; soft hyphen, marks of direction, zero-width characters and separators,
# fillers, interlinear marks, lone surrogates (no terminal can be sent one), and the tags.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def visible(text: str) -> str:
    """Return the text with every character that a terminal obeys or a reader cannot see written out."""
    return UNSEEN.sub(lambda mark: mark[0].encode("unicode_escape").decode("ascii"), text)


def encodable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 and tokenizers refuse, written out as `\\ud83d`."""
    return text.encode(errors="backslashreplace").decode()


def told(actor: str | None, text: str) -> str:
    """Return an event's text, with the name of its actor unless it begins with that."""
    return text if actor is None or text.startswith(actor) else f"{actor}: {text}"


def print_visible(text: str) -> None:
    """Print a line of `visible` text."""
    print(visible(text))
