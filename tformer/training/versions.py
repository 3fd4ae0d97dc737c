"""The versions of Python and of the packages that results depend on."""

import importlib.metadata
import platform

PACKAGES = ('tformer', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def versions() -> dict[str, str]:
    """Returns the version of Python and of each of `PACKAGES`."""
    return {'python': platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    """Returns the version of a package; tformer may run from its source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'
