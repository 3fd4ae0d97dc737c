"""What writes a run's texts in the rows of an engine: its tokens, its batches, its compiled programs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer import config as config_lib
from tformer.commands.run import Run
from tformer.config import Config, Decode
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode.engine import Engine, make_engine
from tformer.decode.text import Writer, make_writer
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.model import build

Batcher = Callable[[Sequence[int]], dict[str, np.ndarray]]  # the tokens of a text -> a batch of one row


class RowWriter(NamedTuple):
    """An engine with what stands between texts and its rows."""

    writer: Writer
    batch: Batcher
    engine: Engine
    rows: int


def make(run: Run, rows: int) -> RowWriter:
    """Returns what writes at least so many texts of a run at once, on the devices of config.mesh.

    Raises:
      UserError: the run does not write text, its model is recurrent, or `unknown` fields are set.
    """
    config = run.config
    if named := unknown(config.decode):
        line = f'{", ".join(named)}: rows that texts come and go in know'
        raise UserError(f'{line} {", ".join(f"decode.{name}" for name in KNOWN)} alone, and greedy or sample')
    if config.model.recurrence is not None:
        raise UserError(f'model.recurrence={config.model.recurrence} has no cache whose rows come and go')
    writer, batch = reader(config, run.tokenizers)
    multiple = sharding.row_multiple(sharding.make_mesh(config.mesh), config.mesh)
    rows = -(-rows // multiple) * multiple
    first, longest = batch(writer.read([''])[0]), config.model.max_len
    options: dict[str, Any] = {'banned': writer.banned, 'chunk': config.decode.prefill_chunk}
    return RowWriter(writer, batch, make_engine(build(config.model), first, rows=rows, slots=longest, **options), rows)


# The fields of config.decode that an engine, or who asks it for a text, knows; others change what is written.
KNOWN = ('strategy', 'max_len', 'num_outputs', 'temperature', 'top_k', 'top_p', 'min_p', 'ends')
_HARMLESS = ('batch_size', 'prefill_chunk', 'draft', 'draft_len')  # they change no distribution


def unknown(decode: Decode) -> list[str]:
    """Returns the fields, as they are set, by which a run's texts are others than an engine's."""
    plain = vars(Decode())
    found = {name: value for name, value in vars(decode).items() if value != plain[name]}
    names = [name for name in found if name not in (*KNOWN, *_HARMLESS)]
    names += ['strategy'] if decode.strategy not in ('greedy', 'sample') else []
    return [f'decode.{name}={found[name]}' for name in names]


def reader(config: Config, tokenizers: Tokenizers) -> tuple[Writer, Batcher]:
    """Returns the writer of a run, whose prompts may fill its model, and the batches of one row."""
    config = config_lib.override(config, {'decode.strategy': 'greedy', 'decode.max_len': 1})
    writer = make_writer(build(config.model), config, tokenizers, cut=False)
    return writer, batcher(config, writer)


def room(config: Config, tokens: Sequence[int]) -> int:
    """Returns how many new tokens the model has room for after these, which it reads."""
    paired = config.model.family == 'encoder_decoder'
    return config.model.max_len + 1 - len(config.data.start if paired else tokens)


def lengths(config: Config) -> list[int]:
    """Returns the padded lengths of prompts that `batcher` makes; beside an encoder there is one."""
    if config.model.family == 'encoder_decoder':
        return [1]
    found = [16]
    while found[-1] < config.model.max_len:
        found.append(_bucket(found[-1] + 1, config.model.max_len))
    return found


def batcher(config: Config, writer: Writer) -> Batcher:
    """Returns the tokens of a text -> a batch of one row, padded to one of a few lengths."""
    pad, longest = writer.pad, config.model.max_len

    def padded(tokens: Sequence[int]) -> dict[str, np.ndarray]:
        batch = writer.batch([tokens], 1)
        if 'encoder_inputs' in batch:  # of one length, that of the cache
            size = config.data.encoder_length or config.data.length
            return {name: _pad(x, size, pad, name, behind=True) for name, x in batch.items()}
        size = batch['inputs'].shape[1]
        return {name: _pad(x, _bucket(size, longest), pad, name, behind=False) for name, x in batch.items()}

    return padded


def _bucket(size: int, longest: int) -> int:
    """Returns the least of 16, 32, 48, 64, 96, 128, 192 ... that holds `size`, at most `longest` where that does."""
    bucket = 16
    while bucket < size:
        bucket += max(16, 1 << (bucket.bit_length() - 2))
    return min(bucket, max(size, longest))


def _pad(x_1T: np.ndarray, size: int, pad: int, name: str, *, behind: bool) -> np.ndarray:
    if name in ('inputs', 'positions') and behind:  # the tokens that a decoder starts from
        return x_1T
    fill = -1 if name.endswith('positions') else pad if name.endswith('inputs') else 0
    more = max(size - x_1T.shape[1], 0)
    return np.pad(x_1T, ((0, 0), (0, more) if behind else (more, 0)), constant_values=fill)
