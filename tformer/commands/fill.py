"""Fills the masks of texts by a masked language model.

    tformer fill --workdir=DIR [TEXT ...] [--input=FILE] [--output=FILE] [--top=5]

Each text holds the tokenizer's mask, <mask> or [MASK], at least once. The output has a line of JSON for each, in their
order: {"text": ..., "masks": [[{"id": ..., "text": ..., "probability": ...}, ...], ...]}, with the likeliest tokens
of each mask. It is printed, or written to --output.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tformer import commands
from tformer.commands import reading
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.config.tasks import HEADS, TASKS
from tformer.data.examples import special_tokens
from tformer.data.examples.special_tokens import Fields
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError
from tformer.evaluation.many_rows import Method
from tformer.layers.dropout import DropoutRates
from tformer.objectives import OBJECTIVES

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS = {
    'output': ('string', None, 'the file of the lines of JSON; default: standard output'),
    'top': ('int', 5, 'how many tokens are given for each mask'),
}
ARGUMENTS = 'TEXT'

Candidate = dict[str, Any]  # id: of the token; text: what it stands for; probability

_AT_ONCE = 8  # rows, of which a batch holds the logits of all positions


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    reading.check_output(flags.output, flags.input)
    workdir, texts = commands.needed(flags, 'workdir'), texts_lib.given(arguments, flags.input)
    found = fill(Run.load(workdir, overrides, flags.checkpoint), texts, flags.top, source=flags.input)
    rows = [{'text': text, 'masks': masks} for text, masks in zip(texts, found, strict=True)]
    reading.write_lines(rows, flags.output)


def fill(
    run: Run | str | pathlib.Path, texts: Sequence[str], top: int = 5, *, source: str | None = None
) -> list[list[list[Candidate]]]:
    """Returns for each text, and for each of its masks, the `top` likeliest tokens with their probabilities.

        >>> tformer.fill('runs/bert', ['The capital of France is [MASK].'])

    A mask stands for one token, and all masks of a text are predicted at once (Devlin et al. 2019, 3.1). Probabilities
    are of the whole vocabulary; special tokens are not among the candidates. `source` is the file of the texts, which
    errors name.

    Raises:
      UserError: the run's objective has no masks, `top` is not positive, or a text has no mask or is too long.
    """
    run = opened(run)
    objective, tokenizer, size = run.config.train.objective, run.tokenizers.target, run.config.model.vocab_size or 0
    valid = [name for name, task in TASKS.items() if task.families == ('encoder',) and HEADS[task.head].vocabulary]
    if objective not in valid:
        raise UserError(f'fill: train.objective={objective} has no masks; valid: {", ".join(valid)}')
    if top < 1:
        raise UserError(f'--top={top} must be at least 1')
    ordinary = np.pad(tokenizer.ordinary, (0, size - len(tokenizer.ordinary)))
    most = min(top + int((~ordinary).sum()), size)
    rows = [_row(run, text, reading.place(index, source)) for index, text in enumerate(texts_lib.several(texts))]
    found = reading.outputs(run, rows, likeliest(objective, most), _AT_ONCE)

    def candidates(ids: np.ndarray, probabilities: np.ndarray) -> list[Candidate]:
        chosen = np.flatnonzero(ordinary[ids])[:top].tolist()
        return [_candidate(tokenizer, int(ids[place]), float(probabilities[place])) for place in chosen]

    return [
        [candidates(ids[place], probabilities[place]) for place in np.flatnonzero(row['weights']).tolist()]
        for row, (ids, probabilities) in zip(rows, found, strict=True)
    ]


def _candidate(tokenizer: Tokenizer, index: int, probability: float) -> Candidate:
    return {'id': index, 'text': tokenizer.decode([index]), 'probability': probability}


def _row(run: Run, text: str, where: str) -> Fields:
    """Returns the `inputs` of a text, with `weights` 1 at its masks."""
    tokenizer, longest = run.tokenizers.target, run.config.model.max_len
    mask = tokenizer.specials.mask
    name = tokenizer.piece(mask)
    parts = text.split(name)
    if len(parts) == 1:
        raise UserError(f'{where}: it has no {name}')
    if tokenizer.space_leads:
        parts = [*(part.removesuffix(' ') for part in parts[:-1]), parts[-1]]
    first, *others = tokenizer.encode_batch(parts)
    tokens = first + [token for other in others for token in (mask, *other)]
    inputs = np.array(special_tokens.template_of(run.config, run.tokenizers).prompt(tokens), np.int32)
    if len(inputs) > longest:
        raise UserError(f'{where}: it has {len(inputs)} tokens, the model takes {longest} (model.max_len)')
    return {'inputs': inputs, 'weights': (inputs == mask).astype(np.float32)}


@functools.cache
def likeliest(objective: str, count: int) -> Method:
    """Returns (module, batch) -> (ids, probabilities), each [B, T, count]: the likeliest tokens at each position."""
    method = OBJECTIVES[objective].method

    def predicted(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rates = DropoutRates()
        outputs = getattr(model, method)(batch, rates) if isinstance(method, str) else method(model, batch, rates)
        logits_BTV = outputs[0] if isinstance(outputs, tuple) else outputs
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits_BTV, axis=-1), count)
        return ids, probabilities

    return predicted
