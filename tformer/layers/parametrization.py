"""How initial values, multipliers and learning rates go with the width of a model."""

from typing import NamedTuple

from tformer.config import Model
from tformer.errors import choose


class Parametrization(NamedTuple):
    """A rule for all widths."""

    from_base: bool  # values are those of a model of width `model.base_emb_dim`, carried over to `model.emb_dim`
    attention_scale: str  # the key of `attention.SCALES` that `model.attention_scale=None` stands for


def parametrization(cfg: Model) -> Parametrization:
    """Returns the row of `PARAMETRIZATIONS` that `cfg` names."""
    return choose(PARAMETRIZATIONS, cfg.parametrization, 'model.parametrization')


def width_factor(cfg: Model) -> float:
    """Returns how many times wider the model is than the one that its values come from; 1 where they are its own."""
    return cfg.emb_dim / cfg.base_emb_dim if parametrization(cfg).from_base and cfg.base_emb_dim else 1.0


def base_width(cfg: Model) -> int:
    """Returns the width that constants are made from."""
    return round(cfg.emb_dim / width_factor(cfg))


PARAMETRIZATIONS: dict[str | None, Parametrization] = {
    # The best learning rate does not depend on the width (Yang et al. 2022).
    'mup': Parametrization(from_base=True, attention_scale='head_dim'),
    None: Parametrization(from_base=False, attention_scale='sqrt_head_dim'),
}
