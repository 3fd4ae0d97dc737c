"""Each strategy and family, compiled by a TPU's and a GPU's own compiler; skipped where they are not installed.

`make compilers` installs them.
"""

import functools
import itertools
import subprocess
import sys

import jax
import pytest

import ahead
import ahead_attention
import ahead_generation
import ahead_heads
import ahead_recurrent
import ahead_steps
import ahead_vocabulary
import compiling
import fingerprints
from lives import HANG
from places import ROOT
from tformer.distributed import devices

IN_CI = set(zip(ahead.MESHES, itertools.cycle(ahead.OBJECTIVES)))  # each mesh in one family
PROOF = pytest.mark.proof(sampled=False)
CASES = [pytest.param(*case, marks=pytest.mark.slow if case in IN_CI else PROOF) for case in ahead.CASES]
FAMILIES = [pytest.param(name, marks=PROOF if name != 'encoder' else pytest.mark.slow) for name in ahead.OBJECTIVES]

# mesh -> what devices along which axes exchange, whatever else they do
EXPECTED = {
    'data': {('all-reduce', 'data')},
    'fsdp': {('all-gather', 'fsdp'), ('reduce-scatter', 'fsdp')},
    'tensor': {('all-reduce', 'tensor'), ('all-reduce', 'data')},
    'sequence': {('all-gather', 'tensor'), ('reduce-scatter', 'tensor'), ('all-reduce', 'data')},
    'context': {
        *(('collective-permute', 'context'), ('all-gather', 'context'), ('reduce-scatter', 'context')),
        ('all-reduce', 'data'),
    },
    'pipeline': {('collective-permute', 'pipeline'), ('all-reduce', 'data')},
    'expert': {('all-gather', 'expert'), ('reduce-scatter', 'expert'), ('all-reduce', 'data')},
    'capacity': {
        *(('all-to-all', 'expert'), ('all-gather', 'expert'), ('reduce-scatter', 'expert')),
        ('all-reduce', 'data'),
    },
}


def skip_without(device):
    if not compiling.installed(device):
        pytest.skip(f'the compiler of {device} is not installed: make compilers')


@functools.cache
def compiled(device, helper):
    """Returns what a helper's process, which sees the compiler of a device, prints: a row for each case."""
    skip_without(device)
    return compiling.rows(device, helper)


@pytest.fixture(scope='module', params=compiling.TARGETS)
def program(request):
    """Returns the figures of a mesh and a family, compiled when they are asked for."""
    skip_without(request.param)
    with compiling.asked(request.param) as row:
        yield row


@pytest.mark.parametrize(('mesh', 'family'), CASES)
def test_a_program_is_what_it_was(program, mesh, family):
    """A change that is meant is stored: python tests/helpers/fingerprints.py."""
    row = program(mesh, family)
    stored = fingerprints.load().get(row['device'])
    if stored is None:
        pytest.skip(f'no fingerprints of programs by the compiler of {row["device"]} that jax {jax.__version__} names')
    assert fingerprints.changes(stored[f'{mesh} {family}'], fingerprints.fingerprint(row)) == []


@pytest.mark.parametrize(('mesh', 'family'), CASES)
def test_a_strategy_exchanges_what_its_papers_say_along_its_own_axes(program, mesh, family):
    row = program(mesh, family)
    found = {(each['kind'], '+'.join(each['axes'])): each['bytes'] for each in row['collectives']}
    assert found.keys() >= EXPECTED[mesh]
    own = {axis for axis, size in row['mesh'].items() if size > 1}
    assert {axis for _, axes in found for axis in axes.split('+')} <= own


@pytest.mark.parametrize(('mesh', 'family'), CASES)
def test_a_device_holds_its_share_and_nothing_gathers_all_parameters(program, mesh, family):
    row, alone = program(mesh, family), program('data', family)
    experts = mesh in ahead.EXPERTS
    assert row['peak_bytes'] < (3 if experts else 2) * alone['peak_bytes']  # eight feed-forwards for one
    ways = {'fsdp': 8, 'tensor': 4, 'sequence': 4, 'context': 4}.get(mesh, 1)
    assert row['held']['parameters'] <= 1.1 * alone['held']['parameters'] / ways or experts
    gathered = sum(each['bytes'] for each in row['collectives'] if each['kind'] == 'all-gather')
    if mesh in ('data', 'tensor'):  # others gather layers, tokens, or rows
        assert gathered < 0.1 * alone['held']['parameters']


