"""Chats as a model reads them: a template writes the messages as one text, in which names stand for special tokens.

The templates are those of the hub, which are programs in Jinja's language. They run in Jinja's sandbox.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tformer.data.sources import text_reader
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers.vocabulary import MARK, Tokenizer
from tformer.errors import UserError

Messages = Sequence[Mapping[str, str]]  # each has a role (system, user, assistant) and a content

_PLAIN = (
    '{{ bos_token }}{% for message in messages %}'
    '{{ cls_token }}{{ message.role }}{{ sep_token }}{{ message.content }}{{ eos_token }}{% endfor %}'
    '{% if add_generation_prompt %}{{ cls_token }}assistant{{ sep_token }}{% endif %}'
)
# a template's variable, without _token -> the field of `Specials`
VARIABLES = {'pad': 'pad', 'bos': 'bos', 'eos': 'eos', 'unk': 'unk', 'mask': 'mask_or_none', 'cls': 'cls', 'sep': 'sep'}


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """How a model's chats are written.

    Attributes:
      text: the template, which reads `messages` and `add_generation_prompt`.
      tokens: its other variables with their values, such as ('eos_token', '</s>').
    """

    text: str
    tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def plain(cls, tokenizer: Tokenizer) -> Self:
        """Returns the template of a tokenizer that comes without one: CLS role SEP content EOS for each message."""
        return cls(_PLAIN, variables_of(tokenizer))

    @classmethod
    def read(cls, path: str, tokens: tuple[tuple[str, str], ...]) -> Self:
        """Returns the template of a file. Raises a `UserError` if it is not one."""
        return cls(text_reader.read_text(pathlib.Path(path)), tokens).checked(path)

    def checked(self, where: object) -> Self:
        """Returns itself; raises a `UserError` that names `where` if the template is not one of Jinja."""
        try:
            _ = self._compiled
        except Exception as error:  # of Jinja, or of Python where the template is nested too deeply
            raise UserError(f'{where}: the chat template is not one of Jinja: {_line(error)}') from error
        return self

    @functools.cached_property
    def _compiled(self) -> tuple[Any, Any]:
        from tformer.data.tokenizers import template_sandbox  # imports Jinja, which only chats need

        environment = template_sandbox.environment()
        return environment, environment.from_string(self.text)

    def write(self, messages: Messages, reply: bool = False) -> str:
        """Returns the text of a chat; with `reply`, up to where the next message of the assistant begins.

        Raises:
          BadRecord: the template refuses the messages.
        """
        given = {'messages': messages, 'add_generation_prompt': reply, 'tools': None, 'documents': None}
        environment, compiled = self._compiled
        environment.begin()
        try:
            return compiled.render(**dict(self.tokens), **given)
        except Exception as error:  # of Jinja, or of an operation of the template
            raise BadRecord(f'the chat template refuses the messages: {_line(error)}') from error

    def prompt(self, messages: Messages, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of a chat that the assistant is to reply to. Raises a `BadRecord` as `write`."""
        return tokenizer.encode_marked(self._marked(messages, tokenizer, reply=True))[0]

    def encode(self, messages: Messages, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
        """Returns the ids of a whole chat, and which of them are the assistant's, with the token that ends its turn.

        A message of the assistant is what the template adds to the messages before it and the beginning of a reply.

        Raises:
          BadRecord: the template refuses the messages, or changes what it has written when a message follows.
        """
        whole = self._marked(messages, tokenizer)
        ids, ends = tokenizer.encode_marked(whole)
        scored = np.zeros(len(ids), bool)
        for place in (place for place, message in enumerate(messages) if message['role'] == 'assistant'):
            before = self._marked(messages[:place], tokenizer, reply=True)
            through = self._marked(messages[: place + 1], tokenizer)
            if not (whole.startswith(through) and through.startswith(before)):
                raise BadRecord(
                    f'the chat template writes messages 1 to {place + 1} otherwise when more follows, so the tokens of '
                    'the assistant cannot be told apart; set data.chat_template'
                )
            marks = re.finditer(f'{MARK}({tokenizer.special_pattern})', through[len(before) :])
            stop = len(before) + max((mark.end() for mark in marks), default=len(through) - len(before))
            scored |= (ends > len(before)) & (ends <= stop)
        return ids, scored

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """Returns the special token that ends a turn of the assistant; None where the template has none."""
        chat = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
        try:
            ids, scored = self.encode(chat, tokenizer)
        except BadRecord:
            return None
        last = next((index for index, counts in zip(reversed(ids), scored[::-1], strict=True) if counts), None)
        return None if last is None or tokenizer.ordinary[last] else last

    def _marked(self, messages: Messages, tokenizer: Tokenizer, reply: bool = False) -> str:
        """Returns the text of a chat in which MARK stands before the name of each special token of the template.

        A name in the content of a message gets MARK before the template sees it, and loses it then.
        """
        names = tokenizer.special_pattern

        def swapped(found: re.Match[str]) -> str:
            return found[1] or (MARK + found[2] if found[2] else '')

        def hidden(content: str) -> str:
            return re.sub(names, rf'{MARK}\g<0>', tokenizer.normalize(content.replace(MARK, '')))

        plain = [{**message, 'content': hidden(message['content'])} for message in messages]
        return re.sub(f'{MARK}({names})|({names})|{MARK}', swapped, self.write(plain, reply))


def variables_of(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Returns the names of a tokenizer's special tokens as a template's variables."""
    ids = {f'{name}_token': getattr(tokenizer.specials, field) for name, field in VARIABLES.items()}
    return tuple((name, tokenizer.piece(index)) for name, index in ids.items() if index is not None)


def _line(error: Exception) -> str:
    return ' '.join(str(error).split())[:200] or type(error).__name__
