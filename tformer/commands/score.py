"""Scores texts: how likely a run's model is to write them.

    tformer score --workdir=DIR [TEXT ...] [--input=FILE] [--output=FILE] [--stride=N] [--ended] [--tokens]

A text is one line. A line that begins with { is a JSON object {"source": ..., "target": ...}, whose target is scored
after its source; a decoder takes {"target": ...} for any text. The output has a line of JSON for each, in their order:

    {"log_likelihood": ..., "tokens": ..., "perplexity": ..., "greedy": ...}

Log-likelihoods are natural logarithms. `greedy` says whether each token was the likeliest, and --tokens adds
"pieces": [[TEXT, LOGPROB], ...]. The lines are printed, or written to --output, and the perplexity of all on standard
error. A decoder reads a text that is longer than its model.max_len in windows, in each of which it scores --stride new
tokens.
"""

import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tformer import commands
from tformer.commands import reading
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.config import json_files
from tformer.config.tasks import TASKS
from tformer.data.examples import special_tokens
from tformer.data.examples.special_tokens import Fields
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord
from tformer.decode.text import longest_input
from tformer.errors import UserError
from tformer.evaluation.many_rows import Method
from tformer.layers.dropout import DropoutRates

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS = {
    'output': ('string', None, 'the file of the lines of JSON; default: standard output'),
    'stride': ('int', None, 'new tokens of each window of a text that is too long; default: half of model.max_len'),
    'ended': ('bool', None, 'the end of a text is scored, too; default: where a target is written for a source'),
    'tokens': ('bool', False, 'each token is given with its log-probability'),
}
ARGUMENTS = 'TEXT'

_LOGITS = 2**25  # that a device holds at once, of all rows of a batch


