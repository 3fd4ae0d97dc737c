"""A cluster on one machine: what a compiled program's text says of it, and what a dry run makes of that."""

import json
import os
import re
import subprocess
import sys
import types

import jax
import pytest

from lives import HANG
from places import ROOT
from tformer import config, errors
from tformer.commands import dry_run
from tformer.distributed import hlo, roofline
from tformer.model import build
from tformer.training import dummy_batch, flops

MESH = types.SimpleNamespace(shape={'data': 2, 'fsdp': 2, 'tensor': 2})

# ------------------------------------------------------------------------------------------------ text by hand
LOOPS = """HloModule toy, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (l: f32[4,8], r: f32[8,16]) -> f32[4,16] {
  %l = f32[4,8]{1,0} parameter(0)
  %r = f32[8,16]{1,0} parameter(1)
  ROOT %dot.0 = f32[4,16]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%inner (p: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %p = (s32[], f32[4,16]{1,0}) parameter(0)
  %x = f32[4,16]{1,0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %reduced = f32[4,16]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %next = (s32[], f32[4,16]{1,0}) tuple(%i, %reduced)
}

%under_five (p: (s32[], f32[4,16])) -> pred[] {
  %p = (s32[], f32[4,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%outer (p: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %p = (s32[], f32[4,16]{1,0}) parameter(0)
  %l = f32[4,8]{1,0} constant({...})
  %r = f32[8,16]{1,0} constant({...})
  %fused = f32[4,16]{1,0} fusion(%l, %r), kind=kCustom, calls=%product
  ROOT %w = (s32[], f32[4,16]{1,0}) while(%p), condition=%under_five, body=%inner
}

%never (p: (s32[], f32[4,16])) -> pred[] {
  %p = (s32[], f32[4,16]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (x: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %x = (s32[], f32[4,16]{1,0}) parameter(0)
  ROOT %w = (s32[], /*index=1*/f32[4,16]{1,0}) while(%x), condition=%never, body=%outer, \
backend_config={"known_trip_count":{"n":"3"},"dynamic_variables":[]}
}
"""


def test_loops_in_loops_count_as_often_as_they_run():
    """Three times (a product of 4 x 8 x 16 in a fusion, and five times an all-reduce of 256 bytes over pairs)."""
    assert hlo.flops(hlo.parse(LOOPS)) == 3 * 2 * 4 * 8 * 16
    assert hlo.collectives(LOOPS, MESH) == [hlo.Collective('all-reduce', ('tensor',), 15, 15 * 256.0)]
    unknown = LOOPS.replace('"known_trip_count":{"n":"3"},', '')
    assert hlo.unknown_loops(hlo.parse(LOOPS)) == 0 and hlo.unknown_loops(hlo.parse(unknown)) == 1
    assert hlo.flops(hlo.parse(unknown)) == 2 * 4 * 8 * 16


def main(*lines, more=''):
    """Returns a program that runs `lines` on x: f32[4,8], 128 bytes."""
    body = ''.join(f'  {line}\n' for line in ('%x = f32[4,8]{1,0} parameter(0)', *lines))
    return f'HloModule toy\n{more}\nENTRY %main (x: f32[4,8]) -> f32[] {{\n{body}}}\n'


GROUPS = {  # of a mesh 2 x 2 x 2: data, fsdp, tensor
    'replica_groups={{0,1},{2,3},{4,5},{6,7}}': (('tensor',), 2),
    'replica_groups={{0,4},{1,5},{2,6},{3,7}}': (('data',), 2),
    'replica_groups={}': (('data', 'fsdp', 'tensor'), 8),
    'replica_groups=[4,2]<=[8]': (('tensor',), 2),
    'replica_groups=[4,2]<=[4,2]T(1,0)': (('fsdp',), 2),  # 0 2, 4 6, 1 3, 5 7
    'replica_groups=[2,4]<=[2,2,2]T(1,0,2)': (('data', 'tensor'), 4),  # 0 1 4 5, 2 3 6 7
    'replica_groups=[2,4]<=[4,2]T(1,0)': (('data', 'fsdp'), 4),  # 0 2 4 6, 1 3 5 7
    "replica_groups=mesh['a'=2,'b'=4] {'a'}": (('data',), 2),
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}": (('fsdp',), 2),
    "replica_groups=mesh['a'=8] {'a':(2)2}": (('fsdp',), 2),
    "replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}": (('data', 'tensor'), 4),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,6,1,7) {'b'}": (('data', 'fsdp'), 2),
}


