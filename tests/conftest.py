"""What every test runs under: eight CPU devices, strict ranks, a compilation cache shared by the workers."""

import os
import pathlib
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'

import jax

cache = pathlib.Path(tempfile.gettempdir()) / 'tformer-test-compilations'
jax.config.update('jax_compilation_cache_dir', str(cache))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
jax.config.update('jax_numpy_rank_promotion', 'raise')
