"""The text of each token for the web page; characters that span several tokens are decoded together."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens that one character may span
NOT_TEXT = "\N{REPLACEMENT CHARACTER}"
SPACE = "▁"  # SentencePiece's mark for a token's leading space, which decode() drops


class TokenTexts:
    """The texts of tokens, by one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._of_one = lru_cache(maxsize=100_000)(self._decode_one)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token; of the tokens that one character spans, all but the first are empty."""
        texts: list[str] = []
        while len(texts) < len(token_ids):
            texts += self._next_character(token_ids[len(texts) :][:LONGEST_CHARACTER])
        return texts

    def _next_character(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of the first token, or of as many tokens as make a whole character."""
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
