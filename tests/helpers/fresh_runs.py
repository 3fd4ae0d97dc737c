"""Runs that nobody trained: random parameters, a vocabulary of characters."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax

from tformer import checks
from tformer.commands.run import Run
from tformer.config import Config, Data, Decode, Mesh, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import sharding
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training.dummy_batch import one_row


def fresh_run(
    objective: str,
    labels: tuple[str, ...] = (),
    letters: str = 'abcde .',
    family: str = 'encoder',
    layers: int = 1,
    fields: Mapping[str, object] = {},
    **data: object,
) -> Run:
    """Returns a small run of the objective; its parameters are large, so that outputs differ; `fields`: the model's."""
    tokens = Tokenizers(Char(letters) if family == 'encoder_decoder' else None, Char(letters), labels)
    stacks = {f'num_{stack}_layers': layers for stack in ('encoder', 'decoder') if stack in family}
    sizes = {'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 2, 'max_len': 32}
    model = Model(family=family, **{**sizes, **stacks, **fields})
    config = Config(model, Data(length=24, **data), train=Train(objective=objective, num_steps=1), mesh=Mesh(data=1))
    config = dataclasses.replace(config, decode=Decode(max_len=6))
    config = checks.resolve(config, vocab_size=tokens.target.vocab_size, num_classes=len(labels) or None)
    made = build(config.model)
    method = OBJECTIVES[objective].method
    variables = sharding.unboxed(
        jax.jit(made.init, static_argnames='method')(jax.random.key(0), one_row(config), method=method)
    )
    variables = jax.tree.map(lambda x: 3 * x, variables)
    return Run(pathlib.Path('nowhere'), config, tokens, variables, 1)
