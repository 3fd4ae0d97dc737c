"""Config fields that have another name now: files of earlier versions are read by this table."""

RENAMED = {  # old dotted name -> the name now
    'optimizer.rate_factors': 'optimizer.lr_multipliers',
    'optimizer.decayed': 'optimizer.decayed_roles',
    'mesh.rounds': 'mesh.pipeline_repeats',
    'mesh.slices': 'mesh.dcn_axis',
}


def current(field: str) -> str:
    """Returns the name that a dotted field has now."""
    return RENAMED.get(field, field)
