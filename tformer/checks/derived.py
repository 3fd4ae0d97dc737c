"""The values that `None` stands for in a run: those that its data decide."""

import dataclasses

from tformer.checks import inherited
from tformer.checks.check import check
from tformer.config import Config, override
from tformer.config.tasks import TASKS
from tformer.errors import UserError
from tformer.layers.resolved import resolve_model


def resolve(
    config: Config,
    *,
    vocab_size: int,
    encoder_vocab_size: int | None = None,
    num_classes: int | None = None,
    steps_per_epoch: float = 1,
) -> Config:
    """Returns `config` with every derived `None` filled in, once, before building; this is what config.json holds.

    `vocab_size` is that of the decoder's tokenizer, or of the only one, and `encoder_vocab_size` that of the source
    tokenizer, if there is one. `num_classes` is the number of labels in the training split, if it has any.

    Raises:
      UserError: a size that is set and too small for the data, fields that do not fit together, or train.init_model
        without its train.init_from.
    """
    inherited.check_known(config)
    model, train = config.model, config.train
    needs = {
        'vocab_size': (vocab_size, 'the tokenizer, which has'),
        'num_classes': (num_classes, 'the labels, which are'),
        'encoder_vocab_size': (encoder_vocab_size, 'the tokenizer, which has'),
    }
    for name, (needed, words) in needs.items():
        value = getattr(model, name)
        if value is not None and needed is not None and value < needed:
            raise UserError(f'model.{name}={value} is smaller than {words} {needed}')
    encoder_size = None
    if model.family == 'encoder_decoder':  # one tokenizer for both sides has one size
        encoder_size = model.vocab_size if encoder_vocab_size == vocab_size else None
        encoder_size = encoder_size or encoder_vocab_size
    num_steps = train.num_steps or max(1, round((train.num_epochs or 0) * steps_per_epoch))
    eval_every = whole_steps(train.eval_every or num_steps, num_steps)
    derived = {
        'model.vocab_size': model.vocab_size or vocab_size,
        'model.encoder_vocab_size': model.encoder_vocab_size or encoder_size,
        'model.num_classes': model.num_classes or (num_classes if TASKS[train.objective].classes_from_data else None),
        'train.num_steps': num_steps,
        'train.num_epochs': None,
        'optimizer.warmup_steps': whole_steps(config.optimizer.warmup_steps, num_steps),
        'train.eval_every': eval_every,
        'train.checkpoint_every': train.checkpoint_every or eval_every,
        'data.encoder_length': config.data.encoder_length or config.data.length,
    }
    config = override(config, derived)
    config = dataclasses.replace(config, model=resolve_model(config.model))
    check(config)
    return config


def whole_steps(value: float, num_steps: int) -> int:
    """Returns a number of steps, which is stated as such or as a share of the run."""
    return value if isinstance(value, int) else max(1, round(value * num_steps))
