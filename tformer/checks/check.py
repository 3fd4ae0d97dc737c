"""The check of a whole config: once, by whoever loads or changes it."""

import jax

from tformer.checks.choices import check_choices
from tformer.checks.data import check_data, check_records
from tformer.checks.mesh import check_mesh
from tformer.checks.model import check_model
from tformer.checks.model_fields import check_applies
from tformer.checks.ranges import check_ranges
from tformer.checks.run import check_optimizer, check_run
from tformer.config import Config, Model
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.layers import kernels, positions


def check(config: Config) -> None:
    """Raises a `UserError` of one line where a config is valid on no machine.

    An unknown key of a table, a field out of range, a field without effect, or fields that do not fit together.
    """
    check_choices(config)
    check_ranges(config)
    check_applies(config.model)
    check_model(config.model)
    check_run(config)
    check_mesh(config)
    check_data(config.data, config.model)
    check_records(config)
    check_optimizer(config.optimizer, config.model)
    sharding.make_rules(config.mesh)
    metrics.check(config.evaluate)


def check_here(config: Config) -> None:
    """Raises a `UserError` of one line where a config is not valid, or not on the devices of this process."""
    check(config)
    check_kernel(config.model)


def check_kernel(cfg: Model) -> None:
    """Raises a `UserError` where the attention kernel does not serve what the model needs, or not on this machine."""
    asked = {
        'bias': positions.POSITIONS[cfg.position].bias is not None,
        'softcap': cfg.attention_softcap is not None,
        'sink': cfg.attention_sink is not None,
        'dropout': cfg.attention_dropout_rate > 0,
        'value_dim': cfg.value_dim not in (None, cfg.head_dim or cfg.emb_dim // cfg.num_heads),
        cfg.dtype: True,
    }
    needs = {name for name, needed in asked.items() if needed}
    head_dim = cfg.head_dim or cfg.emb_dim // cfg.num_heads
    if cfg.attention_kernel == 'cudnn' and (head_dim % 8 or head_dim > 256):
        raise UserError(f'model.attention_kernel=cudnn takes head sizes of 8, 16, ... 256, not {head_dim}')
    if cfg.attention_kernel == 'flash' and jax.device_count() > 1:
        raise UserError('model.attention_kernel=flash runs on one device; reference, chunked run on a mesh')
    line = kernels.unserved(cfg.attention_kernel, needs, jax.default_backend())
    if line is not None:
        raise UserError(line)
