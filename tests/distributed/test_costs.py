"""The work of a compiled program, from its text: texts by hand, and lines that the compilers write."""

import json
import types

import numpy as np
import pytest

from tformer.distributed import costs, hlo, traffic

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
    assert costs.flops(hlo.parse(LOOPS)) == 3 * 2 * 4 * 8 * 16
    assert costs.collectives(hlo.parse(LOOPS), MESH) == [costs.Collective('all-reduce', ('tensor',), 15, 15 * 256.0)]
    unknown = LOOPS.replace('"known_trip_count":{"n":"3"},', '')
    assert hlo.unknown_loops(hlo.parse(LOOPS)) == 0 and hlo.unknown_loops(hlo.parse(unknown)) == 1
    assert costs.flops(hlo.parse(unknown)) == 2 * 4 * 8 * 16


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
    assert costs.collectives(hlo.parse(compiled), MESH) == [costs.Collective('all-gather', axes, 1, (size - 1) * 128.0)]


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
    (found,) = costs.collectives(hlo.parse(main(line, done)), MESH)
    assert (found.axes, found.count, found.bytes) == (('fsdp', 'tensor'), 1, SENT[line])


def test_a_permutation_sends_all_along_the_axes_that_it_crosses():
    line = '%r = f32[4,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}'
    assert costs.collectives(hlo.parse(main(line)), MESH) == [
        costs.Collective('collective-permute', ('fsdp',), 1, 128.0)
    ]


ASYNC = f"""
%wrapped (x: f32[4,8]) -> f32[1,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  ROOT %r = f32[1,8]{{1,0}} reduce-scatter(%x), {FOURS}, dimensions={{0}}
}}
"""


def test_what_starts_and_ends_counts_once_and_is_hidden_by_work_between():
    start = '%s = ((f32[4,8]{1,0}), f32[1,8]{1,0}, u32[]) async-start(%x), calls=%wrapped'
    update = '%u = ((f32[4,8]{1,0}), f32[1,8]{1,0}, u32[]) async-update(%s), calls=%wrapped'
    done = 'ROOT %d = f32[1,8]{1,0} async-done(%u), calls=%wrapped'
    work = '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    for lines, hidden in (((start, work, update, done), 96.0), ((work, start, update, done), 0.0)):
        found = costs.collectives(hlo.parse(main(*lines, more=ASYNC)), MESH)
        assert found == [costs.Collective('reduce-scatter', ('fsdp', 'tensor'), 1, 96.0, hidden=hidden)]
    start = f'%s = (f32[4,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(%x), {FOURS}, dimensions={{0}}'
    done = 'ROOT %d = f32[16,8]{1,0} all-gather-done(%s)'
    for lines, hidden in (((start, work, done), 384.0), ((start, done, work), 0.0)):
        (found,) = costs.collectives(hlo.parse(main(*lines)), MESH)
        assert (found.bytes, found.hidden) == (384.0, hidden)


def test_what_a_tpu_does_piece_by_piece_beside_products_counts_once():
    """The collective stands in the fusion that starts it, in those that do a piece of it, and in the one that ends it;
    in one fusion that does all of it at once, it has no chain."""
    gather = f'%g = f32[16,8]{{1,0}} all-gather(%p), {FOURS}, dimensions={{0}}'

    def fusion(name, chain, target=''):
        call = f'ROOT %c = f32[16,8]{{1,0}} custom-call(%g), custom_call_target="{target}"' if target else ''
        numbered = f'{gather}, frontend_attributes={{chain_id="{chain}"}}' if chain else gather
        return (
            f'%{name} (p: f32[4,8]) -> f32[16,8] {{\n  %p = f32[4,8]{{1,0}} parameter(0)\n  {numbered}\n  {call}\n}}\n'
        )

    more = ''.join([
        fusion('starts', 7, 'AsyncCollectiveStart'), fusion('goes_on', 7), fusion('ends', 7, 'AsyncCollectiveDone'),
        fusion('at_once', None),
    ])  # fmt: skip

    def found(*called):
        lines = [f'%f{i} = f32[16,8]{{1,0}} fusion(%x), kind=kCustom, calls=%{name}' for i, name in enumerate(called)]
        lines[-1] = f'ROOT {lines[-1]}'
        return [
            (each.count, each.bytes, each.hidden)
            for each in costs.collectives(hlo.parse(main(*lines, more=more)), MESH)
        ]

    assert found('starts', 'goes_on', 'goes_on', 'ends') == [(1, 384.0, 384.0)]
    assert found('at_once', 'at_once') == [(2, 768.0, 0.0)]


