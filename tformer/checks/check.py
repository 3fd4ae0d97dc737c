"""The check of a whole config: once, by whoever loads or changes it."""

import jax

from tformer.checks.choices import check_choices
from tformer.checks.data import check_data, check_records
from tformer.checks.mesh import check_mesh
from tformer.checks.model import check_model
from tformer.checks.model_fields import check_applies
from tformer.checks.ranges import check_ranges
from tformer.checks.run import check_optimizer, check_run
from tformer.config import Config
from tformer.distributed import sharding
from tformer.evaluation import metrics
from tformer.layers import kernel_choice


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


def check_here(config: Config, platform: str | None = None) -> None:
    """Raises a `UserError` of one line where a config is not valid, or not on a JAX platform; None: of this process."""
    check(config)
    kernel_choice.pick(config.model, platform or jax.default_backend())
