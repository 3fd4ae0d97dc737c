"""What the commands show: a config and its parameters, a workdir's checkpoints, data, attention."""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence

import jax
import numpy as np
from flax import linen as nn
from rich.console import Console

from tformer import atomic
from tformer import config as config_lib
from tformer.commands import runs
from tformer.config import Config
from tformer.data.batches import mixture
from tformer.data.inspection import rendering, report
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.evaluation import attention_maps
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import checkpoint, flops, setup, workdir, writers
from tformer.training.dummy_batch import assumed


def inspect(config: Config) -> str:
    """Returns the config and the model's parameter table: name, shape, logical axes, count."""
    resolved = assumed(config)
    model, objective = build(resolved.model), OBJECTIVES[resolved.train.objective]
    tokens = jax.ShapeDtypeStruct((1, 8), 'int32')
    batch = {'inputs': tokens, 'encoder_inputs': tokens, 'weights': tokens}
    params = jax.eval_shape(lambda b: model.init(jax.random.key(0), b, method=objective.method), batch)['params']
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nn.Partitioned)):
        name = '.'.join(key.key for key in path)
        shape = ' '.join(f'{axis}={size}' for axis, size in zip(leaf.names, leaf.value.shape, strict=True))
        rows.append((f'{name:<58} {leaf.value.size:>12,}', shape))
    total = sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(params)))
    sizes = f'with a vocabulary of {resolved.model.vocab_size:,}'
    text = json.dumps(config_lib.to_dict(resolved), indent=2)
    return '\n'.join([text, writers.format_table(rows), f'{total:,} parameters, {sizes}', *_layers(resolved)])


def _layers(config: Config) -> list[str]:
    """Returns how the model's kinds of layers go with the length of a row."""
    n = config.data.length
    lines = [
        f'  {kind:<18} {found.products:>16,} {found.sequential:>12,} {found.path:>12,}'
        for kind, found in flops.layer_costs(config.model, n).items()
    ]
    title = f'a layer at {n:,} tokens: products, of them one after another, longest path (Vaswani et al. 2017, table 1)'
    return [title, *lines]


def checkpoints(directory: str) -> str:
    """Returns a table of a workdir's checkpoints, read without a device; the best one is starred."""
    home = pathlib.Path(directory)
    merits, best, rows = checkpoint.scores(home), checkpoint.best(home), []
    for step in checkpoint.steps(home):
        run = checkpoint.read_metadata(home, step)
        merit = f'{merits[step]:.6g}' if step in merits else 'not evaluated'
        cells = f'merit {merit:<14} jax {run["versions"]["jax"]}  config {run["config_digest"]}'
        rows.append((f'{"*" if step == best else " "} {step:,}', cells))
    return writers.format_table([('checkpoints', f'in {checkpoint.directory(home)}'), *rows])


def show_data(config: Config, directory: str | None) -> None:
    """Prints what `data.sight` reports of a config's data, with the tokenizers of a workdir or trained ones.

    Raises:
      UserError: in the data, or the workdir has no tokenizer.
    """
    console = Console(highlight=False, soft_wrap=True)
    in_colour = console.color_system is not None and not console.no_color
    say = functools.partial(print, file=sys.stderr, flush=True)
    records = mixture.load(config, 'train')
    if directory is not None:
        tokenizers = Tokenizers.load(directory)
    else:
        say('tokenizers of the train split')
        tokenizers = workdir.new_tokenizers(config, records)
        multiple = setup.row_multiple(config, None, sharding.make_mesh(config.mesh))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, row_multiple=multiple))
    for line in report.report(config, tokenizers, records, say):
        if in_colour:
            console.print(rendering.coloured(line))
        else:
            print(rendering.plain(line))


def attention(run: runs.Run, texts: Sequence[str]) -> pathlib.Path:
    """Writes the attention maps of the run on the first text to WORKDIR/attention.html; returns the file.

    An encoder-decoder's decoder reads what it generates for the text itself.

    Raises:
      UserError: no text, or a recurrent model.
    """
    if run.config.model.recurrence is not None:
        raise UserError(f'attention: model.recurrence={run.config.model.recurrence} has no attention maps')
    if not texts:
        raise UserError('attention: no text given')
    batch: dict[str, list[int]] = {}
    target, source = run.tokenizers.target, run.tokenizers.source or run.tokenizers.target
    marks = target.specials
    if run.config.model.family == 'encoder_decoder':
        output = runs.generate(run, texts[:1])[0]
        batch['encoder_inputs'] = [*source.encode(texts[0]), source.specials.eos]
        batch['inputs'] = [marks.bos, *target.encode(output)]
        title = f'{texts[0]} → {output}'
    else:
        encoder = run.config.model.family == 'encoder'
        tokens = target.encode(texts[0])
        batch['inputs'] = [marks.cls, *tokens, marks.sep] if encoder else [marks.bos, *tokens]
        title = texts[0]
    longest = max(map(len, batch.values()))
    if longest > run.config.model.max_len:
        raise UserError(f'attention: {longest} tokens are more than model.max_len={run.config.model.max_len}')
    arrays = {name: np.array([tokens], np.int32) for name, tokens in batch.items()}
    maps = attention_maps.attention_probabilities(run.model, run.variables, arrays)
    names = {
        name: list(map((source if name.startswith('encoder_') else target).piece, tokens))
        for name, tokens in batch.items()
    }
    file = run.home / 'attention.html'
    panels = attention_maps.panels(maps, 0, names['inputs'], names.get('encoder_inputs'))
    atomic.write(file, attention_maps.page(title, panels))
    return file
