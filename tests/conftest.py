"""What every test runs under: eight CPU devices, strict ranks, a compilation cache shared by the workers.

`make accelerator` runs the tests marked `accelerator` on the devices that JAX finds, compiled as for users.
"""

import collections
import contextlib
import gc
import os
import pathlib
import shutil
import tempfile

import accelerator
import lives
import shares

if accelerator.MODE == 'chip':
    accelerator.share()
else:
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    os.environ['XLA_FLAGS'] = ' '.join(
        [os.environ.get('XLA_FLAGS', ''), '--xla_force_host_platform_device_count=8', lives.XLA_FLAGS]
    )
os.environ['AWS_ENDPOINT_URL'] = 'http://127.0.0.1:1'  # no test asks a store of the network
os.environ['TFORMER_CACHE'] = tempfile.mkdtemp(prefix='tformer-test-cache-')

import jax
import pytest

with contextlib.suppress(ModuleNotFoundError):  # an interpreter for `make accelerator` need not have it
    import hypothesis

    hypothesis.settings.register_profile('tests', deadline=None, derandomize=True)  # cores are shared
    hypothesis.settings.load_profile('tests')
if accelerator.MODE != 'chip':
    lives.compile_soon()
jax.config.update('jax_numpy_rank_promotion', 'raise')

SECONDS = collections.defaultdict(lambda: collections.defaultdict(float))


def pytest_unconfigure():
    shutil.rmtree(os.environ['TFORMER_CACHE'], ignore_errors=True)


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not go through it again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


MOST_MAPPED = 30_000  # of the 65,530 that Linux allows by itself; beyond them the compiler crashes
HELD = [0.0]  # bytes that remained when programs were last let go


@pytest.fixture(scope='module', autouse=True)
def room():
    """A process that holds many programs lets them go before the next file."""
    yield
    if resident() > max(3e9, HELD[0] + 1.5e9) or mapped() > MOST_MAPPED:
        jax.clear_caches()
        gc.collect()
        HELD[0] = resident()


def resident() -> float:
    """Returns the bytes of memory that this process has."""
    return int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def mapped() -> int:
    """Returns the regions of memory that this process has: a compiled program takes some fifteen."""
    return pathlib.Path('/proc/self/maps').read_bytes().count(b'\n')


def pytest_addoption(parser):
    parser.addoption('--store-shares', action='store_true', help='store the share of the time that each file takes')
    parser.addoption('--sample', type=int, default=1, help='run the first of every so many proofs of a file')


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """The longest files come first, so that no worker ends alone; the tests of one case stand together."""
    for item in items:
        for kind in ('slow', 'proof'):
            if any(item.callspec.id in mark.args for mark in item.iter_markers(f'{kind}_cases')):
                item.add_marker(kind)
        if item.get_closest_marker('proof'):
            item.add_marker('slow')
    sample(config, items)
    for item in items if accelerator.MODE is None else ():
        if item.get_closest_marker('accelerator'):
            item.add_marker(pytest.mark.skip(reason='no accelerator: make accelerator runs these'))
    allowed = shares.load()
    longest = collections.Counter()
    for files in allowed.values():
        longest.update(files)
    places = {}

    def place(item):
        file = item.location[0]
        case = item.callspec.params.get('case') if hasattr(item, 'callspec') else None
        first = places.setdefault((file, case if isinstance(case, str) else id(item)), len(places))
        return -longest[file], file, first

    items.sort(key=place)


def sample(config, items):
    """Leaves out proofs as `--sample` asks: which ones depends on their order in their file alone."""
    of_file = collections.Counter()
    left_out = []
    for item in items if config.option.sample > 1 else ():
        if proof := item.get_closest_marker('proof'):
            sampled = proof.kwargs.get('sampled', True)
            if not sampled or of_file[item.location[0]] % config.option.sample:
                left_out.append(item)
            of_file[item.location[0]] += sampled
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_runtest_logreport(report):
    kind = next((kind for kind in ('proof', 'slow') if kind in report.keywords), 'quick')
    SECONDS[kind][report.location[0]] += report.duration


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption('--store-shares'):
        shares.store(SECONDS)
    elif (
        config.option.sample == 1 and sum(map(len, SECONDS.values())) > len(shares.load()['quick']) // 2
    ):  # of most files
        for line in shares.outgrown(SECONDS, shares.load()):
            terminalreporter.write_line(f'tests: {line}')
