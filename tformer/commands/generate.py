"""Generates text from prompts or source texts.

    tformer generate --workdir=DIR [TEXT ...] [--input=FILE] [--seed=0] [--chat] [--config.decode.strategy=beam ...]
    tformer generate --workdir=DIR --input=FILE --output=FILE [--n=4] [--scores | --jsonl]

The texts are the arguments, else the lines of --input, else those of standard input. Each output is printed. With
--chat a text is the message of a user, or in JSON a list of messages or {"messages": [...]}, and the output the reply.
A stopped command with --output goes on where it was, and writes the file at the end. Several processes with --output
share the texts, each on its own devices, of which config.mesh is said.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tformer import atomic, commands
from tformer.commands import kept, reading, streaming
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.data import store_copies
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers.chat import Messages
from tformer.decode.text import Output
from tformer.distributed import meshes, processes
from tformer.errors import UserError
from tformer.training import checkpoint, digests

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS: dict[str, commands.Flag] = {
    'seed': ('int', 0, 'the seed of sampling'),
    'chat': ('bool', False, "the texts are a user's messages, or chats in JSON"),
    'n': ('int', None, 'how many outputs of each text: config.decode.num_outputs'),
    'scores': ('bool', False, 'each output stands behind its log-probability and a tab'),
    'jsonl': ('bool', False, 'a text is a line {"text": ..., "outputs": [{"text": ..., "score": ..., "length": ...}]}'),
    'output': ('string', None, 'the file of the outputs; default: standard output'),
    'draft': (
        'string',
        None,
        'the workdir of a smaller run that drafts tokens, of which this one reads several at once',
    ),
}
ARGUMENTS = 'TEXT'
MESSAGES = re.compile(r'\[\s*\{\s*"(role|content)"\s*:|\{\s*"messages"\s*:')  # how a chat in JSON begins
PROCESSES = True


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if flags.scores and flags.jsonl:
        raise UserError('--scores and --jsonl: choose one; --jsonl has the scores')
    reading.check_output(flags.output, flags.input)
    if flags.output is None and jax.process_count() > 1:
        raise UserError('--coordinator: several processes need --output=FILE')
    with meshes.apart():
        _run(arguments, overrides, flags)


def _run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    overrides = overrides if flags.n is None else {**overrides, 'decode.num_outputs': str(flags.n)}
    workdir, draft = commands.needed(flags, 'workdir'), flags.draft or None
    loaded = Run.load(workdir, overrides, flags.checkpoint, placed=True, draft=draft).for_writing()
    lines = texts_lib.given(arguments, flags.input)
    chats = list(map(chat_of, lines)) if flags.chat else []
    texts_lib.say_unknown(texts_lib.reader(loaded.config, loaded.tokenizers), texts_lib.contents(chats or lines))
    as_lines = functools.partial(_as_lines, scores=flags.scores, jsonl=flags.jsonl)
    shown = flags.output is None and not (flags.scores or flags.jsonl)
    if shown and sys.stdout.isatty() and streaming.streams(loaded):
        for pieces in streaming.stream(loaded, chats or lines, flags.seed):
            for piece in pieces:
                print(piece, end='', flush=True)
            print()
        return
    if flags.output is None:
        found = dict(_progressing(loaded.write(chats or lines, flags.seed), len(lines)))
        sys.stdout.writelines(as_lines(line, found[index]) for index, line in enumerate(lines))
        return
    schema = loaded.config.decode.json_schema
    of = {
        'run': _weights(loaded),
        'decode': dataclasses.asdict(loaded.config.decode),
        'schema': schema and pathlib.Path(schema).read_text(),
        'texts': chats or lines,
        'seed': flags.seed,
        'draft': loaded.draft and _weights(loaded.draft),
    }
    _write(pathlib.Path(flags.output), loaded, of, lambda index, outputs: as_lines(lines[index], outputs))


def _write(
    path: pathlib.Path, loaded: Run, of: Mapping[str, Any], as_lines: Callable[[int, Sequence[Output]], str]
) -> None:
    """Writes the file of the outputs of texts; each of several processes writes a share of them."""
    processes.agree(of)
    texts, seed, share = of['texts'], of['seed'], (jax.process_index(), jax.process_count())
    with kept.kept(path, of, len(texts)) as there:
        left = len(texts) - len(there.rows)
        writing = loaded.write(texts, seed, done=frozenset(there.rows), share=share)
        for index, outputs in _progressing(writing, left, there.added_elsewhere):
            there.add(index, outputs)
        if (rows := there.whole()) is not None:
            found = (as_lines(index, [Output(*output) for output in rows[index]]) for index in range(len(texts)))
            atomic.write(path, ''.join(found))


def _weights(run: Run) -> list[Any]:
    """Returns what a run's parameters are known by."""
    place = checkpoint.directory(run.workdir, run.step)
    return [store_copies.shown(run.workdir.resolve()), run.step, digests.digest(place, 'variables/')]


def _as_lines(line: str, outputs: Sequence[Output], *, scores: bool, jsonl: bool) -> str:
    """Returns the lines that show the outputs of a text."""
    if jsonl:
        found = [output._asdict() | ({} if math.isfinite(output.score) else {'score': None}) for output in outputs]
        row = {'text': line, 'outputs': found}
        return json.dumps(row, ensure_ascii=False) + '\n'
    return ''.join(f'{output.score:.4f}\t{output.text}\n' if scores else f'{output.text}\n' for output in outputs)


def _progressing(
    writing: Iterable[tuple[int, list[Output]]], total: int, elsewhere: Callable[[], int] = lambda: 0
) -> Iterator[tuple[int, list[Output]]]:
    """Yields what is written; the first process shows how many texts are, of all."""
    with reading.progress(total) if processes.first() else contextlib.nullcontext(lambda count: None) as done:
        for each in writing:
            yield each
            done(1 + elsewhere())


def chat_of(line: str) -> Messages:
    """Returns the chat that a line holds: a user's message, or in JSON a list of messages or {"messages": [...]}.

    Raises:
      UserError: the JSON of messages is damaged, or a message lacks its role or its content, or has something else.
    """
    try:
        found = json.loads(line) if line.startswith(('[', '{')) else None
    except (ValueError, RecursionError) as error:
        if MESSAGES.match(line):
            raise UserError(f'{line[:60]!r} begins as a chat in JSON does, and is none: {error}') from error
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
