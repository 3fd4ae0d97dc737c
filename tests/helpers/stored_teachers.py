"""Workdirs of models that nobody trained, to teach others."""

import pathlib

import jax.numpy as jnp

from tformer import checks
from tformer.config import Config, Data, Model, Train, override
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import sharding
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import checkpoint_writer, workdir
from tformer.training.dummy_batch import one_row
from tformer.training.state import TrainState, initial_variables


def save_teacher(directory: pathlib.Path, step: int = 7, seed: int = 0, **fields: object) -> pathlib.Path:
    """A workdir of random parameters, whose tokens are bytes."""
    tokens = Tokenizers(None, Byte())
    cfg = Config(
        model=Model(emb_dim=16, mlp_dim=16, num_heads=2, num_decoder_layers=2, max_len=64),
        data=Data(length=32, tokenizer='byte'),
        train=Train(num_steps=9, seed=seed),
    )
    cfg = override(cfg, {name.replace('__', '.'): value for name, value in fields.items()})
    cfg = checks.resolve(cfg, vocab_size=tokens.target.vocab_size)
    made, objective = build(cfg.model), OBJECTIVES[cfg.train.objective]
    params = sharding.unboxed(initial_variables(made, objective, Hyperparameters.of(cfg), one_row(cfg)))['params']
    directory.mkdir(exist_ok=True)
    writer = checkpoint_writer.CheckpointWriter(directory, keep_last=9)
    writer.save(TrainState(jnp.asarray(step), params, {}), {}, float(step))
    writer.wait()
    tokens.save(directory)
    workdir.save_config(directory, cfg)
    return directory
