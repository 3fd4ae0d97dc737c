"""The chat template of a hub directory: tokenizer_config.json, or a file of its own."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tformer.config import json_files
from tformer.data.sources import text_reader
from tformer.data.tokenizers.chat import ChatTemplate
from tformer.errors import UserError

FILE = 'chat_template.jinja'  # comes before the one in the settings


def read(directory: pathlib.Path) -> ChatTemplate | None:
    """Returns the template of a directory with the names of its special tokens; None where there is none.

    Of several templates by name it is `default`.

    Raises:
      UserError: it is malformed, or none of several is the default.
    """
    settings = settings_in(directory)
    where, text = directory / 'tokenizer_config.json', settings.get('chat_template')
    if isinstance(text, list):
        named = {each.get('name'): each.get('template') for each in text if isinstance(each, Mapping)}
        if 'default' not in named:
            raise UserError(f'{where}: chat_template has no default; there are: {", ".join(map(str, named))}')
        text = named['default']
    if os.path.lexists(directory / FILE):
        where, text = directory / FILE, text_reader.read_text(directory / FILE)
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f'{where}: chat_template is neither a text nor a list of named texts')
    return ChatTemplate(text, tuple(tokens(settings).items())).checked(where)


def settings_in(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of special_tokens_map.json, and over them those of tokenizer_config.json."""
    parts = [
        json_files.read_if_there(directory / file) for file in ('special_tokens_map.json', 'tokenizer_config.json')
    ]
    return {name: value for part in parts for name, value in part.items()}


def tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of special tokens, such as eos_token, each a text or an object with its content."""
    given = {name: value for name, value in settings.items() if name.endswith('_token')}
    texts = {name: value.get('content') if isinstance(value, Mapping) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def settings_of(chat: ChatTemplate) -> dict[str, str]:
    """Returns a template as fields of tokenizer_config.json."""
    return {**dict(chat.tokens), 'chat_template': chat.text}