@pytest.mark.parametrize('text', GROUPS)
def test_the_axes_of_a_group_in_every_notation(text):
    axes, size = GROUPS[text]
    compiled = main(f'ROOT %all = f32[{4 * size},8]{{1,0}} all-gather(%x), channel_id=2, {text}, dimensions={{0}}')
    assert hlo.collectives(compiled, MESH) == [hlo.Collective('all-gather', axes, 1, (size - 1) * 128.0)]


FOURS = 'channel_id=1, replica_groups=[2,4]<=[8]'  # fsdp and tensor: n = 4
SENT = {  # each line's bytes, of an operand of 128
    f'%r = f32[4,8]{{1,0}} all-reduce(%x), {FOURS}, to_apply=%add': 2 * 3 / 4 * 128,
    f'%r = f32[1,8]{{1,0}} reduce-scatter(%x), {FOURS}, dimensions={{0}}, to_apply=%add': 3 / 4 * 128,
    f'%r = f32[4,8]{{1,0}} all-to-all(%x), {FOURS}, dimensions={{0}}': 3 / 4 * 128,
    f'%r = (f32[4,8]{{1,0}}, f32[4,8]{{1,0}}) all-to-all(%x, %x), {FOURS}': 3 / 4 * 256,
    f'%r = (f32[4,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(%x), {FOURS}, dimensions={{0}}': 3 * 128,
    f'%r = f32[4,8]{{1,0:T(8,128)}} all-reduce-start(f32[4,8]{{1,0:T(8,128)}} %x), {FOURS}': 2 * 3 / 4 * 128,
}


@pytest.mark.parametrize('line', SENT)
def test_bytes_that_a_ring_of_four_sends(line):
    done = '%d = f32[4,8]{1,0} all-gather-done(%r)'
    (found,) = hlo.collectives(main(line, done), MESH)
    assert (found.axes, found.count, found.bytes) == (('fsdp', 'tensor'), 1, SENT[line])


def test_a_permutation_sends_all_along_the_axes_that_it_crosses():
    line = '%r = f32[4,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}'
    assert hlo.collectives(main(line), MESH) == [hlo.Collective('collective-permute', ('fsdp',), 1, 128.0)]


ASYNC = f"""
%wrapped (x: f32[4,8]) -> f32[1,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  ROOT %r = f32[1,8]{{1,0}} reduce-scatter(%x), {FOURS}, dimensions={{0}}
}}
"""


def test_what_starts_and_ends_counts_once():
    compiled = main(
        '%s = ((f32[4,8]{1,0}), f32[1,8]{1,0}, u32[]) async-start(%x), calls=%wrapped',
        '%u = ((f32[4,8]{1,0}), f32[1,8]{1,0}, u32[]) async-update(%s), calls=%wrapped',
        'ROOT %d = f32[1,8]{1,0} async-done(%u), calls=%wrapped',
        more=ASYNC,
    )
    assert hlo.collectives(compiled, MESH) == [hlo.Collective('reduce-scatter', ('fsdp', 'tensor'), 1, 96.0)]


def test_of_a_conditional_the_dearest_branch_counts():
    compiled = main(
        '%p = pred[] constant(true)',
        'ROOT %c = f32[1,8]{1,0} conditional(%p, %x, %x), true_computation=%idle, false_computation=%wrapped',
        more=ASYNC + '%idle (x: f32[4,8]) -> f32[4,8] {\n  ROOT %x = f32[4,8]{1,0} parameter(0)\n}\n',
    )
    assert [found.bytes for found in hlo.collectives(compiled, MESH)] == [96.0]


