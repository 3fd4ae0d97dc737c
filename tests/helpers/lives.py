"""Real processes that run the command line, to be killed; forked from one that has imported everything but a device."""

import concurrent.futures
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jaxlib

import accelerator
from places import ROOT

# Several devices share a few busy cores.
SHARED_CORES = '--xla_cpu_collective_call_terminate_timeout_seconds=600'
XLA_FLAGS = SHARED_CORES
if jaxlib.__version__.startswith('0.10.'):  # compiles in a quarter of the time; later versions do not know the first
    XLA_FLAGS += ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
SHARED = pathlib.Path(tempfile.gettempdir()) / 'tformer-test-compilations'
CACHE = os.environ.get('TFORMER_TEST_COMPILATIONS', str(SHARED))
HANG = 600  # seconds after which a process that should have ended or come is taken for one that never will
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(
    ['lives', 'tformer.__main__', 'tformer.commands.replay', 'orbax.checkpoint', 'rich.console']
)


class Life:
    """A process that runs `tformer ARGUMENTS`; what it prints, on either stream, is in `said`.

    It first calls `before`, a function of tests/helpers/halting.py. With `optimised` XLA compiles as for users. With
    `on_chip` it runs on the accelerator of tests/helpers/accelerator.py.
    """

    def __init__(
        self,
        place: pathlib.Path,
        *arguments: object,
        devices: int = 1,
        before: Callable[[], None] | None = None,
        optimised: bool = False,
        on_chip: bool = False,
    ):
        self.log = place / f'life_{time.monotonic_ns()}.log'
        place.mkdir(parents=True, exist_ok=True)
        given = [str(x) for x in arguments], str(self.log), None if on_chip else devices, before, optimised
        self._process = CONTEXT.Process(target=_live, args=given)
        self._process.start()
        self.pid = self._process.pid or 0
        self.port: socket.socket | None = None  # that of the run, held while this object lives

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ''

    def wait(self) -> int:
        """Returns its exit code; negative where a signal ended it."""
        self._process.join(HANG)
        if self._process.exitcode is None:
            self._give_up('it does not end')
        return self._process.exitcode or 0

    def wait_for(self, sign: Callable[[], object]) -> None:
        """Waits until sign() holds, or the process has ended."""
        end = time.monotonic() + HANG
        while not sign() and self._process.is_alive():
            if time.monotonic() > end:
                self._give_up('it gives no sign')
            time.sleep(0.01)

    def _give_up(self, why: str) -> None:
        self.signal(signal.SIGKILL)  # else it would slow all other tests down
        raise AssertionError(f'{why}: {self.said[-2000:]}')

    def signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return self.wait()


def reserve_port() -> socket.socket:
    """Returns a socket that holds a free port of this host while it is open: only a server that reuses addresses, as
    process 0 of a run does, can have the port too."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(('127.0.0.1', 0))
    return held


def environment(optimised: bool = False, cached: bool = True) -> dict[str, str]:
    """The environment of a process that compiles as these tests do; with `optimised`, as for users.

    Only a process with one device may be `cached`, if it is not a command: see `compilation_cache.keep`.
    """
    cache = {'JAX_COMPILATION_CACHE_DIR': CACHE, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
    none = {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    return {
        **os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': SHARED_CORES if optimised else XLA_FLAGS,
        'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0' if optimised else '1',
        **(cache if cached else none),
    }  # fmt: skip


def compile_soon(optimised: bool = False) -> None:
    """Has jax compile without what takes long, and keep what it compiled for one device where other tests find it.

    With `optimised` it compiles as for users.
    """
    import jax

    from tformer.distributed import compilation_cache

    jax.config.update('jax_disable_most_optimizations', not optimised)  # most tests compile for longer than they run
    jax.config.update('jax_compilation_cache_dir', CACHE)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
    compilation_cache.keep()


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function returns in a process that leaves the accelerator alone."""
    with concurrent.futures.ProcessPoolExecutor(1, CONTEXT, _keep_to_cpu) as pool:
        return pool.submit(function, *args).result()


def _keep_to_cpu() -> None:
    import jax

    jax.config.update('jax_platforms', 'cpu')


def _live(
    arguments: list[str], log: str, devices: int | None, before: Callable[[], None] | None, optimised: bool
) -> None:
    with open(log, 'ab', buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, 'w', buffering=1) for number in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if devices is None:
        accelerator.begin_as_users()
    else:
        import jax

        flags = SHARED_CORES if optimised else XLA_FLAGS
        os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={devices} {flags}'
        jax.config.update('jax_platforms', 'cpu')
        compile_soon(optimised)
    from tformer import __main__ as command_line

    if before is not None:
        before()
    sys.argv = ['tformer', *arguments]
    command_line.run()
