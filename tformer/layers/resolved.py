"""The values that `None` stands for in a model's configuration."""

import dataclasses

from tformer.config import Model
from tformer.errors import choose
from tformer.layers.placements import PLACEMENTS


def resolve_model(model: Model) -> Model:
    """Returns `model` with its derived fields filled in, as modules read it.

    Raises:
      UserError: an unknown norm placement.
    """
    head_dim = model.head_dim or max(1, model.emb_dim // model.num_heads)
    placement = choose(PLACEMENTS, model.norm_placement, 'model.norm_placement')
    bare_sum = model.norm is not None and placement.final_norm
    return dataclasses.replace(
        model,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=head_dim,
        value_dim=model.value_dim or head_dim,
        final_norm=bare_sum if model.final_norm is None else model.final_norm,
        attention_scale=model.attention_scale or ('head_dim' if model.parametrization == 'mup' else 'sqrt_head_dim'),
        initializer=model.initializer or placement.initializer,
        encoder_vocab_size=model.encoder_vocab_size or model.vocab_size,
    )
