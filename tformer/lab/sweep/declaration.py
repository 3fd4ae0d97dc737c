"""What a sweep file returns: a base config, and the arms of a sweep or a search."""

import dataclasses
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from tformer.errors import UserError
from tformer.lab.sweep.matching import Match
from tformer.lab.sweep.overrides import Overrides, as_dicts
from tformer.lab.sweep.searches import Search


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A base config and the changes of its trials.

    The first of `arms` is the baseline, and of a search the base. Those that differ only in train.seed are one arm;
    those that make the same config are one trial.
    """

    base: str | ConfigDict  # FILE[:argument], relative to the sweep file; or what a recipe's get_config returns
    arms: Sequence[Overrides] | Search  # the overrides of each trial, or what is searched
    match: Sequence[Match] | Match | None = ()  # quantities in which all arms should equal the baseline

    def __post_init__(self) -> None:
        if not isinstance(self.base, str | ConfigDict | Mapping):
            raise UserError(f'Sweep: the base is neither FILE[:argument] nor a config, but {self.base!r}')
        if not isinstance(self.arms, Search):
            object.__setattr__(self, 'arms', as_dicts(self.arms))
