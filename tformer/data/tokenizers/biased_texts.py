"""The texts of decode.bias as sequences of tokens, and back."""

import math
from collections.abc import Sequence

from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError

Biases = tuple[tuple[tuple[int, ...], float], ...]  # sequences of tokens, and what the last of each gains


def parse(entries: Sequence[str]) -> dict[str, float]:
    """Returns the texts of decode.bias, and what they gain.

    Raises:
      UserError: an entry is not TEXT=NUMBER, or its text has a number already.
    """
    found: dict[str, float] = {}
    for entry in entries:
        text, _, number = entry.rpartition('=')
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not text or not math.isfinite(value):
            raise UserError(f"decode.bias={entry!r} is not TEXT=NUMBER, such as ' cat=-2.5'")
        if text in found:
            raise UserError(f'decode.bias has {text!r} twice')
        found[text] = value
    return found


def of_tokens(entries: Sequence[str], tokenizer: Tokenizer) -> Biases:
    """Returns the biases of decode.bias in tokens.

    Raises:
      UserError: an entry is not TEXT=NUMBER, or the vocabulary lacks a character of its text.
    """
    found = []
    for text, value in parse(entries).items():
        tokens = tokens_of(text, tokenizer)
        if not tokens or tokenizer.specials.unk in tokens:
            raise UserError(f'decode.bias: the vocabulary has no tokens for {text!r}')
        found.append((tuple(tokens), value))
    return tuple(found)


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of a biased text, which may be the name of a special token."""
    index = tokenizer.id_of(text)
    special = index is not None and not tokenizer.ordinary[index]
    return [index] if index is not None and special else tokenizer.encode(text)


def text_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """Returns the text that has these tokens; None where none has."""
    if not tokens or not all(type(index) is int and 0 <= index < tokenizer.vocab_size for index in tokens):
        return None
    one = len(tokens) == 1 and not tokenizer.ordinary[tokens[0]]
    text = tokenizer.piece(tokens[0]) if one else tokenizer.decode(tokens)
    return text if text and tokens_of(text, tokenizer) == list(tokens) else None
