"""A cluster on one machine: what a compiled program's text says of it, and what a dry run makes of that."""

import types

import pytest

from tformer import hlo

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
