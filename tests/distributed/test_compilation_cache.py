"""Compiled programs that are kept on disk: whole files, a bound, a private folder; and what may be loaded."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import compiling
import lives
from places import ROOT
from tformer.distributed import compilation_cache
from tformer.distributed.compilation_cache import Store


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / 'programs' / 'here').mkdir(parents=True)
    return tmp_path / 'programs' / 'here'


def fill(store: Store, keys: str, size: int = 100) -> None:
    """Puts a program for each letter, each used later than the one before."""
    for age, key in enumerate(keys):
        store.put(key, key.encode() * size)
        if (file := store._file(key)).exists():
            os.utime(file, (1e9 + age, 1e9 + age))


@pytest.mark.parametrize('damage', [lambda x: x[:-1], lambda x: x[:20], lambda x: b'', lambda x: x[:-1] + b'!'])
def test_a_damaged_program_is_none_and_is_kept_anew(place: pathlib.Path, damage) -> None:
    store, program = Store(place, 1000, set()), bytes(range(256))
    store.put('jit_step-1', program)
    assert store.get('jit_step-1') == program
    (file,) = place.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert store.get('jit_step-1') is None and not file.exists()
    store.put('jit_step-1', program)
    assert store.get('jit_step-1') == program


def test_the_least_recently_used_programs_go_first(place: pathlib.Path) -> None:
    older = place.parent / 'an older version'
    older.mkdir()
    (older / 'z').write_bytes(bytes(50))
    os.utime(older / 'z', (1e9 - 9, 1e9 - 9))
    store = Store(place, 430, set())
    fill(store, 'abc')  # 132 bytes each
    assert not (older / 'z').exists() and all(map(store.get, 'abc'))
    fill(store, 'abc')
    assert store.get('a')  # now used later than b
    store.put('d', b'd' * 100)
    assert [key for key in 'abcd' if store.get(key)] == ['a', 'c', 'd']
    store.put('e', bytes(500))  # larger than all that is kept
    assert store.get('e') is None and store.get('d')


def test_a_large_folder_is_seldom_looked_through(place: pathlib.Path, monkeypatch) -> None:
    store, looks, real = Store(place, 16_000, set()), [], Store._evict
    monkeypatch.setattr(Store, '_evict', lambda self: (looks.append(0), real(self)))
    for number in range(300):
        store.put(str(number), bytes(100))
        if number == 90:
            assert len(looks) == 1 + 30  # at first, and after each 250 bytes
    assert 15_000 < sum(file.stat().st_size for file in place.iterdir()) <= 16_000 + 3 * 132


def test_what_a_killed_process_was_writing_goes(place: pathlib.Path) -> None:
    for name, age in (('old.tmp', 2 * compilation_cache._ABANDONED), ('new.tmp', 0)):
        (place / name).write_bytes(b'half')
        then = (place / name).stat().st_mtime - age
        os.utime(place / name, (then, then))
    Store(place, 1000, set()).put('a', b'a')
    assert sorted(file.name for file in place.iterdir()) == ['a', 'new.tmp']


def test_a_disk_that_takes_nothing_and_a_refused_program_are_no_error(place: pathlib.Path) -> None:
    gone = Store(place / 'gone', 1000, set())
    gone.put('a', b'a')
    assert gone.get('a') is None
    store = Store(place, 1000, {'a'})
    store.put('a', b'a')
    store.put('x' * 300, b'long')  # a name that no file can have
    assert store.get('a') is None and store.get('x' * 300) == b'long'


def test_the_folder_is_the_users_alone(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    made = compilation_cache.folder()
    assert made is not None and made.parent == tmp_path / 'tformer' / 'programs'
    assert made.name.startswith(f'jax-{jax.__version__}-') and made == compilation_cache.folder()
    assert [place.stat().st_mode & 0o777 for place in (made, made.parent)] == [0o700, 0o700]
    made.parent.chmod(0o770)  # others could put their programs there
    assert compilation_cache.folder() is None
    made.parent.chmod(0o700)
    made.rmdir()
    made.symlink_to(tmp_path)
    assert compilation_cache.folder() is None
    monkeypatch.setattr(os, 'getuid', lambda: made.lstat().st_uid + 1)
    made.unlink()
    assert compilation_cache.folder() is None  # another's
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert compilation_cache.folder() is None


def test_another_cpu_has_another_folder(monkeypatch) -> None:
    here = compilation_cache._cpu()
    assert here == compilation_cache._cpu()
    text = 'processor : 0\nmodel name : A\ncpu MHz : {}\nflags : sse {}\n\nprocessor : 1\n'
    found = []
    for mhz, flag in ((1, 'avx2'), (2, 'avx2'), (2, 'avx512f')):
        monkeypatch.setattr(pathlib.Path, 'read_text', lambda self, given=text.format(mhz, flag): given)
        found.append(compilation_cache._cpu())
    assert found[0] == found[1] != found[2]


def test_another_number_of_cores_has_another_folder(tmp_path: pathlib.Path, monkeypatch) -> None:
    """XLA splits the operations of a CPU's program over the cores that it sees as it compiles."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    folders = set()
    for number in (1, 2):
        monkeypatch.setattr(os, 'sched_getaffinity', lambda process, number=number: set(range(number)), raising=False)
        folders.add(compilation_cache.folder())
    assert len(folders) == 2 and None not in folders


