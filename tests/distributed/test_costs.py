"""The work of a compiled program, from its text: texts by hand, and lines that the compilers write."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

import toy_hlo
from tformer.distributed import collectives, costs, devices, estimates, hlo, traffic

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
    assert collectives.of(hlo.parse(LOOPS), MESH) == [collectives.Collective('all-reduce', ('tensor',), 15, 15 * 256.0)]
    unknown = LOOPS.replace('"known_trip_count":{"n":"3"},', '')
    assert hlo.unknown_loops(hlo.parse(LOOPS)) == 0 and hlo.unknown_loops(hlo.parse(unknown)) == 1
    assert costs.flops(hlo.parse(unknown)) == 2 * 4 * 8 * 16


def test_a_compiler_that_cannot_tell_how_long_work_takes_gives_no_seconds():
    def taken(cycles):
        line = f'ROOT %g = f32[4]{{0}} gather(%x), backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        return [work.cycles for work in costs.works(hlo.parse(toy_hlo.main(line)))]

    assert taken(1289) == [1289]
    assert taken(2**63 - 1) == [None]


def test_operations_of_products_and_convolutions():
    kernel = '%k = f32[3,8,16]{2,1,0} constant({...})'
    moved = '%i = f32[1,10,8]{2,1,0} bitcast(%x)'
    convolved = '%c = f32[1,8,16]{2,1,0} convolution(%i, %k), window={size=3}, dim_labels=b0f_0io->b0f'
    assert costs.flops(hlo.parse(toy_hlo.main(kernel, moved, convolved))) == 2 * 8 * 16 * 3 * 8
    batched = (
        '%d = f32[2,4,4]{2,1,0} dot(%a, %a), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={2}'
    )
    assert costs.flops(hlo.parse(toy_hlo.main('%a = bf16[2,4,6]{2,1,0} constant({...})', batched))) == 2 * 2 * 4 * 4 * 6


def test_a_product_of_few_rows_on_a_gpu_is_a_sum_of_products():
    lines = (
        '%zero = f32[] constant(0)',
        '%p = f32[4,8]{1,0} multiply(%x, %x)',
        '%s = f32[4]{0} reduce(%p, %zero), dimensions={1}, to_apply=%add, metadata={op_name="NAME"}',
    )
    names = {'jit(step)/mlp/in_0/BTD,DF->BTF/dot_general': 2 * 4 * 8, 'jit(step)/norm/reduce_sum': 0}
    for name, flops in names.items():
        assert costs.flops(hlo.parse(toy_hlo.main(*(line.replace('NAME', name) for line in lines)))) == flops


def test_products_of_integers_have_the_peak_of_integers():
    line = '%d = TYPE[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}'
    for left, right, integers in (('s8', 's8', True), ('s8', 'bf16', False), ('bf16', 'bf16', False)):
        given = (f'%{name} = {kind}[4,16]{{1,0}} constant({{...}})' for name, kind in (('a', left), ('b', right)))
        (work,) = costs.works(hlo.parse(toy_hlo.main(*given, line.replace('TYPE', 's32' if integers else 'f32'))))
        assert work.integers is integers
        found = estimates.times(devices.DEVICES['h100'], 'bfloat16', [work], (), {})
        assert found.compute == work.flops / (1978e12 if integers else 989e12)


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
    found = hlo.parse(toy_hlo.main(*lines, f'ROOT %c = {result} convolution(%l, %r), {attributes}'))
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
    program = hlo.parse(toy_hlo.main('%q = bf16[2,8,4,16]{3,2,1,0} constant({...})', line))
    assert costs.flops(program) == flops and costs.kernels(program) == names


@pytest.mark.parametrize(('phase', 'products'), [('fwd', 16 + 24), ('dq', 2 * 16 + 24), ('dkv', 2 * 16 + 2 * 24)])
def test_a_kernel_multiplies_the_pairs_that_it_visits_by_keys_and_values_of_their_own_widths(phase, products):
    lines = (
        '%w = s32[1]{0} constant({7})',
        '%q = bf16[2,4,8,16]{3,2,1,0} constant({...})',
        '%k = bf16[2,2,8,16]{3,2,1,0} constant({...})',
        '%v = bf16[2,2,8,24]{3,2,1,0} constant({...})',
        '%a = bf16[2,4,8,24]{3,2,1,0} custom-call(%w, %q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(step)/mix/pairs_50/attention_{phase}_tiles/pallas_call"}}',
    )
    assert costs.flops(hlo.parse(toy_hlo.main(*lines))) == 2 * 50 * (2 * 4) * products


TILES = 'jit(step)/mix/pairs_50/attention_fwd_tiles/pallas_call'


@pytest.mark.parametrize(
    ('calls', 'kernels'),
    [
        ([('a.1', '__cudnn$fmhaSoftmax', ''), ('b', '__cublas$gemm', '')], {'cudnn'}),
        ([('a', '__gpu$xla.gpu.triton', TILES), ('b', '__gpu$xla.gpu.triton', 'norm')], {'triton'}),
        ([('attention_fwd.3', 'tpu_custom_call', TILES)], {'mosaic'}),
        ([('splash_mha_fwd.3', 'tpu_custom_call', ''), ('x', 'tpu_custom_call', TILES)], {'flash', 'mosaic'}),
        ([], set()),
    ],
)
def test_the_kernels_of_attention_are_told_apart(calls, kernels):
    assert costs.attention_kernels(hlo.parse(toy_hlo.calling(*calls))) == kernels


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
    program = hlo.parse(
        toy_hlo.main('ROOT %w = (s32[], f32[4,8]{1,0}) while(%x), condition=%cond, body=%body', more=by_two)
    )
    main = program.computations['main']
    (loop,) = (i for i in main.values() if i.opcode == 'while')
    assert hlo.trips(program, loop, main) == 3  # 0, 2, 4


def test_a_counter_begins_where_the_loop_is_given_it():
    """A first turn that the compiler has taken out of the loop: from 1 to 4 are three."""
    loop = (
        '%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {\n  %p = (s32[], f32[4,8]{1,0}) parameter(0)\n'
        '  %one = s32[] constant(1)\n  %i = s32[] get-tuple-element(%p), index=0\n'
        '  %y = f32[4,8]{1,0} get-tuple-element(%p), index=1\n  %next = s32[] add(%i, %one)\n'
        '  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%next, %y)\n}\n'
        '%cond (p: (s32[], f32[4,8])) -> pred[] {\n  %p = (s32[], f32[4,8]{1,0}) parameter(0)\n'
        '  %i = s32[] get-tuple-element(%p), index=0\n  %four = s32[] constant(4)\n'
        '  ROOT %less = pred[] compare(%i, %four), direction=LT\n}\n'
    )
    for first, expected in ((0, 4), (1, 3), (4, 0)):
        program = hlo.parse(
            toy_hlo.main(
                f'%first = s32[] constant({first})',
                '%same = s32[] copy(%first)',
                '%given = (s32[], f32[4,8]{1,0}) tuple(%same, %x)',
                'ROOT %w = (s32[], f32[4,8]{1,0}) while(%given), condition=%cond, body=%body',
                more=loop,
            )
        )
        main = program.computations['main']
        assert hlo.trips(program, main['w'], main) == expected


def branch(name, place, inner=''):
    """A computation of a product of 4 x 8 by 8 x 16, two per multiply-add: 1,024 operations; `inner` comes before."""
    return (
        f'%{name} (x: f32[4,8]) -> f32[4,16] {{\n  %x = f32[4,8]{{1,0}} parameter(0)\n{inner}'
        f'  %k = f32[8,16]{{1,0}} constant({{...}})\n  ROOT %y = f32[4,16]{{1,0}} dot(%x, %k), '
        f'lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{place}/dot_general"}}\n}}\n'
    )


def chosen(place, *branches):
    """A conditional of these branches."""
    return (
        '%n = s32[] constant(0)\n  '
        f'%y = f32[4,16]{{1,0}} conditional(%n, {", ".join(["%x"] * len(branches))}), '
        f'branch_computations={{{", ".join(branches)}}}, metadata={{op_name="{place}cond"}}'
    )


def test_branches_count_as_often_as_the_share_of_the_conditional_says():
    none = '%none (x: f32[4,8]) -> f32[4,16] {\n  ROOT %z = f32[4,16]{1,0} constant({...})\n}\n'
    both = branch('local', 'local') + branch('global', 'global')
    program = hlo.parse(toy_hlo.main(chosen('share_250/', '%local', '%global'), more=both))
    assert costs.flops(program) == 1024
    assert [(work.times, work.flops) for work in costs.works(program)] == [(0.75, 1024.0), (0.25, 1024.0)]
    met = chosen('jit(step)/transpose(jvp(share_625))/', '%none', '%met')
    predicate = met.replace('branch_computations={%none, %met}', 'true_computation=%met, false_computation=%none')
    for conditional in (met, predicate):
        assert costs.flops(hlo.parse(toy_hlo.main(conditional, more=none + branch('met', 'met')))) == 0.625 * 1024
    unknown = hlo.parse(toy_hlo.main(chosen('', '%none', '%met'), more=none + branch('met', 'met')))
    assert costs.flops(unknown) == 1024
    for place, times in {'share_500/cond/share_250/': 0.25, 'share_500/cond/': 1}.items():
        inner = '  ' + chosen(place, '%none', '%deep') + '\n'
        outer = branch('outer', 'share_500', inner.replace('%y', '%w').replace('%n ', '%m ').replace('(%n', '(%m'))
        more = none + branch('deep', f'{place}cond') + outer
        program = hlo.parse(toy_hlo.main(chosen('share_500/', '%none', '%outer'), more=more))
        assert costs.flops(program) == 0.5 * (1 + times) * 1024


@pytest.mark.parametrize(('share', 'products'), [(0.25, 1), (0.5, 3)])
def test_the_compiler_keeps_the_share_of_a_conditional(share, products):
    def run(x, holds):
        return hlo.cond(share, holds, lambda x: jnp.tanh(x @ x), lambda x: x, x).sum()

    size = round(8 / share)  # the compilation cache does not tell programs apart by their names alone
    program = run if products == 1 else jax.value_and_grad(run)
    text = jax.jit(program).lower(jnp.ones((size, size)), True).compile().as_text()
    assert costs.flops(hlo.parse(text)) == share * products * 2 * size**3


# ------------------------------------------------------------------------------------------------ bytes
def moved(*lines, more=''):
    program = hlo.parse(toy_hlo.main(*lines, more=more))
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


def test_what_another_fusion_takes_as_it_is_is_read_by_what_uses_it():
    """A TPU's compiler wraps arrays that kernels and products read: a product that reads 128 bytes and writes 64."""
    more = """
%same (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %b = f32[4,8]{1,0} bitcast(%p)
}
%outer (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %f = f32[4,8]{1,0} fusion(%p), kind=kLoop, calls=%same
  ROOT %d = f32[4,4]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    assert moved('ROOT %f = f32[4,4]{1,0} fusion(%x), kind=kOutput, calls=%outer', more=more) == {'f': 128 + 64}


STARTED = {  # the shape of a result, the operation, and the bytes of an operand of 128 that move
    'a copy to the chip': ('f32[4,8]{1,0:S(1)}, f32[4,8]{1,0}, u32[]{:S(2)}', 'copy', 128),
    'a copy': ('f32[4,8]{1,0}, f32[4,8]{1,0}, u32[]{:S(2)}', 'copy', 256),
    'a slice to the chip': ('(f32[4,8]{1,0}), f32[1,8]{1,0:S(1)}, s32[]{:S(2)}', 'slice', 32),
    'a slice': ('(f32[4,8]{1,0}), f32[1,8]{1,0}, s32[]{:S(2)}', 'slice', 64),
    'a gather': ('f32[4,8]{1,0}, f32[16,8]{1,0}', 'all-gather', 128 + 512),
    'a scattered sum': ('(f32[4,8]{1,0}), f32[1,8]{1,0}', 'reduce-scatter', 128 + 32),
}


@pytest.mark.parametrize('case', STARTED)
def test_what_is_started_moves_its_operands_and_its_results_once(case):
    shape, kind, expected = STARTED[case]
    found = moved(f'%s = ({shape}) {kind}-start(%x)', f'ROOT %d = f32[4,8]{{1,0}} {kind}-done(%s)')
    assert found == {'s': pytest.approx(expected, abs=4)}  # a counter has four bytes


def test_the_largest_arrays_and_where_they_come_from():
    meta = 'metadata={op_name="jit(step)/transpose(jvp(Model))/decoder/stack/while/body/closed_call/mlp/add"}'
    lines = f'%y = f32[64,8]{{1,0}} broadcast(%x), {meta}', f'%z = f32[16,8]{{1,0}} slice(%y), {meta}'
    found = traffic.largest(hlo.parse(toy_hlo.main(*lines)))
    assert found == [('f32[64,8]', 'decoder/stack/mlp/add', 64 * 8 * 4)]


@pytest.mark.parametrize('quote', ["'", "\\'"])
def test_an_argument_has_the_name_of_its_parameter(quote):
    keys = ('params', 'decoder', 'stack', 'layer_0', 'attention', 'value', 'kernel')
    name = 'variables' + ''.join(f'[{quote}{key}{quote}]' for key in keys)
    assert hlo.place(name) == 'layer_0/attention/value/kernel'
