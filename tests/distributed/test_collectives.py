"""What devices exchange, from the text of compiled programs: texts by hand, and lines that the compilers write."""

import types

import numpy as np
import pytest

from tformer.distributed import collectives, hlo
from toy_hlo import main

MESH = types.SimpleNamespace(shape={'data': 2, 'fsdp': 2, 'tensor': 2})

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
    assert collectives.of(hlo.parse(compiled), MESH) == [
        collectives.Collective('all-gather', axes, 1, (size - 1) * 128.0)
    ]


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
    (found,) = collectives.of(hlo.parse(main(line, done)), MESH)
    assert (found.axes, found.count, found.bytes) == (('fsdp', 'tensor'), 1, SENT[line])


def test_a_permutation_sends_all_along_the_axes_that_it_crosses():
    line = '%r = f32[4,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}'
    assert collectives.of(hlo.parse(main(line)), MESH) == [
        collectives.Collective('collective-permute', ('fsdp',), 1, 128.0)
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
        found = collectives.of(hlo.parse(main(*lines, more=ASYNC)), MESH)
        assert found == [collectives.Collective('reduce-scatter', ('fsdp', 'tensor'), 1, 96.0, hidden=hidden)]
    start = (
        '%s = ((f32[4,8]{1,0}), f32[1,8]{1,0}) call-start(%x), async_execution_thread="sparsecore", to_apply=%wrapped'
    )
    done = 'ROOT %d = f32[1,8]{1,0} call-done(%s)'
    for lines, hidden in (((start, work, done), 96.0), ((work, start, done), 0.0)):
        found = collectives.of(hlo.parse(main(*lines, more=ASYNC)), MESH)
        assert found == [collectives.Collective('reduce-scatter', ('fsdp', 'tensor'), 1, 96.0, hidden=hidden)]
    start = f'%s = (f32[4,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start(%x), {FOURS}, dimensions={{0}}'
    done = 'ROOT %d = f32[16,8]{1,0} all-gather-done(%s)'
    for lines, hidden in (((start, work, done), 384.0), ((start, done, work), 0.0)):
        (found,) = collectives.of(hlo.parse(main(*lines)), MESH)
        assert (found.bytes, found.hidden) == (384.0, hidden)


PACE = collectives.Pace(lambda i, c: float({'k': 2.0, 'l': 1.0, 'm': 2.0}.get(i.name, 0.0)), lambda axes, far: 96.0)


def gathered(name, operand='%x'):
    """Lines that start and end a gather of 384 bytes, which takes 4 s at 96 bytes a second."""
    start = f'%{name} = (f32[4,8]{{1,0}}, f32[16,8]{{1,0}}) all-gather-start({operand}), {FOURS}, dimensions={{0}}'
    return start, f'%{name}_done = f32[16,8]{{1,0}} all-gather-done(%{name})'


def test_work_hides_no_more_of_a_collective_than_it_lasts():
    """Work of 2 s, `k` and `m`, and of 1 s, `l`; one gather travels after the other."""
    two, one, more = (f'%{name} = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call"' for name in 'klm')
    (s, s_done), (t, t_done) = gathered('s'), gathered('t')
    alone = f'%a = f32[16,8]{{1,0}} all-gather(%x), {FOURS}, dimensions={{0}}'
    for lines, hidden in (
        ((s, two, s_done), 2),  # of 4 s
        ((s, one, s_done, two), 1),
        ((s, t, two, s_done, t_done), 2),  # t waits for s, and then the device for t
        ((s, t, two, t_done, s_done), 2),
        ((s, s_done, t, two, t_done), 2),
        ((s, two, one, more, s_done), 4),
        ((s, two, alone, s_done), 2),  # it travels behind s, and the device waits for both
    ):
        (found,) = collectives.of(hlo.parse(main(*lines)), MESH, PACE)
        assert found.hidden == pytest.approx(hidden * 96), lines


def test_networks_of_their_own_do_not_wait_for_each_other():
    """Over pairs a collective travels ten times as fast, in 0.2 s, beside the one over all."""
    fast = PACE._replace(speed=lambda axes, far: 960.0 if len(axes) == 1 else 96.0)
    pairs = '%p = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add'
    (s, s_done), work = gathered('s'), '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    found = collectives.of(hlo.parse(main(s, work, pairs, s_done)), MESH, fast)
    hidden = {each.kind: each.hidden / each.bytes for each in found}
    assert hidden == {'all-gather': pytest.approx(2 / 4), 'all-reduce': 0}


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
            (each.count, each.bytes, each.hidden) for each in collectives.of(hlo.parse(main(*lines, more=more)), MESH)
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
        (found,) = collectives.of(hlo.parse(main('%t = token[] after-all()', *lines)), mesh)
        assert found == collectives.Collective(kind, ('data',), 1, share * 128, hidden * share * 128, far=True)


def test_what_is_sent_to_another_slice_ends_where_the_answer_is_there():
    """Work between the end of sending and that of receiving is beside it."""
    places = [[types.SimpleNamespace(slice_index=number)] * 2 for number in range(4)]
    mesh = types.SimpleNamespace(
        shape={'data': 4, 'fsdp': 2}, axis_names=('data', 'fsdp'), devices=np.array(places, dtype=object)
    )
    attributes = BETWEEN_SLICES.replace('{}', '_xla_megascale_transfer_type="ALL_REDUCE"')
    lines = [
        '%t = token[] after-all()',
        f'%s = (f32[4,8]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=1, {attributes}',
        f'%r = (f32[4,8]{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {attributes}',
        '%sd = token[] send-done(%s), channel_id=1',
        '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"',
        'ROOT %d = (f32[4,8]{1,0}, token[]) recv-done(%r), channel_id=2',
    ]
    (found,) = collectives.of(hlo.parse(main(*lines)), mesh)
    assert found.hidden == found.bytes == 192


def test_of_a_conditional_the_dearest_branch_counts():
    compiled = main(
        '%p = pred[] constant(true)',
        'ROOT %c = f32[1,8]{1,0} conditional(%p, %x, %x), true_computation=%idle, false_computation=%wrapped',
        more=ASYNC + '%idle (x: f32[4,8]) -> f32[4,8] {\n  ROOT %x = f32[4,8]{1,0} parameter(0)\n}\n',
    )
    assert [found.bytes for found in collectives.of(hlo.parse(compiled), MESH)] == [96.0]