@pytest.mark.parametrize('family', FAMILIES)
def test_a_pipeline_takes_little_more_memory_than_fsdp(program, family):
    """Also where its devices have two rows each; but for what `data` beside it holds twice."""
    pipeline, fsdp = program('pipeline', family), program('fsdp', family)
    more = sum(pipeline['held'].values()) - sum(fsdp['held'].values())
    assert pipeline['peak_bytes'] - more < 1.2 * fsdp['peak_bytes']


@pytest.mark.parametrize('family', FAMILIES)
def test_each_token_is_multiplied_by_its_own_experts_alone(program, family):
    """Of eight there are two, in three products each; XLA by itself multiplies by all eight."""
    row = program('expert', family)
    assert row['flops'] < 1.2 * row['model_flops']
    assert sum(count for name, count in row['kernels'].items() if 'grouped' in name or 'triton' in name) >= 6 * 4


@pytest.mark.slow
def test_a_layer_sums_its_gradients_of_what_an_encoder_says_at_most_once(program):
    """Those of keys and values together; an encoder's layer has two sums forwards and two backwards, a decoder's three
    of each besides; embeddings and logits have three. Some compilers have one of an encoder's for all layers."""
    row, layers = program('tensor', 'encoder_decoder'), 4
    one = 2 * 3 / 4 * 8 * 256 * 256 * 2  # what a device sends to sum the stream of its eight rows, in two bytes
    (sent,) = (each['bytes'] for each in row['collectives'] if each['axes'] == ['tensor'] and 'reduce' in each['kind'])
    assert sent < (layers * (2 + 2 + 3 + 3 + 1) + 3 + 0.1) * one


@pytest.fixture(scope='module')
def slices():
    """Returns the figures of two slices and a family, compiled when they are asked for."""
    skip_without('v5e:2x4:2')
    with compiling.asked('v5e:2x4:2') as row:
        yield functools.partial(row, 'slices')


@pytest.mark.parametrize('family', FAMILIES)
def test_between_slices_go_the_sums_of_what_a_slice_holds_and_nothing_else(slices, family):
    """Each of two slices sends a device's eighth of the gradients once, 2 (n - 1) / n, in two or four bytes each."""
    row = slices(family)
    (across,) = (each for each in row['collectives'] if each['far'] or 'data' in each['axes'])
    assert (across['kind'], across['axes'], across['far']) == ('all-reduce', ['data'], True)
    assert 0.5 < across['bytes'] / row['held']['parameters'] < 1.1


