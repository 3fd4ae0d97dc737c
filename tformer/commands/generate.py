"""Generates text from prompts or source texts.

    tformer generate --workdir=DIR [TEXT ...] [--input=FILE] [--seed=0] [--chat] [--config.decode.strategy=beam ...]

The texts are the arguments, else the lines of --input, else those of standard input. Each output is printed. With
--chat a text is the message of a user, or in JSON a list of messages or {"messages": [...]}, and the output the reply.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from tformer import commands
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers.chat import Messages
from tformer.errors import UserError

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS: dict[str, commands.Flag] = {
    'seed': ('int', 0, 'the seed of sampling'),
    'chat': ('bool', False, "the texts are a user's messages, or chats in JSON"),
}
ARGUMENTS = 'TEXT'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint)
    lines = texts_lib.given(arguments, flags.input)
    chats = list(map(chat_of, lines)) if flags.chat else []
    texts = [message['content'] for chat in chats for message in chat] if flags.chat else lines
    reader = loaded.tokenizers.target if loaded.config.model.family == 'decoder' else loaded.tokenizers.source
    if unknown := (reader or loaded.tokenizers.target).unknown(texts):
        shown = ' '.join(map(repr, unknown[:10])) + ' ...' * (len(unknown) > 10)
        print(f'training had none of these, so the output means little: {shown}', file=sys.stderr, flush=True)
    for text in generate(loaded, chats or lines, flags.seed):
        print(text)


def chat_of(line: str) -> Messages:
    """Returns the chat that a line holds: a user's message, or in JSON a list of messages or {"messages": [...]}.

    Raises:
      UserError: a message lacks its role or its content, or has something else.
    """
    try:
        found = json.loads(line) if line.startswith(('[', '{')) else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and 'messages' in found:
        found = found['messages']
    elif not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        return [{'role': 'user', 'content': line}]
    try:
        return fields.messages(found, 'messages')
    except BadRecord as error:
        raise UserError(str(error)) from error


def generate(
    run: Run | str | pathlib.Path, texts: Sequence[str | Messages], seed: int = 0, *, cut: bool = False
) -> list[str]:
    """Returns the output of a run, or of the run in a workdir, for each text: the continuation of a prompt, the text
    written for a source, or the reply to a chat.

        >>> tformer.generate('runs/demo', ['transformer'])
        ['T R AE N S F AO R M ER']
        >>> tformer.generate('runs/chat', [[{'role': 'user', 'content': 'Hello'}]])

    `seed` is that of sampling (config.decode.strategy='sample'). With `cut`, texts longer than the model takes are
    shortened.

    Raises:
      UserError: the family does not generate, or a text is too long and `cut` is False.
    """
    return opened(run).generate(texts, seed, cut=cut)
