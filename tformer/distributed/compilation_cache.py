"""JAX's persistent compilation cache in a private folder: a program that was compiled before is loaded.

JAX knows a program by its operations, its options, the devices and their compiler. The folder is of one version of JAX,
one kind of CPU, whose instructions the programs hold, and the number of its cores, over which they are split. What
JAX's own store lacks is here: files are whole or absent and have a digest, the least recently used go first, and no
fault of the disk ends a command.

JAX's own variables rule it: JAX_ENABLE_COMPILATION_CACHE=false turns it off, JAX_COMPILATION_CACHE_DIR names a
directory that JAX's store keeps instead, and JAX_COMPILATION_CACHE_MAX_SIZE is the bound in bytes.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import pathlib
import platform
import stat
import time
from typing import Any

import jax
import jaxlib
from jax._src import compilation_cache, compilation_cache_interface
from jaxlib import _jax

from tformer import atomic

BOUND = 2 << 30  # bytes, of all versions and CPUs together
_DIGEST = hashlib.sha256
_LOOKS = 64  # times that the folder is looked through while the bound is written
_ABANDONED = 3600  # seconds after which a file that is still being written belongs to a process that was killed


def keep() -> None:
    """Has this process keep and load compiled programs, where that is safe; without effect from the second call on.

    On a CPU only programs of one device are loaded: those of several do not keep the order of their collectives (JAX
    0.10.2) and may wait for ever. Programs for devices that are not here are never loaded. Several processes that run
    as one have no folder: each compiles, and none waits for another that does.
    """
    config: Any = jax.config
    load = compilation_cache.get_executable_and_time
    if hasattr(load, 'guarded') or not config.jax_enable_compilation_cache:
        return
    signature = inspect.signature(load)
    if 'executable_devices' not in signature.parameters:  # a JAX that is not known
        config.update('jax_enable_compilation_cache', False)
        return
    unsafe: set[str] = set()

    @functools.wraps(load)
    def load_if_safe(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        absent = isinstance(given['backend'], _jax.CompileOnlyPyClient)
        if absent or (given['backend'].platform == 'cpu' and len(given['executable_devices']) > 1):
            unsafe.add(given['cache_key'])
            return None, None
        return load(*args, **kwargs)

    load_if_safe.guarded = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = load_if_safe
    if config.jax_compilation_cache_dir is None and not jax.distributed.is_initialized():
        place = folder()
        bound = BOUND if config.jax_compilation_cache_max_size < 0 else config.jax_compilation_cache_max_size
        if place is None or not bound or not hasattr(compilation_cache, 'get_file_cache'):
            return
        compilation_cache.get_file_cache = lambda path: (Store(pathlib.Path(path), bound, unsafe), path)
        config.update('jax_compilation_cache_dir', str(place))
        config.update('jax_persistent_cache_enable_xla_caches', 'none')  # files that nothing here bounds
        if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
            config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def folder() -> pathlib.Path | None:
    """Returns the folder of the programs for this JAX and CPU; None where there can be none that is the user's alone.

    Who writes a program to it runs code as the user. It is below $XDG_CACHE_HOME or ~/.cache.
    """
    try:
        above = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
        place = pathlib.Path(above) / 'tformer' / 'programs'
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place / f'jax-{jax.__version__}-{jaxlib.__version__}-{_cpu()}-{cores()}'
        for each in (place, made):
            each.mkdir(mode=0o700, exist_ok=True)
        for each, others in ((place.parent, 0o002), (place, 0o022), (made, 0o022)):
            found = each.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & others:
                return None
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return made if os.access(made, os.W_OK) else None


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _cpu() -> str:
    """Returns a digest of what a compiler sees of the CPU; where the system does not tell, it is of the host's name."""
    try:
        first = pathlib.Path('/proc/cpuinfo').read_text().split('\n\n')[0].splitlines()
        names = ('vendor', 'cpu family', 'model', 'flags', 'Features', 'CPU ')
        found = [' '.join(line.split()) for line in first if line.startswith(names)]
    except OSError:
        found = []
    seen = [platform.machine(), *(found or [platform.processor(), platform.node()])]
    return _DIGEST('\n'.join(seen).encode()).hexdigest()[:16]


class Store(compilation_cache_interface.CacheInterface):
    """Programs by their keys, a file each, which is a digest and the bytes. No method raises an `OSError`."""

    def __init__(self, place: pathlib.Path, bound: int, refused: set[str]):
        """Keeps at most `bound` bytes in the folder above `place`; programs whose keys are `refused` are not kept."""
        self._path, self._bound, self._refused = place, bound, refused
        self._unseen = bound  # bytes that were written since the folder was looked through; at first by others

    def get(self, key: str) -> bytes | None:
        """Returns the program of a key; None where there is none, or its file is not as it was written."""
        file = self._file(key)
        with contextlib.suppress(OSError):
            found = file.read_bytes()
            digest, program = found[: _DIGEST().digest_size], found[_DIGEST().digest_size :]
            if _DIGEST(program).digest() == digest:
                with contextlib.suppress(OSError):
                    os.utime(file)
                return program
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps the program of a key if it fits, and deletes the least recently used ones beyond the bound."""
        if key in self._refused or len(value) > self._bound:
            return
        with contextlib.suppress(OSError):
            atomic.write(self._file(key), _DIGEST(value).digest() + value)
            self._unseen += len(value)
            if self._unseen >= self._bound / _LOOKS:  # a look at tens of thousands of files takes seconds
                self._evict()
                self._unseen = 0

    def _file(self, key: str) -> pathlib.Path:
        return self._path / key[-100:]  # a key ends with its digest

    def _evict(self) -> None:
        files = []
        for file in self._path.parent.glob('*/*'):
            with contextlib.suppress(OSError):  # another process has deleted it
                found = file.stat()
                if file.suffix == '.tmp' and found.st_mtime < time.time() - _ABANDONED:
                    file.unlink()
                else:
                    files.append((found.st_mtime_ns, found.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self._bound:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size
