"""The text of each token, for the web page; by the tokenizer, with a few tokens more where one is not text."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens that one character may be spread over
NOT_TEXT = "\N{REPLACEMENT CHARACTER}"
SPACE = "▁"  # how SentencePiece writes the space that a token begins with, and decode() drops


class TokenTexts:
    """`of` a response's token ids; one text a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._of_one = lru_cache(maxsize=100_000)(self._decode_one)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """A character that is spread over several tokens stands with its first; the others are empty."""
        texts: list[str] = []
        while len(texts) < len(token_ids):
            texts += self._next_character(token_ids[len(texts) :][:LONGEST_CHARACTER])
        return texts

    def _next_character(self, token_ids: Sequence[int]) -> list[str]:
        """The texts of the first token, or of as many as make a whole character."""
        first = self._of_one(token_ids[0])
        if NOT_TEXT in first:
            for number in range(2, len(token_ids) + 1):
                text = self._decode(token_ids[:number])
                if NOT_TEXT not in text:
                    return [text, *[""] * (number - 1)]
        return [first]

    def _decode_one(self, token_id: int) -> str:
        text = self._decode([token_id])
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        return f" {text}" if piece and piece.startswith(SPACE) and not text.startswith(" ") else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
