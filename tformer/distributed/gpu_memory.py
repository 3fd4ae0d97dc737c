"""How much of a GPU's memory a process takes."""

import os

SHARE = 0.95  # of what is free; the rest is for CUDA and NCCL. JAX's own share is three quarters


def is_given() -> bool:
    """Returns whether the environment says how much a process takes."""
    return any(f'XLA_{name}MEM_FRACTION' in os.environ for name in ('PYTHON_CLIENT_', 'CLIENT_'))


def take() -> None:
    """Lets JAX take as much as `inspect` counts with, unless the environment says how much; before JAX starts."""
    if not is_given():
        os.environ['XLA_CLIENT_MEM_FRACTION'] = str(SHARE)