# ----------------------------------------------------------------------------------------------------- processes
COMPILE = """
import sys, warnings
import jax, numpy as np
from jax import monitoring
from tformer.distributed import compilation_cache
warnings.simplefilter('error')
loaded = []
monitoring.register_event_listener(lambda event, **_: loaded.append(event) if event.endswith('cache_hits') else None)
compilation_cache.keep()
compilation_cache.keep()
x = np.arange(8.0, dtype=np.float32)
if len(jax.devices()) > 1:
    mesh = jax.make_mesh((len(jax.devices()),), ('x',))
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x')))
y = jax.jit(lambda x: (x * x).sum() + 1)(x)
print(float(y), len(loaded))
"""


def as_users(home: pathlib.Path) -> dict[str, str]:
    """The environment of a process that keeps programs where users' commands do."""
    tests = lives.environment()
    return {name: tests[name] for name in tests if '_CACHE_' not in name} | {'XDG_CACHE_HOME': str(home)}


def compiled(home: pathlib.Path, devices: int = 1, **environment: str) -> list[str]:
    """Returns the result and the number of loaded programs of a process."""
    env = as_users(home) | {
        'XLA_FLAGS': f'{lives.XLA_FLAGS} --xla_force_host_platform_device_count={devices}',
        **environment,
    }
    command = [sys.executable, '-c', COMPILE]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=lives.HANG)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def files(home: pathlib.Path) -> list[pathlib.Path]:
    return [file for file in home.rglob('*') if file.is_file()]


@pytest.mark.proof
def test_programs_of_one_device_are_loaded_and_damaged_ones_compiled_again(tmp_path: pathlib.Path) -> None:
    off = compiled(tmp_path, JAX_ENABLE_COMPILATION_CACHE='false')
    assert off == ['141.0', '0'] and not files(tmp_path)
    assert compiled(tmp_path) == ['141.0', '0']
    kept = files(tmp_path)
    assert compiled(tmp_path) == ['141.0', str(len(kept))] and kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:-100])
    assert compiled(tmp_path) == ['141.0', '0']
    assert compiled(tmp_path) == ['141.0', str(len(kept))]
    own = {
        'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'own'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    assert compiled(tmp_path, **own) == ['141.0', '0'] and files(tmp_path / 'own')
    assert len(files(tmp_path / 'tformer')) == len(kept)


@pytest.mark.proof
def test_programs_of_several_cpu_devices_are_neither_kept_nor_loaded(tmp_path: pathlib.Path) -> None:
    assert compiled(tmp_path, devices=2) == ['141.0', '0']
    names = [file.name for file in files(tmp_path)]
    assert not [name for name in names if 'lambda' in name]
    assert compiled(tmp_path, devices=2) == ['141.0', str(len(names))]


@pytest.mark.proof(sampled=False)
@pytest.mark.parametrize('device', compiling.TARGETS)
def test_programs_for_absent_devices_are_neither_kept_nor_loaded(tmp_path: pathlib.Path, device) -> None:
    if not compiling.installed(device):
        pytest.skip(f'the compiler for {device} is not installed: make compilers')
    model = ['--config=configs/lm_stdlib.py:smoke', '--config.model.vocab_size=64', '--config.mesh.data=8']
    command = [sys.executable, '-m', 'tformer', 'inspect', f'--device={device}', '--json', *model]
    for _ in range(2):
        ran = subprocess.run(
            command, cwd=ROOT, env=as_users(tmp_path), capture_output=True, text=True, timeout=lives.HANG
        )
        assert ran.returncode == 0 and json.loads(ran.stdout)['program'] == 'train step'
        assert [line.split()[0] for line in ran.stderr.splitlines()] == ['compiling', 'compiled']
    assert not files(tmp_path)


@pytest.mark.proof
def test_training_from_loaded_programs_has_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Cold, warm, and with every program damaged."""

    def trained(name: str) -> dict[str, bytes]:
        more = ['--config.train.num_steps=6', '--config.train.log_every=2', '--config.evaluate.samples=0']
        command = [
            *(sys.executable, '-m', 'tformer', 'train', '--config=configs/lm_stdlib.py:smoke', *more),
            f'--workdir={tmp_path / name}',
        ]
        ran = subprocess.run(command, cwd=ROOT, env=as_users(tmp_path), capture_output=True, timeout=lives.HANG)
        assert ran.returncode == 0, ran.stderr
        rows = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
        found = [{key: x for key, x in row.items() if not key.endswith(('per_second', 'mfu'))} for row in rows]
        result = json.loads((tmp_path / name / 'result.json').read_text())
        return {**arrays(tmp_path / name), 'metrics': json.dumps([found, result['test']]).encode()}

    cold = trained('cold')
    kept = {file: file.read_bytes() for file in files(tmp_path / 'tformer')}
    assert trained('warm') == cold and len(cold) > 10
    assert {file: file.read_bytes() for file in files(tmp_path / 'tformer')} == kept  # nothing was compiled
    for file in kept:
        file.write_bytes(kept[file][: len(kept[file]) // 2])
    assert trained('damaged') == cold


def arrays(workdir: pathlib.Path) -> dict[str, bytes]:
    """Returns the bytes of each array of a run's last checkpoint."""
    from tformer.training import checkpoint

    found, _ = checkpoint.load_variables(workdir, 'latest')
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in jax.tree.leaves_with_path(found)}
