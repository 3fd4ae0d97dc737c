"""The numbers of a run that a sweep may vary, as one pytree of scalars, an argument of the compiled train step."""

import flax.struct
import jax

from tformer.config import Config, override
from tformer.layers.dropout import DropoutRates, MaybeScalar

Scalar = float | int | jax.Array


class Hyperparameters(flax.struct.PyTreeNode):
    """Scalars, traced or not. A field that is None is off and adds nothing to the program."""

    seed: Scalar
    learning_rate: Scalar
    warmup_steps: Scalar
    final_fraction: Scalar
    decay_fraction: Scalar
    weight_decay: Scalar
    ema_decay: MaybeScalar
    init_scale: Scalar
    label_smoothing: MaybeScalar
    z_loss: MaybeScalar
    second_loss_weight: Scalar | None
    skip_spikes: MaybeScalar
    dropout_rates: DropoutRates

    @classmethod
    def of(cls, config: Config) -> 'Hyperparameters':
        """Returns the hyperparameters of `config`; a label smoothing, z-loss or dropout rate of 0 is off."""
        return cls(
            seed=config.train.seed,
            learning_rate=config.optimizer.learning_rate,
            warmup_steps=config.optimizer.warmup_steps,
            final_fraction=config.optimizer.final_fraction,
            decay_fraction=config.optimizer.decay_fraction,
            weight_decay=config.optimizer.weight_decay,
            ema_decay=config.optimizer.ema_decay,
            init_scale=config.model.init_scale,
            label_smoothing=config.train.label_smoothing or None,
            z_loss=config.train.z_loss or None,
            second_loss_weight=config.train.second_loss_weight,
            skip_spikes=config.train.skip_spikes,
            dropout_rates=DropoutRates.of(config.model),
        )


def standard(config: Config) -> Config:
    """Returns `config` with standard hyperparameters: it is equal for runs that one program can train.

    Moving averages and the guard against spikes stay on or off, because the training state has them or does not.
    """
    kept = {name: value for name, value in OPTIONAL.items() if override(config, {name: None}) != config}
    return override(config, STANDARD | kept)


STANDARD = {
    'train.seed': 0,
    'train.label_smoothing': 0.0,
    'train.z_loss': 0.0,
    'optimizer.learning_rate': 1.0,
    'optimizer.warmup_steps': 0,
    'optimizer.final_fraction': 0.0,
    'optimizer.decay_fraction': 0.0,
    'optimizer.weight_decay': 0.0,
    'model.init_scale': 1.0,
    'model.dropout_rate': 0.0,
    'model.attention_dropout_rate': 0.0,
    'model.activation_dropout_rate': 0.0,
    'model.head_dropout_rate': 0.0,
}
OPTIONAL = {'optimizer.ema_decay': 0.5, 'train.skip_spikes': 1.0}