class Score(NamedTuple):
    """How likely a text is."""

    pieces: list[tuple[str, float]]  # each scored token and its log-probability, in nats
    greedy: bool  # whether each token was the likeliest
    bytes: int  # of the scored text, in UTF-8

    @property
    def log_likelihood(self) -> float:
        """The log-probability of the text, in nats."""
        return math.fsum(logprob for _, logprob in self.pieces)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability of a token."""
        mean = -self.log_likelihood / max(len(self.pieces), 1)
        return math.exp(mean) if mean < 700 else math.inf


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    reading.check_output(flags.output, flags.input)
    workdir, texts = commands.needed(flags, 'workdir'), texts_lib.given(arguments, flags.input)
    loaded = Run.load(workdir, overrides, flags.checkpoint, placed=True).for_writing()
    found = score(loaded, texts, stride=flags.stride, ended=flags.ended, source=flags.input)
    reading.write_lines([_line(each, flags.tokens) for each in found], flags.output)
    whole = Score([piece for each in found for piece in each.pieces], False, sum(each.bytes for each in found))
    bits = -whole.log_likelihood / math.log(2) / max(whole.bytes, 1)
    counts = f'{len(texts):,} texts, {len(whole.pieces):,} tokens'
    what = f'perplexity {whole.perplexity:.4f}, {bits:.4f} bits a byte' if whole.pieces else 'nothing to score'
    print(f'{counts}: {what}', file=sys.stderr, flush=True)


def _line(score: Score, pieces: bool) -> dict[str, Any]:
    line = {
        'log_likelihood': score.log_likelihood,
        'tokens': len(score.pieces),
        'perplexity': score.perplexity if score.pieces and math.isfinite(score.perplexity) else None,
        'greedy': score.greedy,
    }
    return line | ({'pieces': score.pieces} if pieces else {})


def score(
    run: Run | str | pathlib.Path,
    texts: Sequence[str | Mapping[str, str]],
    *,
    stride: int | None = None,
    ended: bool | None = None,
    source: str | None = None,
) -> list[Score]:
    """Returns the score of each text: log p(target | source), or of a text by itself.

        >>> tformer.score('runs/lm', ['def f(x):', {'source': 'import ', 'target': 'os'}])[1].log_likelihood

    A decoder reads source and target as one text, with data.start in front (BOS where there is none); of one that
    writes targets for sources, and beside an encoder, they stand as in training. `ended` scores the end of the text,
    too. The tokens of a decoder's text that is longer than model.max_len are read in windows that move by `stride`, so
    that each has model.max_len + 1 - stride tokens before it, or all there are. `source` is the file of the texts,
    which errors name.

    Raises:
      UserError: the run's model or objective does not write text, or a text is malformed or too long.
    """
    run = opened(run)
    config, task = run.config, TASKS[run.config.train.objective]
    if config.model.family == 'encoder':
        raise UserError('score: model.family=encoder does not write text; valid: decoder, encoder_decoder')
    if not task.writes:
        raise UserError(f'score: train.objective={config.train.objective} does not write text')
    longest = config.model.max_len
    stride = max(longest // 2, 1) if stride is None else stride
    if not 1 <= stride <= longest:
        raise UserError(f'--stride={stride} must be from 1 to model.max_len={longest}')
    in_pairs = task.given or config.model.family == 'encoder_decoder'
    pairs = [_pair(text, in_pairs, reading.place(i, source)) for i, text in enumerate(texts_lib.several(texts))]
    for tokenizer, side in ((texts_lib.reader(run.config, run.tokenizers), 0), (run.tokenizers.target, 1)):
        texts_lib.say_unknown(tokenizer, [pair[side] for pair in pairs])
    make = _written if in_pairs else functools.partial(_continued, stride=stride)
    wholes = list(make(run, pairs, in_pairs if ended is None else ended))
    rows = [row for whole in wholes for row in whole]
    limits = {'inputs': (longest, 'model.max_len')}
    if config.model.family == 'encoder_decoder':
        limits['encoder_inputs'] = longest_input(config)
    for index, whole in enumerate(wholes):
        for size, (most, field) in ((len(row[name]), limit) for row in whole for name, limit in limits.items()):
            if size > most:
                where = reading.place(index, source)
                raise UserError(f'{where}: it has {size} tokens, the model takes {most} ({field})')
    found = iter(reading.outputs(run, rows, _likelihoods(config.model.vocab_size or 1)))
    tokenizer = run.tokenizers.target
    scores = []
    for (_, target), whole in zip(pairs, wholes, strict=True):
        pieces, greedy = [], True
        for row, (logprobs, likeliest) in zip(whole, found, strict=False):
            places = np.flatnonzero(row['weights']).tolist()
            tokens = [tokenizer.piece(token) for token in row['targets'][places].tolist()]
            pieces += list(zip(tokens, logprobs[places].tolist(), strict=True))
            greedy &= bool(likeliest[places].all())
        scores.append(Score(pieces, greedy, len(target.encode())))
    return scores


def _pair(text: str | Mapping[str, str], in_pairs: bool, where: str) -> tuple[str, str]:
    """Returns the source and the target that a text or a line states."""
    if isinstance(text, str) and not text.startswith('{'):
        _utf8(text, 'the text', where)
        if in_pairs:
            raise UserError(f'{where}: the run writes targets for sources: {{"source": ..., "target": ...}}')
        return '', text
    try:
        values = json_files.parse(text) if isinstance(text, str) else text
    except ValueError as error:
        line = 'it begins with { and is not a JSON object; a text that does is {"target": TEXT}'
        raise UserError(f'{where}: {line}: {error}') from error
    names = ('source', 'target') if in_pairs else ('target',)
    for name in values:
        if name not in ('source', 'target'):
            raise UserError(f'{where}: {name!r} is unknown; valid: source, target')
    for name in names:
        if name not in values:
            raise UserError(f'{where}: it has no {name!r}')
    for name, value in values.items():
        _utf8(value, name, where)
    return values.get('source', ''), values['target']


def _utf8(text: Any, name: str, where: str) -> None:
    try:
        fields.text(text, name)
    except BadRecord as error:
        raise UserError(f'{where}: {error}') from None


def _written(run: Run, pairs: Sequence[tuple[str, str]], ended: bool) -> Iterator[list[Fields]]:
    """Yields the row of each pair, as in training."""
    template = special_tokens.template_of(run.config, run.tokenizers)
    given = texts_lib.reader(run.config, run.tokenizers).encode_batch([source for source, _ in pairs])
    wanted = run.tokenizers.target.encode_batch([target for _, target in pairs])
    for source, target in zip(given, wanted, strict=True):
        yield [template.write(np.array(source, np.int32), np.array(target, np.int32), ended)]


def _continued(run: Run, pairs: Sequence[tuple[str, str]], ended: bool, stride: int) -> Iterator[list[Fields]]:
    """Yields the windows of each pair, read as one text: the source's tokens, and those that follow in the text of
    both."""
    tokenizer, longest = run.tokenizers.target, run.config.model.max_len
    prefix = TASKS[run.config.train.objective].prefix and run.config.data.bidirectional_prefix
    template = special_tokens.template_of(run.config, run.tokenizers)
    before = [source.rstrip() for source, _ in pairs]  # the spaces belong to the target's first token
    sources = tokenizer.encode_batch(before)
    whole = tokenizer.encode_batch([source + target for source, target in pairs])
    for source, tokens in zip(sources, whole, strict=True):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(source, tokens, strict=False))
        count = len(list(same))  # a token of both source and target is scored
        front = template.prompt(tokens[:count])
        text = np.array([*front, *tokens[count:], *([tokenizer.specials.eos] if ended else [])], np.int32)
        windows = list(_windows(text, len(front), len(text) if prefix else longest, stride))
        for window in windows if prefix else ():
            window['prefix'] = np.arange(len(text) - 1) < len(front)
        yield windows


def _windows(text: np.ndarray, start: int, longest: int, stride: int) -> Iterator[Fields]:
    """Yields the rows that score the tokens from `start` on, each once."""
    while start < len(text):
        end = min(len(text), max(start + stride, longest + 1))
        begin = max(0, end - 1 - longest)
        weights = (np.arange(begin + 1, end) >= start).astype(np.float32)
        yield {'inputs': text[begin : end - 1], 'targets': text[begin + 1 : end], 'weights': weights}
        start = end


@functools.cache
def _likelihoods(vocab_size: int) -> Method:
    """Returns (module, batch) -> (log-probabilities of the targets, whether each is the likeliest token), [B, T]."""
    chunk = max(1, _LOGITS // (reading.BATCH_SIZE * vocab_size))

    def scored(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = model.token_statistics(batch, DropoutRates(), chunk=chunk)
        return found.log_likelihood, found.correct

    return scored
