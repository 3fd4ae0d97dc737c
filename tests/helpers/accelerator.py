"""The accelerator of the tests marked `accelerator`.

As a script it names the accelerator and prints pytest's options for it, or says that there is none.

$TFORMER_ACCELERATOR is `chip` in `make accelerator`, and `cpu` in its rehearsal, where the CPU stands for the chip.
"""

import importlib.util
import os
import platform
import sys
from collections.abc import Callable

MODE = os.environ.get('TFORMER_ACCELERATOR')  # chip, cpu, or None: there is none
assert MODE in (None, 'chip', 'cpu'), f'TFORMER_ACCELERATOR={MODE} is neither chip nor cpu'
DETERMINISTIC = '--xla_gpu_deterministic_ops=true'  # docs/how-to/reliability.md


def share() -> None:
    """Lets several processes use the accelerator, and the CPU beside it; called before JAX is imported.

    Of a program that runs once, timing each of its products in many ways would take most of the time.
    """
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_gpu_autotune_level=0'
    asked = os.environ.get('JAX_PLATFORMS')
    if asked and 'cpu' not in asked.split(','):
        os.environ['JAX_PLATFORMS'] = f'{asked},cpu'


def begin_as_users() -> None:
    """Prepares a process of a run: on a chip, operations with the same bits every time; else as the other tests."""
    import jax

    import lives

    if MODE == 'chip':
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DETERMINISTIC}'
        return
    jax.config.update('jax_platforms', 'cpu')
    os.environ['XLA_FLAGS'] = lives.XLA_FLAGS
    lives.compile_soon()


def highest_precision(then: Callable[[], None] | None = None) -> None:
    """Multiplies float32 as float32, where accelerators round the factors by default; then calls `then`."""
    import jax

    jax.config.update('jax_default_matmul_precision', 'highest')
    if then is not None:
        then()


def lacking() -> list[str]:
    """Returns the modules that this interpreter lacks of those that the tests and timings import."""
    found = []
    for name in ('pytest', 'flax', 'optax', 'orbax.checkpoint', 'ml_collections', 'array_record', 'grain'):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            found.append(str(error.name))
    return found


def processes(backend: str) -> str:
    """Returns pytest's options for its processes: of a GPU, which several may use, three, where pytest-xdist is."""
    several = backend == 'gpu' and importlib.util.find_spec('xdist') is not None
    return '-n 3' if several else ''


def main() -> str | None:
    """Says which devices JAX finds, and prints pytest's options for them; returns a line on what is missing."""
    if MODE == 'cpu':
        os.environ['JAX_PLATFORMS'] = 'cpu'
    share()
    missing = lacking()
    if missing:
        return f'accelerator: {sys.executable} lacks {", ".join(missing)}; give another interpreter as PYTHON='
    import jax

    if MODE == 'chip' and jax.default_backend() == 'cpu':
        return f'accelerator: the JAX of {sys.executable} finds none; give an interpreter with its plugin as PYTHON='
    kinds = ', '.join(sorted({device.device_kind for device in jax.devices()}))
    versions = f'jax {jax.__version__}, Python {platform.python_version()}'
    print(f'accelerator: {jax.device_count()} x {kinds}, {versions}', file=sys.stderr, flush=True)
    print(processes(jax.default_backend()))
    return None


if __name__ == '__main__':
    line = main()
    if line is not None:
        print(line, file=sys.stderr)
        sys.exit(2)
