"""What writes a run's texts in the rows of an engine: its tokens, its batches, its compiled programs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer import config as config_lib
from tformer.commands.run import Run
from tformer.config import Config, Decode
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import buckets
from tformer.decode.drawing import KNOWN, unknown
from tformer.decode.engine import Engine, make_engine
from tformer.decode.kept_prompts import KeptPrompts
from tformer.decode.rules import Rules
from tformer.decode.spread import spread_over
from tformer.decode.text import Writer, make_writer, rules_of
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.model import build

Batcher = Callable[[Sequence[int]], dict[str, np.ndarray]]  # the tokens of a text -> a batch of one row


class RowWriter(NamedTuple):
    """An engine with what stands between texts and its rows."""

    writer: Writer
    batch: Batcher
    engine: Engine
    rows: int
    least: int = 1  # tokens of the shortest text of the run's form
    kept: KeptPrompts | None = None  # from which the engine's prompts go on; None: from none


MOST_BIASED = 300  # tokens that a text biases by itself


def make(run: Run, rows: int, *, own_biases: bool = False, kept: int = 0) -> RowWriter:
    """Returns what writes at least so many texts of a run at once, on the devices of config.mesh.

    With `own_biases` batches have those of their texts, which `bias_of` makes. So many prompts are `kept`, where they
    can be read in parts.

    Raises:
      UserError: the run does not write text, its model is recurrent, or `unknown` fields are set.
    """
    config = run.config
    if named := unknown(config.decode):
        known = ', '.join(f'decode.{name}' for name in KNOWN)
        raise UserError(f'{", ".join(named)}: texts that are written side by side know greedy and sample, and {known}')
    if config.model.recurrence is not None:
        raise UserError(f'model.recurrence={config.model.recurrence} has no cache whose rows come and go')
    writer, batch = reader(config, run.tokenizers)
    mesh = meshes.make_mesh(config.mesh)
    multiple = meshes.row_multiple(mesh, config.mesh)
    rows = -(-rows // multiple) * multiple
    first, longest = batch(writer.read([''])[0]), config.model.max_len
    first |= bias_of({}) if own_biases else {}
    rules, least = rules_and_least(config, run.tokenizers)
    options: dict[str, Any] = {'banned': writer.banned, 'rules': rules, 'eos': writer.ends[0]}
    options |= {'rows': rows, 'slots': longest, 'chunk': config.decode.prefill_chunk}
    options['quantization'] = config.decode.cache_quantization
    options['spread'] = spread_over(mesh, sharding.make_rules(config.mesh))
    engine = make_engine(build(config.model), first, **options)
    store = KeptPrompts(engine, kept) if kept and writer.shares else None
    return RowWriter(writer, batch, engine if store is None else store.keeping(), rows, least, store)


def rules_and_least(config: Config, tokenizers: Tokenizers) -> tuple[Rules, int]:
    """Returns what a run asks of its texts, and the tokens of the shortest one that fits.

    Raises:
      UserError: the model has no room for a text that fits.
    """
    rules = rules_of(config_lib.override(config, {'decode.max_len': str(config.model.max_len)}), tokenizers)
    return rules, 1 if rules.constraint is None else rules.constraint.least


def bias_of(biases: Mapping[int, float]) -> dict[str, np.ndarray]:
    """Returns the part of a batch of one row that says what the logits of up to `MOST_BIASED` tokens gain."""
    tokens, values = np.zeros((1, MOST_BIASED), np.int32), np.zeros((1, MOST_BIASED), np.float32)
    tokens[0, : len(biases)], values[0, : len(biases)] = list(biases), list(biases.values())
    return {'bias_tokens': tokens, 'bias_values': values}


def reader(config: Config, tokenizers: Tokenizers) -> tuple[Writer, Batcher]:
    """Returns the writer of a run, whose prompts may fill its model, and the batches of one row."""
    config = dataclasses.replace(config, decode=Decode(max_len=1, ends=config.decode.ends))
    writer = make_writer(build(config.model), config, tokenizers, cut=False)
    return writer, batcher(config, writer)


def room(config: Config, tokens: Sequence[int]) -> int:
    """Returns how many new tokens the model has room for after these, which it reads."""
    paired = config.model.family == 'encoder_decoder'
    return config.model.max_len + 1 - len(config.data.start if paired else tokens)


def examples(made: RowWriter) -> list[dict[str, np.ndarray]]:
    """Returns a batch of each padded length of prompts; beside an encoder there is one."""
    found = [made.batch([made.writer.pad])]
    while 'encoder_inputs' not in found[-1] and (size := found[-1]['inputs'].shape[1]) < made.writer.longest:
        found.append(made.batch([made.writer.pad] * (size + 1)))
    return found


def batcher(config: Config, writer: Writer) -> Batcher:
    """Returns the tokens of a text -> a batch of one row, padded to one of a few lengths."""
    paired = config.model.family == 'encoder_decoder'  # beside an encoder one length, that of the cache

    def padded(tokens: Sequence[int]) -> dict[str, np.ndarray]:
        size = writer.longest if paired else buckets.length(len(tokens), writer.longest)
        return buckets.padded(writer.batch([tokens], 1), size, writer.pad)

    return padded
