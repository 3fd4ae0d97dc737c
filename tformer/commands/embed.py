"""Writes a vector for each text.

    tformer embed --workdir=DIR --output=FILE.npy [TEXT ...] [--input=FILE] [--pooling=mean] [--normalize]

The texts are the arguments, else the lines of --input, else those of standard input. FILE.npy has float32
[texts, model.emb_dim] in their order; FILE.parquet has a row with `text` and `embedding` for each, and needs pyarrow.
An encoder-decoder's vectors are those of its encoder. Texts that are too long are cut.
"""

import functools
import importlib.util
import io
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer import atomic, commands
from tformer.commands import reading
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.config.tasks import HEADS, TASKS
from tformer.data.examples import special_tokens
from tformer.data.examples.special_tokens import Fields
from tformer.errors import UserError, choose
from tformer.evaluation.many_rows import Method
from tformer.layers.dropout import DropoutRates
from tformer.layers.heads import POOLINGS
from tformer.layers.tower import positions_of, real_tokens

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS = {
    'output': ('string', None, 'the file of the vectors, .npy or .parquet'),
    'pooling': (('mean', 'cls', 'last', 'max'), None, "which tokens make the vector; default: the run's, else mean"),
    'normalize': ('bool', False, 'scale each vector to length 1'),
    'batch_size': ('int', 64, 'texts read at once'),
    'length': ('int', None, 'the most tokens of a text, special ones among them; default: model.max_len'),
}
ARGUMENTS = 'TEXT'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    workdir, file = commands.needed(flags, 'workdir'), pathlib.Path(commands.needed(flags, 'output'))
    write = choose(WRITERS, file.suffix, f'--output={file}: the ending')
    reading.check_output(flags.output, flags.input)
    if write is _parquet and importlib.util.find_spec('pyarrow') is None:
        raise UserError(f"--output={file} needs the package pyarrow: pip install 'tformer[parquet]'; or write .npy")
    texts = texts_lib.given(arguments, flags.input)
    loaded = Run.load(workdir, overrides, flags.checkpoint, headless=True)
    how = {'normalize': flags.normalize, 'batch_size': flags.batch_size, 'length': flags.length}
    found = embed(loaded, texts, flags.pooling, **how)
    atomic.write(file, write(texts, found))
    print(f'{file}: {found.shape[0]:,} vectors of {found.shape[1]:,} numbers')


def embed(
    run: Run | str | pathlib.Path,
    texts: Sequence[str],
    pooling: str | None = None,
    *,
    normalize: bool = False,
    batch_size: int = reading.BATCH_SIZE,
    length: int | None = None,
) -> np.ndarray:
    """Returns a vector for each text, float32 [texts, model.emb_dim]: its tokens' residual stream after the last layer,
    pooled.

        >>> tformer.embed('runs/encoder', ['a text', 'another'], normalize=True) @ vector

    `pooling` is a key of `layers.heads.POOLINGS`: `mean` (over the tokens that are not padding, special ones
    included), `cls`, `last` or `max`. None is model.pooling where the run was trained on whole texts (classes,
    numbers, vectors), else mean. With `normalize` each vector is scaled to length 1, so that products are cosines. An
    encoder-decoder's vectors are its encoder's. Texts of more than `length` tokens, model.max_len where it is None, are
    cut, and a line on standard error says how many.

    Raises:
      UserError: `pooling` is unknown, `batch_size` is not positive, `length` leaves no token or is beyond
        model.max_len, or a recurrent model has two stacks.
    """
    run = opened(run, headless=True)
    model = run.config.model
    if model.recurrence is not None and model.family == 'encoder_decoder':
        raise UserError(f'embed: model.recurrence={model.recurrence} with two stacks has no vectors of texts')
    if batch_size < 1:
        raise UserError(f'--batch_size={batch_size} must be at least 1')
    if pooling is None:
        pooling = model.pooling if _pools(run) else 'mean'
    choose(POOLINGS, pooling, 'pooling')
    rows = _rows(run, texts_lib.several(texts), model.max_len if length is None else length)
    found = np.zeros((len(texts), model.emb_dim), np.float32)
    for index, vector in enumerate(reading.outputs(run, rows, vectors(pooling), batch_size)):
        found[index] = vector
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12) if normalize else found


def _pools(run: Run) -> bool:
    """Returns whether the run was trained on one vector of each text, from the stack that `embed` reads."""
    head = HEADS[TASKS[run.config.train.objective].head]
    return head.pools and not head.vocabulary and run.config.model.family != 'encoder_decoder'


def _rows(run: Run, texts: Sequence[str], length: int) -> list[Fields]:
    """Returns the model's inputs for each text, at most `length` tokens with the special ones around them."""
    template = special_tokens.template_of(run.config, run.tokenizers)
    two_stacks = run.config.model.family == 'encoder_decoder'

    def around(tokens: Sequence[int]) -> Sequence[int]:
        if _pools(run):
            return template.read(np.array(tokens))['inputs']
        return template.given(tokens) if two_stacks else template.prompt(tokens)

    room = length - len(around([0])) + 1
    if room < 1 or length > run.config.model.max_len:
        least = length - room + 1
        raise UserError(f'--length={length} must be from {least} to model.max_len={run.config.model.max_len}')
    tokenized = (run.tokenizers.source or run.tokenizers.target).encode_batch(texts)
    if cut := sum(len(tokens) > room for tokens in tokenized):
        print(f'{cut:,} of {len(texts):,} texts were cut to {room} tokens', file=sys.stderr, flush=True)
    name = 'encoder_inputs' if two_stacks else 'inputs'
    return [{name: np.array(around(tokens[:room]), np.int32)} for tokens in tokenized]


@functools.cache
def vectors(pooling: str) -> Method:
    """Returns (module, batch) -> x_BD, float32, the pooled residual stream after the last layer of the stack."""

    def method(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        if 'encoder_inputs' in batch:
            x_BTD, real_BT = model.encode(batch, DropoutRates()), positions_of(batch, 'encoder_') >= 0
        else:
            x_BTD, real_BT = model.features(batch, DropoutRates()), real_tokens(batch)
        return POOLINGS[pooling](x_BTD, real_BT).astype(jnp.float32)

    return method


# ----------------------------------------------------------------------------------------------------------- files


def _npy(texts: Sequence[str], found: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, found)
    return held.getvalue()


def _parquet(texts: Sequence[str], found: np.ndarray) -> bytes:
    import pyarrow
    from pyarrow import parquet

    flat = pyarrow.array(found.reshape(-1))
    column = pyarrow.FixedSizeListArray.from_arrays(flat, found.shape[1])
    held = io.BytesIO()
    parquet.write_table(pyarrow.table({'text': list(texts), 'embedding': column}), held)
    return held.getvalue()


WRITERS = {'.npy': _npy, '.parquet': _parquet}
