"""What every test runs under: eight CPU devices, strict ranks, a compilation cache shared by the workers."""

import atexit
import os
import shutil
import tempfile

import lives

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = ' '.join(
    [os.environ.get('XLA_FLAGS', ''), '--xla_force_host_platform_device_count=8', lives.SHARED_CORES]
)
os.environ['TFORMER_CACHE'] = tempfile.mkdtemp(prefix='tformer-test-cache-')
atexit.register(shutil.rmtree, os.environ['TFORMER_CACHE'], ignore_errors=True)

import hypothesis  # noqa: E402
import jax  # noqa: E402

hypothesis.settings.register_profile('tests', deadline=None)  # cores are shared
hypothesis.settings.load_profile('tests')
lives.compile_soon()
jax.config.update('jax_numpy_rank_promotion', 'raise')
