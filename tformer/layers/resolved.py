"""The values that `None` stands for in a model's configuration."""

import dataclasses
import typing

from tformer.config import Config, Model
from tformer.errors import choose
from tformer.layers.parametrization import parametrization
from tformer.layers.placements import PLACEMENTS


class ResolvedModel(Model):
    """What modules read: the type of a `Model` whose derived fields and vocabulary sizes are set."""

    vocab_size: int
    encoder_vocab_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    transform_activation: str


def resolve_model(model: Model) -> ResolvedModel:
    """Returns `model` with its derived fields filled in; a vocabulary size that is None stays None.

    Raises:
      UserError: an unknown norm placement or parametrization.
    """
    head_dim = model.head_dim or max(1, model.emb_dim // model.num_heads)
    placement = choose(PLACEMENTS, model.norm_placement, 'model.norm_placement')
    bare_sum = model.norm is not None and placement.final_norm
    resolved = dataclasses.replace(
        model,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=head_dim,
        value_dim=model.value_dim or head_dim,
        rotary_dim=model.rotary_dim or (head_dim // 2 if model.kv_latent_dim else None),
        final_norm=bare_sum if model.final_norm is None else model.final_norm,
        attention_scale=model.attention_scale or parametrization(model).attention_scale,
        initializer=model.initializer or placement.initializer,
        transform_activation=model.transform_activation or model.activation,
        encoder_vocab_size=model.encoder_vocab_size or model.vocab_size,
    )
    return typing.cast(ResolvedModel, resolved)  # the class at run time stays `Model`, which configs compare by


def with_resolved_model(config: Config) -> Config:
    """Returns `config` with its model resolved, so that two configs differ only where their models do."""
    return dataclasses.replace(config, model=resolve_model(config.model))
