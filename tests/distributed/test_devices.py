"""Accelerators by name: their peaks, the layouts of their devices, and their compilers where these are installed."""

import dataclasses
import math

import pytest

import toy_hlo
from tformer import errors
from tformer.distributed import collectives, costs, devices, estimates, hlo

MESH_OF_CLUSTER = {'pipeline': 1, 'data': 4, 'fsdp': 64, 'expert': 1, 'context': 1, 'tensor': 8}


def test_published_peaks_are_those_of_the_data_sheets():
    """Of dense products: half of what the H100's sheet says of sparse ones, 1,979 and 989 teraflops."""
    found = devices.DEVICES['h100']
    assert found.flops['bfloat16'] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert found.flops['float32'] == pytest.approx(989e12 / 2, rel=2e-3)
    assert (found.memory, found.bandwidth) == (80e9, 3.35e12)
    assert (found.near, found.near_bytes, found.far_bytes) == (8, 900e9 / 2, 400e9 / 8)
    found = devices.DEVICES['v5p']
    assert found.flops['bfloat16'] == 459e12 and (found.memory, found.bandwidth) == (95 * 2**30, 2.765e12)
    assert (found.near, found.near_bytes, found.far_bytes) == (8960, 1200e9 / 2 / 3, 50e9 / 8)


def test_the_clock_makes_the_peak_with_the_matrix_units():
    """Products of 128 x 128 in each of 4 units of a v5e, and of the 2 x 4 units of a v5p, a cycle."""
    for name, units in (('v5e', 4), ('v5p', 8)):
        found = devices.DEVICES[name]
        assert found.flops['bfloat16'] == pytest.approx(2 * units * 128 * 128 * found.clock, rel=0.01)


def work(times=1, flops=0.0, moved=0.0, cycles=None):
    return costs.Work('w', '', times, flops, moved, cycles)


def test_times_at_the_peaks():
    device = devices.Device('d', 'tpu', 8e9, {'bfloat16': 100.0}, 10.0, 8, near_bytes=4.0, far_bytes=1.0)
    sent = [
        collectives.Collective('all-reduce', ('tensor',), 1, 8.0),
        collectives.Collective('all-gather', ('fsdp',), 1, 5.0, hidden=3.0),
    ]
    works = [work(flops=300.0, moved=10.0), work(times=3, moved=10.0)]
    found = estimates.times(device, 'bfloat16', works, sent, MESH_OF_CLUSTER)
    assert found == estimates.Times(compute=3.0, memory=4.0, network=8 / 4 + 5 / 1, step=(3.0 + 3 * 1.0) + 2.0 + 2.0)
    assert found.least == 7.0
    clocked = device._replace(clock=2.0)
    assert estimates.times(clocked, 'bfloat16', [work(flops=300.0, cycles=20)], (), MESH_OF_CLUSTER).step == 10.0
    waiting = [collectives.Collective('all-gather', ('tensor',), 1, 80.0, hidden=80.0)]  # longer than all other work
    assert estimates.times(device, 'bfloat16', works, waiting, MESH_OF_CLUSTER).step == 20.0


