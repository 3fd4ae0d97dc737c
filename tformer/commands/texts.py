"""The texts that commands work on: arguments, a file's lines, or standard input."""

import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tformer.config import Config
from tformer.data import stores
from tformer.data.sources import text_reader
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError


def given(arguments: list[str], file: str | None) -> list[str]:
    """Returns the arguments, else the lines of `file`, else those of standard input.

    Raises:
      UserError: no text is given, or arguments and a file are, or it is not UTF-8, or it has a NUL byte.
    """
    if arguments and file is not None:
        raise UserError(f'--input={file}: the arguments are texts, too; give one of them')
    stores.require_local(file or '', '--input')
    if arguments:
        return [_utf8(os.fsencode(text), 'the arguments') for text in arguments]
    text = (
        _utf8(sys.stdin.buffer.read(), 'standard input') if file is None else text_reader.read_text(pathlib.Path(file))
    )
    if not text:
        raise UserError('no text is given: pass it as arguments, with --input=FILE, or on standard input')
    return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]  # nothing else ends a line


def several(texts: Sequence[Any]) -> Sequence[Any]:
    """Returns `texts`, unless they are a single one, whose letters or fields would each be taken for a text.

    Raises:
      UserError: they are.
    """
    if isinstance(texts, str | Mapping):
        raise UserError(f'texts must be a list of texts, such as [{str(texts)[:40]!r}], and not one text')
    return texts


def reader(config: Config, tokenizers: Tokenizers) -> Tokenizer:
    """Returns the tokenizer of the texts that a run is given."""
    return (config.model.family == 'encoder_decoder' and tokenizers.source) or tokenizers.target


def contents(texts: Iterable[Any]) -> list[str]:
    """Returns all that texts and the messages of chats say."""
    chats = (text for text in texts if isinstance(text, list | tuple))
    said = (message.get('content') for chat in chats for message in chat if isinstance(message, Mapping))
    return [each for each in (*texts, *said) if isinstance(each, str)]


def say_unknown(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Says on standard error which characters of the texts a tokenizer has no token for."""
    if unknown := tokenizer.unknown(texts):
        shown = ' '.join(map(repr, unknown[:10])) + ' ...' * (len(unknown) > 10)
        print(f'training had none of these, so the output means little: {shown}', file=sys.stderr, flush=True)


def _utf8(data: bytes, where: str) -> str:
    if b'\0' in data:
        raise UserError(f'{where}: it has a NUL byte, so it is not text')
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f'{where}: not UTF-8: byte 0x{data[error.start]:02x} at {error.start}') from error
