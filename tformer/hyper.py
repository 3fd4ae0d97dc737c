"""The numbers of a run that a sweep may vary: one pytree of scalars that reaches the compiled step as an argument."""

import flax.struct
import jax

from tformer.config import Config
from tformer.layers.dropout import Rate, Rates

Scalar = float | int | jax.Array


class Hyper(flax.struct.PyTreeNode):
    """Scalars, traced or not. A field that is None is off, and leaves no trace in the program."""

    seed: Scalar
    learning_rate: Scalar
    warmup_steps: Scalar
    weight_decay: Scalar
    ema_decay: Rate
    init_scale: Scalar
    label_smoothing: Rate
    z_loss: Rate
    second_loss_weight: Scalar | None
    skip_spikes: Rate
    rates: Rates

    @classmethod
    def of(cls, config: Config) -> 'Hyper':
        """Returns the numbers that `config` states; label smoothing, z-loss and dropout of 0 are off."""
        return cls(
            seed=config.train.seed,
            learning_rate=config.optimizer.learning_rate,
            warmup_steps=config.optimizer.warmup_steps,
            weight_decay=config.optimizer.weight_decay,
            ema_decay=config.optimizer.ema_decay,
            init_scale=config.model.init_scale,
            label_smoothing=config.train.label_smoothing or None,
            z_loss=config.train.z_loss or None,
            second_loss_weight=config.train.second_loss_weight,
            skip_spikes=config.train.skip_spikes,
            rates=Rates.of(config.model),
        )