BETWEEN_SLICES = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0",{}}'
KINDS_BETWEEN = {'ALL_REDUCE': ('all-reduce', 2 * 3 / 4), 'ONE_TO_ONE': ('collective-permute', 1)}


@pytest.mark.parametrize('said', KINDS_BETWEEN)
def test_what_goes_through_the_hosts_to_other_slices_is_a_collective_of_its_axis(said):
    """Of four slices along `data`, in a mesh of 4 x 2; an operand of 128 bytes."""
    places = [[types.SimpleNamespace(slice_index=number)] * 2 for number in range(4)]
    mesh = types.SimpleNamespace(
        shape={'data': 4, 'fsdp': 2}, axis_names=('data', 'fsdp'), devices=np.array(places, dtype=object)
    )
    attributes = BETWEEN_SLICES.replace('{}', f'_xla_megascale_transfer_type="{said}"')
    send = f'%s = (f32[4,8]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=1, {attributes}'
    receive = f'%r = (f32[4,8]{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {attributes}'
    done = 'ROOT %d = (f32[4,8]{1,0}, token[]) recv-done(%r), channel_id=2'
    work = '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    kind, share = KINDS_BETWEEN[said]
    for lines, hidden in (((send, receive, work, done), 1), ((send, receive, done, work), 0)):
        (found,) = costs.collectives(hlo.parse(main('%t = token[] after-all()', *lines)), mesh)
        assert found == costs.Collective(kind, ('data',), 1, share * 128, hidden * share * 128, far=True)


def test_of_a_conditional_the_dearest_branch_counts():
    compiled = main(
        '%p = pred[] constant(true)',
        'ROOT %c = f32[1,8]{1,0} conditional(%p, %x, %x), true_computation=%idle, false_computation=%wrapped',
        more=ASYNC + '%idle (x: f32[4,8]) -> f32[4,8] {\n  ROOT %x = f32[4,8]{1,0} parameter(0)\n}\n',
    )
    assert [found.bytes for found in costs.collectives(hlo.parse(compiled), MESH)] == [96.0]


def test_operations_of_products_and_convolutions():
    kernel = '%k = f32[3,8,16]{2,1,0} constant({...})'
    moved = '%i = f32[1,10,8]{2,1,0} bitcast(%x)'
    convolved = '%c = f32[1,8,16]{2,1,0} convolution(%i, %k), window={size=3}, dim_labels=b0f_0io->b0f'
    assert costs.flops(hlo.parse(main(kernel, moved, convolved))) == 2 * 8 * 16 * 3 * 8
    batched = (
        '%d = f32[2,4,4]{2,1,0} dot(%a, %a), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={2}'
    )
    assert costs.flops(hlo.parse(main('%a = bf16[2,4,6]{2,1,0} constant({...})', batched))) == 2 * 2 * 4 * 4 * 6