def test_numbers_widened_just_before_count_as_they_were():
    widen = (
        '%widen (y: bf16[4,8]) -> f32[4,8] {\n  %y = bf16[4,8]{1,0} parameter(0)\n  %w = f32[4,8]{1,0} convert(%y)\n'
        '  ROOT %b = f32[4,8]{0,1} copy(%w)\n}\n'
    )
    compiled = main(
        '%y = bf16[4,8]{1,0} convert(%x)',
        '%wide = f32[4,8]{0,1} fusion(%y), kind=kLoop, calls=%widen',
        f'ROOT %r = f32[4,8]{{1,0}} all-reduce(%wide), {FOURS}, to_apply=%add.clone_promoted',
        more=widen,
    )
    assert [found.bytes for found in hlo.collectives(compiled, MESH)] == [2 * 3 / 4 * 64]


def test_operations_of_products_and_convolutions():
    kernel = '%k = f32[3,8,16]{2,1,0} constant({...})'
    moved = '%i = f32[1,10,8]{2,1,0} bitcast(%x)'
    convolved = '%c = f32[1,8,16]{2,1,0} convolution(%i, %k), window={size=3}, dim_labels=b0f_0io->b0f'
    assert hlo.flops(hlo.parse(main(kernel, moved, convolved))) == 2 * 8 * 16 * 3 * 8
    batched = (
        '%d = f32[2,4,4]{2,1,0} dot(%a, %a), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={2}'
    )
    assert hlo.flops(hlo.parse(main('%a = bf16[2,4,6]{2,1,0} constant({...})', batched))) == 2 * 2 * 4 * 4 * 6


# ------------------------------------------------------------------------------------------------ by formula
MESH_OF_CLUSTER = {'pipeline': 1, 'data': 4, 'fsdp': 64, 'expert': 1, 'context': 1, 'tensor': 8}


def test_published_peaks_are_those_of_the_data_sheets():
    """Of dense products: half of what the H100's sheet says of sparse ones, 1,979 and 989 teraflops."""
    found = roofline.DEVICES['H100 SXM (80 GB)']
    assert found.flops['bfloat16'] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert found.flops['float32'] == pytest.approx(989e12 / 2, rel=2e-3)
    assert (found.memory, found.bandwidth) == (80e9, 3.35e12)
    assert (found.near, found.near_bytes, found.far_bytes) == (8, 900e9 / 2, 400e9 / 8)
    found = roofline.DEVICES['TPU v5p (95 GiB)']
    assert found.flops['bfloat16'] == 459e12 and (found.memory, found.bandwidth) == (95 * 2**30, 2.765e12)
    assert (found.near, found.near_bytes, found.far_bytes) == (8960, 1200e9 / 2 / 3, 50e9 / 8)


def test_times_at_the_peaks():
    device = roofline.Device(8e9, {'bfloat16': 100.0}, bandwidth=10.0, near=8, near_bytes=4.0, far_bytes=1.0)
    sent = [hlo.Collective('all-reduce', ('tensor',), 1, 8.0), hlo.Collective('all-gather', ('fsdp',), 1, 5.0)]
    found = roofline.times(device, 'bfloat16', 300.0, 40.0, sent, MESH_OF_CLUSTER)
    assert found == roofline.Times(compute=3.0, memory=4.0, network=8 / 4 + 5 / 1)