def made(*layouts):
    """Returns how many devices each layout has by the compiler of TPUs, or the line that refuses it."""
    code = (
        'import sys\nfrom tformer.distributed import devices\nfrom tformer.commands.planning import dry_run\n'
        'from tformer.errors import UserError\ndry_run.pretend(1)\ndevices.prepare("tpu")\n'
        'for layout in sys.argv[1:]:\n    kind, _, sizes = layout.partition(":")\n'
        '    try:\n        print(len(devices.Target(kind, tuple(map(int, sizes.split("x")))).devices()))\n'
        '    except UserError as error:\n        print(error)\n'
    )
    if not devices.folder('tpu').is_dir():
        pytest.skip('the compiler of TPUs is not installed: make compilers')
    ran = subprocess.run([sys.executable, '-c', code, *layouts], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    return ran.stdout.splitlines()


@pytest.mark.slow
def test_a_layout_that_a_compiler_does_not_know_is_a_line():
    (line,) = made('v5e:3x5')
    assert line.startswith('--device=v5e:3x5: ')


@pytest.mark.slow
def test_a_layout_may_be_a_single_chip():
    assert made('v5e:1x1', 'v6e:1x1', 'v5p:1x1x1', 'v5p:2x2x4') == ['1', '1', '1', '16']


@PROOF
@pytest.mark.parametrize('device', ['v5e:1x1', 'v5p:1x1x1', 'v6e:1x1'])
def test_a_large_product_takes_by_the_compiler_a_little_longer_than_at_the_peak(device):
    (row,) = compiled(device, 'ahead_product.py')
    assert 1 < row['seconds'] / row['at_peak'] < 1.2


KERNELS = {  # of rows that are padded, and that are packed or on the axis `context`, and with dropout or a bias
    'v5e:2x4': ('tpu_custom_call splash_mha_fwd', 'tpu_custom_call splash_mha_fwd', 'tpu_custom_call attention_fwd'),
    'h100:8': ('__cudnn$fmha', '__gpu$xla.gpu.triton', '__gpu$xla.gpu.triton'),
}


@pytest.fixture(scope='module', params=compiling.TARGETS)
def attention(request):
    """The device, and the figures of attention on long rows by mesh, length, batching and dropout rate."""
    rows = compiled(request.param, 'ahead_attention.py')
    return request.param, {tuple(row['case']): row for row in rows}


@PROOF
@pytest.mark.parametrize('case', ahead_attention.CASES)
def test_attention_is_the_platforms_kernel_and_makes_nothing_of_two_lengths(attention, case):
    device, rows = attention
    row, (mesh, _, batching, rate, position) = rows[case], case
    name = KERNELS[device][2 if rate or position != 'rope' else batching == 'pack' or mesh == 'context']
    assert any(kernel.startswith(name) for kernel in row['kernels']), row['kernels']
    assert row['squares'] == []


@PROOF
def test_heads_that_the_mesh_does_not_divide_have_their_kernels_on_every_device(attention):
    device, rows = attention
    name = 'tpu_custom_call attention_fwd' if device.startswith('v5e') else '__cudnn$fmha'
    assert any(kernel.startswith(name) for kernel in rows[ahead_attention.UNEVEN]['kernels'])


@PROOF
@pytest.mark.parametrize(('rate', 'position'), [(0.0, 'rope'), (0.1, 'rope'), (0.1, 'relative')])
def test_memory_of_attention_is_linear_in_the_length(attention, rate, position):
    """Four times the length takes four times the memory; a TPU keeps arrays of up to some megabytes on the chip, where
    they do not count, so there the short rows take less than a fourth."""
    device, rows = attention
    short, long = (rows['data', length, 'pack', rate, position] for length in (8192, 32768))
    tpu = device.startswith('v5e')
    hidden = 2 * 8192 * 512 * 2 if tpu else 0  # bytes of both feed-forwards in short rows, the largest array
    assert long['largest'] <= 4 * max(short['largest'], hidden)
    on_chip = 2 if tpu else 1
    assert long['peak'] - long['held'] < 1.1 * 4 * on_chip * (short['peak'] - short['held'])


@PROOF
@pytest.mark.parametrize('device', compiling.TARGETS)
def test_heads_of_every_size_fit_the_memory_of_a_core(device):
    """Three kernels, and on a GPU one for the gradient of a bias."""
    more = device.startswith('h100')
    found = {tuple(row['case']): row['kernels'] for row in compiled(device, 'ahead_heads.py')}
    assert found == {(*each, bias): 3 + more * bias for *each, bias in ahead_heads.CASES}


@PROOF
@pytest.mark.parametrize('device', compiling.TARGETS)
def test_what_waits_in_the_hosts_memory_is_counted_there(device):
    """Products beside the state; a state only on TPUs, as the GPU's compiler leaves its place out."""
    found = {row['case']: row for row in compiled(device, 'ahead_offload.py')}
    on_host = {case: (row['state'] > 0, row['products'] > 0) for case, row in found.items()}
    tpu = device.startswith('v5e')
    assert on_host == {'nothing': (False, False), 'products': (False, True), 'state': (tpu, False)}
    assert found['products']['peak'] < found['nothing']['peak']


@PROOF
def test_a_gpu_writes_nothing_of_the_hidden_layer_in_float32():
    """The gradient of bfloat16's gelu is in float32 until it is rounded."""
    assert {row['activation']: row['arrays'] for row in compiled('h200:1', 'ahead_hidden.py')} == {
        'gelu': [],
        'gelu_tanh': [],
    }


@PROOF
def test_a_step_of_decoding_reads_parameters_and_cache_and_little_else():
    """Parameters in two bytes each; of the cache the keys and values, which a step also writes its own to, in two or as
    integers in one."""
    plain, grouped, integers = compiled('h100:1', 'ahead_steps.py')
    assert plain['bytes'] < 1.2 * 2 * (plain['parameters'] + ahead_steps.CACHED)
    cached = ahead_steps.CACHED / 4  # four heads of queries have one of keys
    assert integers['bytes'] < grouped['bytes'] - 0.9 * cached


@PROOF
def test_a_tpu_computes_attention_of_one_query_by_products():
    """Twice, as a product of one row would be sums: of scores and of values, two operations a number of the cache."""
    row, *_ = compiled('v5e:1x1', 'ahead_steps.py')
    assert row['attention'] == 2 * 2 * ahead_steps.CACHED


@PROOF
def test_a_tpu_gathers_operands_whole_where_they_are_large():
    """Not part by part around a ring, in as many products as there are devices."""
    for row in compiled('v5e:2x4', 'ahead_wide.py'):
        kinds = {each['kind'] for each in row['collectives']}
        assert 'all-gather' in kinds
        assert 'collective-permute' not in kinds


@PROOF
def test_a_large_vocabulary_is_read_seldom_gathered_narrow_and_has_its_gradient_in_parts():
    """Two tables, of embeddings and of logits, each gathered once in two bytes a number; of one table for both, too. In
    chunks of 2,048 tokens a device moves little more than with all logits at once; with 128 a chunk it moved five times
    as much."""
    chunks, whole, shared = compiled('h100:8', 'ahead_vocabulary.py')
    assert chunks['peak_bytes'] < 0.5 * whole['peak_bytes']
    assert chunks['seconds']['memory'] < 1.5 * whole['seconds']['memory']
    table = ahead_vocabulary.VOCABULARY * ahead_vocabulary.WIDTH
    for row in (chunks, shared):
        sent = {each['kind']: each['bytes'] / table for each in row['collectives']}
        assert sent['all-gather'] < 1.1 * 2 * 2 * 7 / 8
        assert sent['reduce-scatter'] < 1.1 * 2 * 7 / 8  # that of logits
        assert sent['all-reduce'] < 0.01


@PROOF
def test_stages_gather_layers_for_prompts_once_and_steps_gather_no_kernels():
    """In two bytes a number: a prompt each layer, not all layers for each; a step what tokens are before and after each
    product, of heads, feed-forwards, tables and logits; a text that begins in rows that devices share, nothing."""
    prompt, step, mixture, _, _, begun = compiled('h100:8', 'ahead_generation.py')
    width, hidden, texts, layers = (getattr(ahead_generation, name) for name in ('WIDTH', 'HIDDEN', 'TEXTS', 'LAYERS'))
    kernels = 2 * (4 * width**2 + 2 * width * hidden)
    by_stages = sum(each['bytes'] for each in prompt['collectives'] if each['axes'] == ['pipeline'])
    assert by_stages < 1.2 * (layers * kernels + 2 * ahead_generation.VOCABULARY * width) * 3 / 4
    of_a_token = layers * (8 * width + 2 * (width + hidden)) + 2 * width + 2 * ahead_generation.VOCABULARY
    sent = sum(each['bytes'] for each in step['collectives'])
    assert sent < 1.1 * 2 * texts * of_a_token
    gathered = sum(each['bytes'] for each in mixture['collectives'] if each['kind'] == 'all-gather')
    assert gathered < 2 * width * hidden
    assert sum(each['bytes'] for each in begun['collectives']) < 1000  # of a cache of megabytes


@PROOF
def test_a_cache_is_split_from_its_beginning_and_a_step_with_a_bias_copies_none_of_it():
    """An encoder-decoder with relative positions on devices that split heads: before its first token the cache holds
    zeros, which a compiler repeats on all devices where nobody says that they are split."""
    *_, begun, step, _ = compiled('h100:8', 'ahead_generation.py')
    assert begun['peak_bytes'] < 1.5 * step['peak_bytes']
    moved = step['seconds']['memory'] * devices.Target.parse('h100:8').device.bandwidth
    assert moved < 1.6 * step['peak_bytes']


@PROOF
def test_recurrent_layers_gather_their_kernels_once_and_not_for_each_token():
    """Each once, and its gradient once, as the tables of embeddings and logits; an LSTM has two kernels a layer, with
    four gates. Where devices split heads, they read rows of their own, and nothing is computed twice."""
    width, layers = ahead_recurrent.WIDTH, ahead_recurrent.LAYERS
    kernels, table = layers * 2 * 4 * width * width, ahead_recurrent.VOCABULARY * width
    for row in compiled('h100:8', 'ahead_recurrent.py'):
        assert sum(each['count'] for each in row['collectives']) < ahead_recurrent.LENGTH
        sent = sum(each['bytes'] for each in row['collectives'] if each['axes'] == ['fsdp'])
        assert sent < 4 * (2 * kernels + 8 * table)
        assert 8 * row['flops'] == row['model_flops']