# A product on a TPU is a convolution whose windows reach beyond the other operand (from a compiled program).
CONVOLUTIONS = {
    'a ring of parts': (
        'bf16[2,96,12,64,1]', 'bf16[4,1024,2,96,1]', 'bf16[12,64,4,1024,1]',
        'window={size=1x4x2 pad=0_0x3_3x0_0 rhs_reversal=0x1x0}, dim_labels=2f0b1_1o2i0->0b1f2',
        2 * (12 * 64) * (4 * 1024) * (2 * 96),
    ),
    'a batch as windows': (
        'bf16[4,12,1024,64]', 'bf16[4,12,1024,64]', 'f32[4,12,1024,1024]',
        'window={size=4x12 stride=3x11 lhs_dilate=4x12}, dim_labels=01bf_01oi->01bf',
        2 * 4 * 12 * 1024 * 1024 * 64,
    ),
    'a batch as padded windows': (
        'bf16[4,12,1024,64]', 'bf16[4,12,1024,1024]', 'bf16[4,12,1024,64]',
        'window={size=4x12 stride=4x12 pad=3_3x11_11 lhs_dilate=3x11 rhs_reversal=1x1}, dim_labels=01fb_01oi->01fb',
        2 * 4 * 12 * 1024 * 1024 * 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_what_meets_padding_is_no_operation(name):
    left, right, result, attributes, expected = CONVOLUTIONS[name]
    lines = [f'%l = {left} constant({{...}})', f'%r = {right} constant({{...}})']
    found = hlo.parse(main(*lines, f'ROOT %c = {result} convolution(%l, %r), {attributes}'))
    assert costs.flops(found) == expected


def by_cudnn(target, shape, **fields):
    """Returns cuDNN's attention as XLA prints it: its configuration is the text that JAX makes, with spaces."""
    said = {'element_type': 'BF16', 'dimensions': list(map(str, shape)), 'layout': {'tiles': []}}
    config = json.dumps({'cudnn_fmha_backend_config': {'fmha_scale': 0.1, 'intermediate_tensor_shape': said, **fields}})
    return (
        f'%c = (bf16[2,8,4,16]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %q), custom_call_target="{target}", '
        f'backend_config={config}'
    )


FORWARD, BACKWARD = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
KERNELS = {  # B, N, T, S; H is 16
    by_cudnn(FORWARD, (2, 4, 8, 32), mask_type='PADDING', sliding_window_length=0): (
        4 * 2 * 4 * 8 * 32 * 16,
        {FORWARD: 1},
    ),
    by_cudnn(BACKWARD, (2, 4, 8, 32), mask_type='NO_MASK'): (10 * 2 * 4 * 8 * 32 * 16, {BACKWARD: 1}),
    by_cudnn(FORWARD, (2, 4, 8, 8), mask_type='CAUSAL', sliding_window_length=0): (
        4 * 2 * 4 * (8 * 9 // 2) * 16,
        {FORWARD: 1},
    ),
    by_cudnn(BACKWARD, (2, 4, 8, 8), mask_type='PADDING_CAUSAL', sliding_window_length=3): (
        10 * 2 * 4 * (1 + 2 + 6 * 3) * 16,
        {BACKWARD: 1},
    ),
    '%splash.3 = bf16[2,8,4,16]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call", '
    'backend_config={"cost_estimate":{"flops":"1234","transcendentals":"5"}}': (1234, {'tpu_custom_call splash': 1}),
    '%p = bf16[2,8,4,16]{3,2,1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={op_name="jit(step)/mlp/products_5678/grouped_product/pallas_call"}': (5678, {'__gpu$xla.gpu.triton': 1}),
    '%c = bf16[2,8,4,16]{3,2,1,0} custom-call(%q), custom_call_target="AllocateBuffer"': (0, {}),
}


@pytest.mark.parametrize('line', KERNELS)
def test_the_operations_of_kernels(line):
    flops, names = KERNELS[line]
    program = hlo.parse(main('%q = bf16[2,8,4,16]{3,2,1,0} constant({...})', line))
    assert costs.flops(program) == flops and costs.kernels(program) == names


def test_a_counter_that_counts_in_steps():
    by_two = (
        '%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {\n  %p = (s32[], f32[4,8]{1,0}) parameter(0)\n'
        '  %two = s32[] constant(2)\n  %i = s32[] get-tuple-element(%p), index=0\n'
        '  %y = f32[4,8]{1,0} get-tuple-element(%p), index=1\n  %next = s32[] add(%i, %two)\n'
        '  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%next, %y)\n}\n'
        '%cond (p: (s32[], f32[4,8])) -> pred[] {\n  %p = (s32[], f32[4,8]{1,0}) parameter(0)\n'
        '  %i = s32[] get-tuple-element(%p), index=0\n  %five = s32[] constant(5)\n'
        '  ROOT %less = pred[] compare(%i, %five), direction=LT\n}\n'
    )
    program = hlo.parse(main('ROOT %w = (s32[], f32[4,8]{1,0}) while(%x), condition=%cond, body=%body', more=by_two))
    (loop,) = (i for i in program.computations['main'].values() if i.opcode == 'while')
    assert hlo.trips(program, loop) == 3  # 0, 2, 4


# ------------------------------------------------------------------------------------------------ bytes
def moved(*lines, more=''):
    program = hlo.parse(main(*lines, more=more))
    return {work.name: work.bytes for work in costs.works(program)}


SLICED = """
%sliced (stack: f32[10,4,8], at: s32[]) -> f32[4,8] {
  %stack = f32[10,4,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %y = f32[4,8]{1,0} bitcast(%one)
}
%outer (stack: f32[10,4,8], at: s32[]) -> f32[4,8] {
  %stack = f32[10,4,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %inner = f32[4,8]{1,0} fusion(%stack, %at), kind=kLoop, calls=%sliced
  ROOT %double = f32[4,8]{1,0} add(%inner, %inner)
}
%updated (stack: f32[10,4,8], new: f32[1,4,8], at: s32[]) -> f32[10,4,8] {
  %stack = f32[10,4,8]{2,1,0} parameter(0)
  %new = f32[1,4,8]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %next = f32[10,4,8]{2,1,0} dynamic-update-slice(%stack, %new, %at, %zero, %zero)
}
"""
STACK = '%stack = f32[10,4,8]{2,1,0} constant({...})', '%at = s32[] constant(3)'


def test_a_part_of_an_array_moves_as_many_bytes_as_the_part():
    """A slice of 128 bytes, read and written, wherever it is taken; beside it the 4 bytes of the index."""
    inner = moved(*STACK, '%f = f32[4,8]{1,0} fusion(%stack, %at), kind=kLoop, calls=%sliced', more=SLICED)
    nested = moved(*STACK, '%f = f32[4,8]{1,0} fusion(%stack, %at), kind=kLoop, calls=%outer', more=SLICED)
    assert inner == nested == {'f': 2 * 128 + 4}
    new = '%new = f32[1,4,8]{2,1,0} constant({...})'
    update = '%f = f32[10,4,8]{2,1,0} fusion(%stack, %new, %at), kind=kLoop, calls=%updated'
    assert moved(*STACK, new, update, more=SLICED) == {'f': 2 * 128 + 4}
    alone = '%f = f32[10,4,8]{2,1,0} dynamic-update-slice(%stack, %new, %at, %at, %at)'
    assert moved(*STACK, new, alone) == {'f': 2 * 128}
    assert moved(*STACK, '%f = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %at, %at, %at)') == {'f': 2 * 128}


def test_what_stays_on_the_chip_moves_nothing():
    line = '%y = f32[4,8]{1,0:T(8,128)S(1)} negate(%x)'
    assert moved(line, 'ROOT %z = f32[4,8]{1,0} negate(%y)') == {'y': 128, 'z': 128}


def test_the_largest_arrays_and_where_they_come_from():
    meta = 'metadata={op_name="jit(step)/transpose(jvp(Model))/decoder/stack/while/body/closed_call/mlp/add"}'
    lines = f'%y = f32[64,8]{{1,0}} broadcast(%x), {meta}', f'%z = f32[16,8]{{1,0}} slice(%y), {meta}'
    found = traffic.largest(hlo.parse(main(*lines)))
    assert found == [('f32[64,8]', 'decoder/stack/mlp/add', 64 * 8 * 4)]