def small(family='decoder', mesh=None, rows=16, **model):
    """Returns the config of a small model without dropout, and with next to no vocabulary."""
    fields = {'vocab_size': 16, 'emb_dim': 64, 'mlp_dim': 128, 'num_heads': 8, 'max_len': 64, 'position': 'rope'}
    fields |= {'norm': 'rmsnorm', 'mlp_bias': False, 'dropout_rate': 0.0, 'tied_embeddings': None}
    objective = {'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}[family]
    return config.Config(
        model=config.Model(family=family, **fields | model),
        data=config.Data(length=16, encoder_length=32 if family == 'encoder_decoder' else None),
        train=config.Train(objective=objective, num_steps=10, batch_size=rows),
        mesh=config.Mesh(**(mesh or {})),
    )


LAYERS, D, F, V, T = 4, 64, 128, 16, 16
LAYER = 4 * D * D + 2 * D * F  # weights


def asked(cfg):
    """Returns accounting's operations of a step, without a mesh."""
    resolved = dummy_batch.assumed(cfg)
    batch = dummy_batch.random_batch(resolved)
    params = jax.eval_shape(build(resolved.model).init, jax.random.key(0), batch)['params']
    return flops.model_flops(resolved, params, batch)


def test_operations_by_the_formula():
    tokens, width = 16 * T, 8 * 8  # heads times their size
    assert asked(small()) == 6 * (LAYERS * LAYER + D * V) * tokens + 12 * LAYERS * width * T * tokens
    tied = asked(small(tied_embeddings='all'))
    assert tied == asked(small())  # the table makes the logits
    experts = asked(small(num_experts=8, experts_per_token=2, num_decoder_layers=1))
    once = asked(small(num_decoder_layers=1))
    assert experts - once == 6 * tokens * (2 * D * F + D * 8)  # another feed-forward, and the router
    shared = asked(small(layer_sharing='all'))
    assert shared == asked(small())
    uneven = {'num_encoder_layers': 1, 'num_decoder_layers': 3}  # each stack shares a block, as often as it has layers
    assert asked(small('encoder_decoder', layer_sharing='all', **uneven)) == asked(small('encoder_decoder', **uneven))
    both = asked(small('encoder_decoder', num_encoder_layers=1, num_decoder_layers=1))
    source, rows = 32, 16
    weights = rows * (source * (LAYER + 2 * D * D) + T * (LAYER + 2 * D * D + D * V))
    assert both == 6 * weights + 12 * rows * width * (source * source + T * T + T * source)


# ------------------------------------------------------------------------------------------------ compiled
def compiled(**fields):
    run = dry_run.compile_step(small(**fields))
    found = hlo.collectives(run.executable.as_text(), run.mesh)
    sent = {(row.kind, row.axes): row.bytes for row in found}
    return run, sent


def parameters(run):
    return sum(x.size for x in jax.tree.leaves(run.state.params))


def test_data_parallel_steps_reduce_every_gradient_once():
    run, sent = compiled(mesh={'data': 8})
    assert sent.keys() == {('all-reduce', ('data',))}
    assert sent['all-reduce', ('data',)] == pytest.approx(2 * 7 / 8 * 4 * parameters(run), rel=0.05)
    done = 8 * hlo.flops(hlo.parse(run.executable.as_text()))
    assert done == pytest.approx(asked(run.config), rel=0.02)


def test_fsdp_gathers_each_layer_forward_and_again_backward(monkeypatch):
    run, sent = compiled(mesh={'data': 1, 'fsdp': 8}, remat='full')
    assert {axes for _, axes in sent} == {('fsdp',)}
    gathered = 7 / 8 * 4 * 2 * LAYERS * LAYER
    assert sent['all-gather', ('fsdp',)] == pytest.approx(gathered, rel=0.05)
    # Without a reduce-scatter an all-reduce: twice the bytes.
    assert sent['all-reduce', ('fsdp',)] == pytest.approx(2 * 7 / 8 * 4 * parameters(run), rel=0.05)
    done = 8 * hlo.flops(hlo.parse(run.executable.as_text()))
    assert done > 1.2 * asked(run.config)  # the forward pass of the layers is made again

    norms = (2 * LAYERS + 1) * D  # whole on every device; all else is split, and so are both moments
    held = 3 * 4 * (norms + (parameters(run) - norms) / 8)
    batch = flops.device_bytes(run.batch)
    state = flops.device_bytes((run.state.params, run.state.opt_state))
    assert state <= 1.05 * held
    assert run.executable.memory_analysis().argument_size_in_bytes <= 1.05 * held + batch + 4096

    needed = dry_run.needed_bytes(run)
    assert needed > run.executable.memory_analysis().argument_size_in_bytes
    peaks = {'flops': {'float32': 1.0}, 'bandwidth': 1.0, 'near': 8, 'near_bytes': 1.0, 'far_bytes': 1.0}
    sizes = {'too small': needed - 1, 'large enough': needed}
    devices = {name: roofline.Device(memory=size, **peaks) for name, size in sizes.items()}
    monkeypatch.setattr(roofline, 'DEVICES', devices)
    said = dry_run.describe(run)
    assert re.search(r'\n  does not fit too small: needs [\d.,]+ (GiB|B) per device', said)
    assert re.search(r'\n  fits large enough: needs', said) and 'does not fit large' not in said


def test_tensor_parallel_layers_reduce_activations():
    """Forward after attention and after the feed-forward. Backward before them: the CPU's compiler reduces what comes
    from queries, keys and values one by one, three times, where Shoeybi et al. 2019 (section 3) reduce their sum."""
    _, sent = compiled(mesh={'data': 2, 'tensor': 4})
    assert {axes for _, axes in sent} == {('data',), ('tensor',)}
    activations = 4 * (16 / 2) * T * D
    once = 2 * 3 / 4 * activations
    layers = LAYERS * (2 + 3 + 1) * once
    assert sent['all-reduce', ('tensor',)] == pytest.approx(layers + once, rel=0.05)  # and before the logits


def test_a_pipeline_is_compiled_as_a_pipeline():
    """Microbatches pass from stage to stage, and no device holds the layers of another stage."""
    run, sent = compiled(mesh={'data': 2, 'pipeline': 4}, num_decoder_layers=4)
    assert ('collective-permute', ('pipeline',)) in sent
    layers = run.state.params['decoder']['stack']['layers']
    held = sum(x.size for x in jax.tree.leaves(layers)) / 4
    assert flops.device_bytes(layers) == 4 * held


# ------------------------------------------------------------------------------------------------ the command
def test_meshes_that_name_devices():
    assert dry_run.num_devices(config.Mesh()) == 1  # of all devices, however many: nothing to pretend
    assert dry_run.num_devices(config.Mesh(fsdp=64, tensor=8)) == 512
    assert dry_run.num_devices(config.Mesh(data=4, fsdp=64, tensor=8)) == 2048
    with pytest.raises(errors.UserError, match=r'train.batch_size=12 is not a multiple of .* 8 ways'):
        dry_run.compile_step(small(mesh={'data': 8}, rows=12))


def inspect(*flags):
    ran = subprocess.run(
        [sys.executable, '-m', 'tformer', 'inspect', '--config=configs/shapes.py:smoke', *flags],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'},  # as JAX set it
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


@pytest.mark.stack
def test_the_command_on_64_devices():
    """There are eight here (conftest.py). All that a step holds is split as the mesh says; the products are shared."""
    mesh = {'data': 4, 'fsdp': 4, 'tensor': 4}
    said, told = inspect(
        '--config.train.batch_size=32', *(f'--config.mesh.{axis}={size}' for axis, size in mesh.items())
    )
    assert told.startswith('compiling for 64 devices ...\ncompiled in ') and told.count('\n') == 2
    assert json.loads(said[: said.index('\n}\n') + 2])['mesh']['fsdp'] == 4
    assert 'decoder.stack.layers.mlp.out.kernel' in said
    assert 'dry run on 64 devices (data 4 x fsdp 4 x tensor 4), rules fsdp_tp: 32 rows of 32 tokens' in said
    for kind, axes in (('all-gather', 'fsdp'), ('all-reduce', 'tensor'), ('all-reduce', 'data')):
        assert re.search(rf'\n  {kind} +{axes} +[\d,]+ +[\d,.]+ (GiB|B)\n', said), (kind, axes)
    for device in ('H100 SXM (80 GB)', 'TPU v5p (95 GiB)'):
        assert f'  fits {device}: needs ' in said and re.search(rf'\n  {re.escape(device)} .*%', said)
    assert 'does not fit' not in said


def test_without_a_mesh_nothing_is_compiled():
    said, told = inspect()
    assert 'parameters, with a vocabulary' in said and 'dry run' not in said and told == ''
