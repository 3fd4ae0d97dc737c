"""Config fields that have another name now: files of earlier versions are read by this table."""

from collections.abc import Mapping
from typing import Any

RENAMED = {  # old dotted name -> the name now
    'optimizer.rate_factors': 'optimizer.lr_multipliers',
    'optimizer.decayed': 'optimizer.decayed_roles',
    'mesh.rounds': 'mesh.pipeline_repeats',
    'mesh.slices': 'mesh.dcn_axis',
}


def sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dicts of a config with the names that its fields have now."""
    renamed = dict(tree)
    for old, new in RENAMED.items():
        (section, was), (_, now) = old.split('.'), new.split('.')
        fields = renamed.get(section)
        if isinstance(fields, Mapping) and was in fields:
            renamed[section] = {now if name == was else name: value for name, value in fields.items()}
    return renamed


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dotted fields and their values with the names that the fields have now."""
    return {RENAMED.get(name, name): value for name, value in values.items()}