def test_the_pace_of_a_device_counts_loops_and_what_a_collective_of_axes_takes():
    """A product of 1,000 operations in each of three turns, at 100 a second."""
    device = devices.Device('d', 'tpu', 8e9, {'float32': 100.0}, 1e9, 8, near_bytes=4.0, far_bytes=1.0)
    body = """
%body (p: (f32[4,8])) -> (f32[4,8]) {
  %p = (f32[4,8]{1,0}) parameter(0)
  %y = f32[4,8]{1,0} get-tuple-element(%p), index=0
  %k = f32[5,8]{1,0} constant({...})
  %d = f32[5,4]{1,0} dot(%k, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %t = (f32[4,8]{1,0}) tuple(%y)
}
%cond (p: (f32[4,8])) -> pred[] {
  %p = (f32[4,8]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""
    thrice = 'backend_config={"known_trip_count":{"n":"3"}}'
    line = f'ROOT %w = (f32[4,8]{{1,0}}) while(%x), condition=%cond, body=%body, {thrice}'
    program = hlo.parse(toy_hlo.main(line, more=body))
    pace, main = estimates.pace(program, device, 'float32', MESH_OF_CLUSTER), program.computations['main']
    assert pace.working(main['w'], main) == pytest.approx(3 * 2 * 4 * 5 * 8 / 100)
    assert pace.speed(('tensor',), False) == 4.0 and pace.speed(('tensor',), True) == 1.0


def test_devices_that_a_fast_network_just_joins_are_near():
    device = devices.Device('d', 'tpu', 1.0, {'bfloat16': 1.0}, 1.0, near=4, near_bytes=10.0, far_bytes=1.0)
    mesh = {'data': 2, 'tensor': 4}
    near, far = (collectives.Collective('all-reduce', (axis,), 1, 20.0) for axis in ('tensor', 'data'))
    assert estimates.times(device, 'bfloat16', (), [near], mesh).network == 2
    assert estimates.times(device, 'bfloat16', (), [far], mesh).network == 20
    both = dataclasses.replace(near, axes=('data', 'tensor'))
    assert estimates.times(device, 'bfloat16', (), [both], mesh).network == 20  # as slow as the outer one
    between = dataclasses.replace(near, far=True)
    assert estimates.times(device, 'bfloat16', (), [between], mesh).network == 20  # slices are far, however small


LAYOUTS = {
    'v5e:2x4': (8, 'v5e', (2, 4), 1),
    'v5p:4x4x4:2': (128, 'v5p', (4, 4, 4), 2),
    'h100:16': (16, 'h100', (16,), 1),
    'cpu:8': (8, 'cpu', (8,), 1),
}


@pytest.mark.parametrize('text', LAYOUTS)
def test_a_target_reads_and_prints(text):
    count, kind, sizes, slices = LAYOUTS[text]
    found = devices.Target.parse(text)
    assert (found.count, found.kind, found.sizes, found.slices) == (count, kind, sizes, slices)
    assert str(found) == text


WRONG = {
    'v5': "did you mean 'v5[ep]'",
    'v5e': 'write e.g. v5e:4x4',
    'v5e:8': 'write e.g. v5e:2x4$',
    'v5p:8': 'write e.g. v5p:2x2x2',
    'v5e:2x4x2': 'write e.g. v5e:2x4$',
    'v5p:4x4': 'write e.g. v5p:4x4x1',
    'v5p:0x4x4': 'write e.g. v5p:2x4x4',
    'v5e:3x86': 'write e.g. v5e:4x4$',
    'v5e:600': 'write e.g. v5e:4x4$',
    'v5e:3x5': 'hosts of 2 x 2; write e.g. v5e:4x6',
    'v5e:1x4': 'hosts of 2 x 2',
    'v5p:1x2x2': 'hosts of 2 x 2',
    'h100:2x4': 'write e.g. h100:8',
    'h100:12': 'whole nodes of 8; write e.g. h100:16',
    'h100:8:2': 'write e.g. h100:8',
    'cpu:eight': 'write e.g. cpu:8',
    'v5e:16x32': 'a slice has at most 256 .*; for more slices write e.g. v5e:4x4:2',
}


@pytest.mark.parametrize('text', WRONG)
def test_a_target_that_there_is_not_is_refused_with_one_that_there_is(text):
    with pytest.raises(errors.UserError, match=WRONG[text]):
        devices.Target.parse(text)


def test_the_line_that_installs_a_compiler_names_the_version_of_jax():
    import jax

    assert devices.requirements('cuda')[0] == f'jax-cuda13-plugin=={jax.__version__}'
    assert 'nvidia-cudnn-cu13' in devices.requirements('cudnn')
    (tpu,) = devices.requirements('tpu')
    assert tpu.startswith('libtpu==') and math.prod(map(len, tpu.split('=='))) > 0


def test_without_a_compiler_a_line_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv(devices.COMPILERS, str(tmp_path))
    monkeypatch.setattr(devices, 'MODULES', {'tpu': ('no_such_module',), 'cuda': ('no_such_module',)})
    for platform, package in (('tpu', 'libtpu=='), ('cuda', 'jax-cuda13-pjrt==')):
        with pytest.raises(errors.UserError, match=rf'make compilers, or pip .*--target={tmp_path}.*{package}'):
            devices.prepare(platform)


def test_peaks_are_known_of_the_devices_that_jax_names_and_of_no_others():
    assert devices.KINDS.keys().isdisjoint(devices.DEVICES) and {*devices.KINDS.values()} == {*devices.DEVICES} - {
        'cpu'
    }
    assert devices.peak_flops('TPU v5 lite', 'bfloat16') == 197e12
    assert devices.peak_flops('NVIDIA H100 80GB HBM3', 'float32') == 494e12
    for kind, dtype in (('cpu', 'float32'), ('NVIDIA H100 PCIe', 'bfloat16'), ('TPU v5 lite', 'float64')):
        assert devices.peak_flops(kind, dtype) is None
