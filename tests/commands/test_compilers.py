"""Each strategy and family, compiled by a TPU's and a GPU's own compiler; skipped where they are not installed.

`make compilers` installs them.
"""

import json
import os
import subprocess
import sys

import pytest

import ahead
import ahead_attention
from lives import HANG
from places import HELPERS, ROOT
from tformer.distributed import devices

pytestmark = pytest.mark.slow

TARGETS = ['v5e:2x4', 'h100:8']
CASES = [(mesh, family) for mesh in ahead.MESHES for family in ahead.OBJECTIVES]

# mesh -> what devices along which axes exchange, whatever else they do
EXPECTED = {
    'data': {('all-reduce', 'data')},
    'fsdp': {('all-gather', 'fsdp'), ('reduce-scatter', 'fsdp')},
    'tensor': {('all-reduce', 'tensor'), ('all-reduce', 'data')},
    'sequence': {('all-gather', 'tensor'), ('reduce-scatter', 'tensor'), ('all-reduce', 'data')},
    'context': {('collective-permute', 'context'), ('all-reduce', 'data+context')},
    'pipeline': {('collective-permute', 'pipeline'), ('all-reduce', 'data')},
    'expert': {('all-gather', 'expert'), ('reduce-scatter', 'expert'), ('all-reduce', 'data+expert')},
}


def compiled(device, helper):
    """Returns what a helper's process, which sees the compiler of a device, prints: a row for each case."""
    target = devices.Target.parse(device)
    parts = ('cuda', 'cudnn') if target.device.platform == 'cuda' else ('tpu',)
    folders = [devices.folder(part) for part in parts]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip(f'the compiler of {target} is not installed: make compilers')
    path = os.pathsep.join(map(str, [ROOT, folders[0]]))  # JAX looks for its plugin of GPUs when it is imported
    ran = subprocess.run(
        [sys.executable, str(HELPERS / helper), device],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': path, 'XLA_FLAGS': ''},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return list(map(json.loads, ran.stdout.splitlines()))


@pytest.fixture(scope='module', params=TARGETS)
def programs(request):
    """The figures of every case, by mesh and family, from one process that sees the compiler."""
    return {(row['case'], row['family']): row for row in compiled(request.param, 'ahead.py')}


@pytest.mark.parametrize(('mesh', 'family'), CASES)
def test_a_strategy_exchanges_what_its_papers_say_along_its_own_axes(programs, mesh, family):
    row = programs[mesh, family]
    found = {(each['kind'], '+'.join(each['axes'])): each['bytes'] for each in row['collectives']}
    assert found.keys() >= EXPECTED[mesh]
    own = {axis for axis, size in row['mesh'].items() if size > 1}
    assert {axis for _, axes in found for axis in axes.split('+')} <= own


@pytest.mark.parametrize(('mesh', 'family'), CASES)
def test_a_device_holds_its_share_and_nothing_gathers_all_parameters(programs, mesh, family):
    row, alone = programs[mesh, family], programs['data', family]
    assert row['peak_bytes'] < (3 if mesh == 'expert' else 2) * alone['peak_bytes']  # eight feed-forwards for one
    ways = {'fsdp': 8, 'tensor': 4, 'sequence': 4}.get(mesh, 1)
    assert row['held']['parameters'] <= 1.1 * alone['held']['parameters'] / ways or mesh == 'expert'
    gathered = sum(each['bytes'] for each in row['collectives'] if each['kind'] == 'all-gather')
    if mesh not in ('fsdp', 'sequence', 'expert'):  # these gather layers, tokens, and choices
        assert gathered < 0.1 * alone['held']['parameters']


def test_a_layout_that_a_compiler_does_not_know_is_a_line(programs):
    code = (
        'import sys\nfrom tformer.distributed import devices\nfrom tformer.commands import dry_run\n'
        'from tformer.errors import UserError\ntarget = devices.Target.parse(sys.argv[1])\ndry_run.pretend(1)\n'
        'devices.prepare("tpu")\ntry:\n    target.devices()\nexcept UserError as error:\n    print(error)\n'
    )
    if not devices.folder('tpu').is_dir():
        pytest.skip('the compiler of TPUs is not installed: make compilers')
    ran = subprocess.run(
        [sys.executable, '-c', code, 'v5e:3x5'], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert ran.stdout.startswith('--device=v5e:3x5: ') and ran.stdout.count('\n') == 1, ran.stderr


KERNELS = {  # by whether rows are packed, and on the axis `context`
    'v5e:2x4': ('tpu_custom_call splash_mha_fwd', 'tpu_custom_call splash_mha_fwd', 'tpu_custom_call splash_mha_fwd'),
    'h100:8': ('__cudnn$fmha', '__gpu$xla.gpu.triton', '__gpu$xla.gpu.triton'),
}


@pytest.fixture(scope='module', params=TARGETS)
def attention(request):
    """The device, and the figures of attention on long rows by mesh, length and batching."""
    rows = compiled(request.param, 'ahead_attention.py')
    return request.param, {tuple(row['case']): row for row in rows}


@pytest.mark.parametrize('case', ahead_attention.CASES)
def test_attention_is_the_platforms_kernel_and_makes_nothing_of_two_lengths(attention, case):
    device, rows = attention
    row, (mesh, _, batching) = rows[case], case
    name = KERNELS[device][2 if mesh == 'context' else batching == 'pack']
    assert any(kernel.startswith(name) for kernel in row['kernels']), row['kernels']
    assert row['squares'] == []


def test_memory_of_attention_is_linear_in_the_length(attention):
    _, rows = attention
    short, long = (rows['data', length, 'pack'] for length in (8192, 32768))
    assert long['peak'] - long['held'] < 1.1 * 4 * (short['peak'] - short['held'])
