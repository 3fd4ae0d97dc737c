"""The plan of a mesh: which ones there are, which are compiled, and how they are compared."""

import concurrent.futures
import math

import pytest

from tformer import commands, config, errors
from tformer.commands import plan
from tformer.commands.planning import mesh_candidates, mesh_costs
from tformer.distributed.devices import Target

TPUS, NODES = Target('v5e', (4, 4)), Target('h100', (16,))


def model(family='decoder', rows=64, length=1024, **fields):
    sizes = {'vocab_size': 32000, 'emb_dim': 1024, 'mlp_dim': 4096, 'num_heads': 16, 'max_len': length}
    layers = {'num_decoder_layers': 24, 'dtype': 'bfloat16', 'position': 'rope'}
    return config.Config(
        model=config.Model(family=family, **sizes | layers | fields),
        data=config.Data(length=length),
        train=config.Train(objective='causal_lm', batch_size=rows, num_steps=10),
    )


ONE = dict.fromkeys(('pipeline', 'tensor', 'context', 'expert', 'fsdp', 'data'), 1)


def sizes(cfg, target=TPUS, fixed=frozenset()):
    return list(mesh_candidates.candidates(cfg, target, set(fixed)))


def asked(cfg, target=TPUS, **overrides):
    return plan.Asked('spec', {name.replace('__', '.'): str(value) for name, value in overrides.items()}, target, cfg)


def test_every_candidate_uses_all_devices_and_divides_the_rows_heads_layers_and_experts():
    found = sizes(model(num_experts=8))
    assert len(found) == len({tuple(sorted(mesh.items())) for mesh in found}) > 20
    for mesh in found:
        assert math.prod(mesh.values()) == 16
        assert 64 % (mesh['data'] * mesh['fsdp'] * mesh['expert'] * mesh['pipeline']) == 0
        assert 16 % mesh['tensor'] == 24 % mesh['pipeline'] == 8 % mesh['expert'] == 0
        assert mesh['context'] == 1  # rows of 1,024 tokens are not worth splitting
    assert {mesh['expert'] for mesh in found} == {1, 2, 4, 8}
    assert {mesh['expert'] for mesh in sizes(model())} == {1}
    assert {mesh['context'] for mesh in sizes(model(length=8192))} == {1, 2, 4, 8}
    assert {mesh['tensor'] for mesh in sizes(model(num_heads=6, emb_dim=768))} == {1, 2}
    assert {mesh['data'] * mesh['fsdp'] for mesh in sizes(model(rows=8))} == {1, 2, 4, 8}
    six = sizes(model(num_heads=12, emb_dim=768, rows=48), Target('h100', (6,)))
    assert {(mesh['tensor'], mesh['pipeline']) for mesh in six} >= {(1, 1), (6, 1), (3, 2), (2, 3), (1, 6)}


def test_axes_that_are_given_keep_their_sizes():
    cfg = config.override(model(), {'mesh.tensor': 4, 'mesh.fsdp': 2})
    assert sizes(cfg, fixed={'tensor', 'fsdp'}) == [
        {'pipeline': 1, 'tensor': 4, 'context': 1, 'expert': 1, 'fsdp': 2, 'data': 2},
        {'pipeline': 2, 'tensor': 4, 'context': 1, 'expert': 1, 'fsdp': 2, 'data': 1},
    ]
    assert sizes(config.override(model(), {'mesh.tensor': 3}), fixed={'tensor'}) == []
    cfg = config.override(model(), {'mesh.tensor': 4, 'mesh.data': 1, 'mesh.fsdp': -1})  # what is left, of any number
    found = sizes(cfg, fixed={'tensor', 'data', 'fsdp'})
    assert [(mesh['pipeline'], mesh['fsdp'], mesh['data'], mesh['tensor']) for mesh in found] == [
        (pipeline, 4 // pipeline, 1, 4) for pipeline in (1, 2, 4)
    ]
    for axis in ('tensor', 'pipeline', 'expert'):
        experts = {'num_experts': 16} if axis == 'expert' else {}
        deep = config.override(model(num_decoder_layers=16, **experts), {f'mesh.{axis}': -1, 'mesh.data': 1})
        assert ONE | {axis: 16} in sizes(deep, fixed={axis, 'data'})


def test_a_mesh_over_slices_has_the_axis_that_crosses_them():
    """Of two slices of four devices each; only that axis is slow."""
    target = Target('v5e', (2, 2), 2)
    found = sizes(model(), target)
    assert found and all(mesh['data'] % 2 == 0 for mesh in found)
    assert {mesh['fsdp'] for mesh in sizes(config.override(model(), {'mesh.dcn_axis': 'fsdp'}), target)} == {2, 4, 8}
    mesh = ONE | {'data': 2, 'fsdp': 4}
    gradient = 2 * 2 * 24 * (4 * 1024**2 + 3 * 1024 * 4096) / 4 / 2  # of a device, over two
    slower = mesh_costs.expected(model(), target, mesh) - mesh_costs.expected(model(), Target('v5e', (2, 4)), mesh)
    assert slower == pytest.approx(gradient / target.device.far_bytes - gradient / target.device.near_bytes)


@pytest.mark.parametrize(
    ('fields', 'line'),
    [
        ({'train.microbatches': 3}, r'^train\.microbatches=3 does not divide train\.batch_size=64; nearest'),
        ({'model.num_heads': 5}, r'^model\.num_heads=5 does not divide model\.emb_dim=1024'),
        ({'mesh.data': 0}, '^mesh: sizes must be positive'),
        ({'mesh.expert': 2}, r'^mesh\.expert=2 splits experts, but model\.num_experts=None'),
        ({'mesh.tensor': 32}, r'^mesh\.tensor=32 do not fit .* of v5e:4x4: 32 are asked for, at most 16 can be$'),
        (
            {'mesh.data': 16, 'train.batch_size': 40},
            r'^train\.batch_size=40 is not a multiple of the rows .* divide; nearest that is: 32$',
        ),
    ],
)
def test_where_there_is_no_mesh_the_line_says_why(fields, line):
    cfg = config.override(model(), fields)
    with pytest.raises(errors.UserError, match=line):
        mesh_candidates.meshes(cfg, TPUS, {name.partition('.')[2] for name in fields if name.startswith('mesh.')})


def test_where_no_sensible_mesh_divides_others_do():
    """One row of few tokens, whose 16 devices share heads and tokens; seven rows and three heads."""
    assert ONE | {'tensor': 8, 'context': 2} in mesh_candidates.meshes(model(rows=1), TPUS, set())
    odd = model(rows=7, num_heads=3, head_dim=64)
    found = mesh_candidates.meshes(odd, Target('h100', (8,)), set())
    assert found and all(mesh['tensor'] * mesh['context'] == 8 for mesh in found)


def best(cfg, target):
    return min(sizes(cfg, target), key=lambda mesh: mesh_costs.expected(cfg, target, mesh))


def test_what_is_compiled_first():
    """A small model's gradients cost little beside its activations: rows alone are split. A state that fits no device
    is split. Between nodes less is sent by splitting parameters within them."""
    small = best(model(num_decoder_layers=2), TPUS)
    assert small['data'] * small['fsdp'] == 16
    large = best(model(num_decoder_layers=64, emb_dim=8192, mlp_dim=32768, num_heads=64), NODES)
    assert large['fsdp'] * large['tensor'] * large['pipeline'] >= 8
    one = dict.fromkeys(('pipeline', 'context', 'expert', 'data'), 1)
    within, between = (one | {'tensor': tensor, 'fsdp': 16 // tensor} for tensor in (8, 16))
    assert mesh_costs.expected(model(), NODES, within) < mesh_costs.expected(model(), NODES, between)


def test_what_a_mesh_costs_by_hand():
    """On rings of 100 GB/s, in two bytes a number: parameters are gathered twice and gradients scattered once a tick
    over fsdp, and their shares summed over data; a layer sums four times over tensor. A device reads the weights three
    times a tick, updates its own and those of its tables, and moves the stream. Of 9 ticks one is idle where 8 parts
    pass through two stages."""
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096)
    held = weights + 32000 * 1024
    stream = 64 / 8 * 1024 * 1024 * 24 / 2  # of a device, with the rows split in 8 and the rest in 2
    products = 6 * weights * 64 * 1024 / 16 / 197e12
    for mesh, sent, moved, idle in (
        ({'data': 16}, 2 * 2 * weights * 15 / 16, 12 * weights + 110 * held + 100 * stream, 0),
        ({'fsdp': 16}, 3 * 2 * weights * 15 / 16, 12 * weights + 110 * held / 16 + 100 * stream, 0),
        (
            {'data': 4, 'fsdp': 4}, (3 * 2 * weights + 2 * 2 * weights / 4) * 3 / 4,
            12 * weights + 110 * held / 4 + 100 * stream, 0,
        ),
        (
            {'data': 8, 'tensor': 2}, 2 * 2 * weights / 2 * 7 / 8 + 4 * 2 * 2 * 2 * stream / 2,
            (12 * weights + 110 * held) / 2 + 200 * stream, 0,
        ),
        (
            {'fsdp': 8, 'pipeline': 2}, 9 * 3 * 2 * weights / 2 * 7 / 8 + 2 * 2 * stream / 24,
            12 * 9 * weights / 2 + 110 * (weights / 2 + 32000 * 1024) / 8 + 100 * stream, products / 8,
        ),
    ):  # fmt: skip
        found = mesh_costs.expected(model(), TPUS, ONE | mesh)
        assert found == pytest.approx(products + sent / 100e9 + moved / 819e9 + idle), mesh


def test_what_splitting_the_length_costs_by_hand():
    """Between two turns, thrice, a device sends half of the keys and values in two bytes, and once their gradients in
    four, which go home in two; with a quarter of the heads. Parameters are split over all sixteen. Blocks that a causal
    mask hides are computed, too: half of 18 products of two lengths and the width. An encoder has no such mask."""
    cfg = model(length=8192, rows=16, num_kv_heads=4)
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096)
    products = 6 * weights * 16 * 8192 / 16 / 197e12
    stream = 16 / 8 * 8192 * 1024 * 24
    sent = 2 * (3 * 2 + 4 + 2) * stream * 4 / 16 / 2 + 3 * 2 * weights * 15 / 16
    moved = 12 * weights + 110 * (weights + 32000 * 1024) / 16 + 100 * stream / 2
    unseen = 9 * 24 * 16 * 8192**2 * 1024 / 16 / 197e12
    found = mesh_costs.expected(cfg, TPUS, ONE | {'context': 2, 'fsdp': 8})
    assert found == pytest.approx(products + sent / 100e9 + moved / 819e9 + unseen)
    encoder = model('encoder', length=8192, rows=16, num_kv_heads=4, num_encoder_layers=24)
    assert found - mesh_costs.expected(encoder, TPUS, ONE | {'context': 2, 'fsdp': 8}) == pytest.approx(unseen)


def test_a_gpu_gathers_parameters_beside_its_products():
    """Between nodes, at 50 GB/s: what takes longer than the products is left."""
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096)
    moved = 12 * weights + 28 * (weights + 32000 * 1024) / 16
    for rows in (64, 4096):
        cfg = model(rows=rows)
        products, stream = 6 * weights * rows * 1024 / 16 / 989e12, rows / 16 * 1024 * 1024 * 24
        longest = max(products, 3 * 2 * weights * 15 / 16 / 50e9)
        found = mesh_costs.expected(cfg, NODES, ONE | {'fsdp': 16})
        assert found == pytest.approx(longest + (moved + 100 * stream) / 3.35e12)


@pytest.mark.parametrize(
    ('dispatch', 'ways', 'computed', 'slots'),
    [
        ('dropless', 1, 2, 2),
        ('dropless', 2, 2, 4),  # all tokens of two devices may choose the same
        ('dropless', 8, 2, 8),  # the one expert of a device, for all tokens of eight
        ('capacity', 8, 2.5, 2.5),
        ('capacity', 1, 2.5, 40),  # of the tokens of all 16 devices
    ],
)
@pytest.mark.parametrize('target', ['v5e:4x4', 'h100:16'])
def test_experts_are_computed_for_tokens_and_hidden_vectors_are_of_all_slots(
    monkeypatch, target, dispatch, ways, computed, slots
):
    """Of eight, two for each token; of each empty slot 90 bytes are moved for each of 4,096 numbers on a GPU."""
    cfg, target = model(num_experts=8, expert_dispatch=dispatch), Target.parse(target)
    mesh = ONE | {'expert': ways, 'data': 16 // ways}
    one = 6 * 24 * 3 * 1024 * 4096 * 64 * 1024 / 16 / target.device.flops['bfloat16']
    slot = 24 * 64 * 1024 / 16 * 4096 * mesh_costs.SLOT[target.device.platform] / target.device.bandwidth
    monkeypatch.setattr(mesh_costs, 'LAYER', 0)
    found = mesh_costs.expected(cfg, target, mesh)
    monkeypatch.setattr(mesh_costs, '_computed', lambda *_: computed + 1)
    monkeypatch.setattr(mesh_costs, '_slots', lambda *_: slots + 1)
    assert mesh_costs.expected(cfg, target, mesh) - found == pytest.approx(one, rel=1e-4)
    monkeypatch.setattr(mesh_costs, '_slots', lambda *_: slots + 2)
    assert mesh_costs.expected(cfg, target, mesh) - found == pytest.approx(one + slot, rel=1e-4)


def test_a_layer_takes_a_least_time_however_few_tokens_it_has(monkeypatch):
    """Of 4 layers in two stages a device computes 2 for each of 9 ticks, and else all 4 once."""
    small = config.override(model(length=16), {'model.num_decoder_layers': 4})
    products = 6 * 4 * (4 * 1024**2 + 3 * 1024 * 4096) * 64 * 16 / 16 / 197e12
    work = products + 100 * 64 * 16 * 1024 * 4 / 16 / 819e9  # of all ticks but the one that is idle
    for mesh, waits in (
        ({'pipeline': 2, 'fsdp': 8}, (2 * 8 * mesh_costs.LAYER - work) * 9 / 8),
        ({'data': 2, 'fsdp': 8}, 4 * mesh_costs.LAYER - work),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(mesh_costs, 'LAYER', 0)
            without = mesh_costs.expected(small, TPUS, ONE | mesh)
        assert mesh_costs.expected(small, TPUS, ONE | mesh) - without == pytest.approx(waits)


def test_a_model_of_two_stacks_has_the_stream_of_both_lengths():
    both = config.override(
        model(family='encoder_decoder', num_encoder_layers=6),
        {'train.objective': 'seq2seq', 'data.encoder_length': 512},
    )
    alone = config.override(model(), {'data.length': 1024 + 512 // 4})
    mesh = {'pipeline': 1, 'tensor': 2, 'context': 1, 'expert': 1, 'fsdp': 8, 'data': 1}
    assert (
        mesh_costs.kept_bytes(both, mesh) == mesh_costs.kept_bytes(alone, mesh) == 17 * 2 * 64 * 1152 * 24 * 1024 / 16
    )


def test_a_batch_of_so_many_tokens_has_the_rows_of_its_longest():
    mesh = ONE | {'data': 4, 'fsdp': 4}
    tokens, rows = config.override(model(), {'data.batch_tokens': 1024 * 48 + 100}), model(rows=48)
    assert mesh_costs.kept_bytes(tokens, mesh) == mesh_costs.kept_bytes(rows, mesh)
    assert mesh_costs.expected(tokens, TPUS, mesh) == mesh_costs.expected(rows, TPUS, mesh)


def test_data_alone_and_fsdp_alone_are_among_those_that_are_compiled():
    cfg = model(num_decoder_layers=24, emb_dim=8192, mlp_dim=32768, num_heads=64)
    ranked = sorted(sizes(cfg, NODES), key=lambda mesh: mesh_costs.expected(cfg, NODES, mesh))
    plain = [mesh for mesh in ranked if 16 in (mesh['data'], mesh['fsdp'])]
    chosen = mesh_candidates.first(ranked, 6)
    assert len(plain) == 2 and not [mesh for mesh in plain if mesh in ranked[:6]]
    assert chosen == ranked[:4] + plain
    assert mesh_candidates.first(ranked, 1) == ranked[:1] and mesh_candidates.first(ranked, 100) == ranked


def figures(seconds, peak, limit=100.0):
    return {
        'peak_bytes': peak, 'memory_bytes': limit, 'seconds': {'step': seconds}, 'mfu': 0.5, 'collectives': [],
    }  # fmt: skip


def given_peaks(monkeypatch, peak):
    """Makes attempts of the peaks, in GiB, that a function of the overrides gives, on devices of 100; returns them."""
    tried = []

    def compiled(asked, overrides):
        tried.append(overrides)
        return plan.Attempt(overrides, figures(1.0, peak(overrides)))

    monkeypatch.setattr(plan, 'compiled', compiled)
    return tried


FSDP = ONE | {'fsdp': 16}


def test_a_mesh_that_does_not_fit_is_tried_with_less_to_keep(monkeypatch):
    peaks = {(None, None): 300.0, ('dots', None): 200.0, ('full', None): 150.0, ('full', '2'): 90.0}
    tried = given_peaks(monkeypatch, lambda given: peaks[given.get('model.remat'), given.get('train.microbatches')])
    assert plan.lowered(asked(model(), train__seed=1), FSDP).figures['peak_bytes'] == 90.0
    assert [given.get('model.remat') for given in tried] == [None, 'dots', 'full', 'full']
    assert [given.get('train.microbatches') for given in tried] == [None, None, None, '2']
    assert all(given['mesh.fsdp'] == '16' and given['train.seed'] == '1' for given in tried)


def test_what_fails_for_another_reason_than_memory_is_not_tried_with_less(monkeypatch):
    refused = plan.Attempt({}, {}, 'tformer: model.activation=star_relu is unknown')
    tried = []
    monkeypatch.setattr(plan, 'compiled', lambda asked, given: tried.append(given) or refused)
    assert plan.lowered(asked(model()), FSDP) is refused and len(tried) == 1
    with pytest.raises(errors.UserError, match=r'^model\.activation=star_relu is unknown$'):
        plan.table([refused])
    too_large = plan.Attempt({}, {}, 'tformer: v5e:4x4: the program needs 21.30G of the 15.75G that ...')
    assert too_large.excess == pytest.approx(21.3 / 15.75) and refused.excess == 0


def test_what_is_computed_again_is_chosen_unless_it_is_given(monkeypatch):
    """A config's own model.remat is where a recipe begins; only the command line holds it. What cannot fit by far is
    not compiled: 64 rows of 1,024 tokens of 24 layers, 100 times as wide."""
    found = given_peaks(monkeypatch, lambda given: 300.0)

    def tried(overrides, **fields):
        cfg = config.override(model(**fields), {**overrides, 'train.batch_size': 16})
        found.clear()
        assert not plan.lowered(plan.Asked('spec', overrides, TPUS, cfg), FSDP).fits
        return [given.get('model.remat') for given in found]

    assert tried({}) == [None, 'dots', 'full']
    assert tried({}, remat='full') == ['None', 'dots', None]
    assert tried({}, emb_dim=102400, head_dim=64) == ['dots', 'full']
    assert tried({'model.remat': 'dots'}) == ['dots']


@pytest.mark.parametrize(
    ('fields', 'stages', 'numbers'),
    [
        ({}, 1, ['4', '8']),  # of 64 rows on a device: three times too much needs three parts or more
        ({'train.batch_size': 768}, 1, ['3', '4', '6']),  # of 48
        ({'train.microbatches': 2}, 1, ['8', '16']),
        ({'data.batch_tokens': 1024 * 1000}, 1, ['4', '8']),  # of 62, which become a multiple of them
        ({}, 4, ['4', '8']),  # of 256, four in each part
        ({'train.batch_size': 32}, 4, []),  # of 8: two parts are too few
    ],
)
def test_more_microbatches_are_tried_by_what_does_not_fit(monkeypatch, fields, stages, numbers):
    """A step needs 300 of 100, of which 50 are there whatever their number."""
    cfg = config.override(model(rows=1024), fields)
    own = cfg.train.microbatches
    tried = given_peaks(monkeypatch, lambda given: 50 + 250 * own / int(given.get('train.microbatches', own)))
    mesh = {f'mesh.{axis}': str(size) for axis, size in (ONE | {'fsdp': 16 // stages, 'pipeline': stages}).items()}
    assert plan.fitting(asked(cfg), mesh).fits == bool(numbers)
    assert [given.get('train.microbatches') for given in tried] == [None, *numbers]
    tried.clear()
    assert not plan.fitting(asked(cfg, train__microbatches=own), mesh).fits and len(tried) == 1


def test_the_table_begins_with_the_fastest_that_fits_and_ends_with_its_flags():
    large = plan.Attempt({'mesh.data': '16', 'mesh.fsdp': '1'}, figures(0.5, 120.0))
    slow = plan.Attempt({'mesh.data': '1', 'mesh.fsdp': '16'}, figures(2.0, 80.0))
    fast = {'train.seed': '1', 'mesh.data': '4', 'mesh.fsdp': '4', 'model.remat': 'full', 'mesh.rules': 'fsdp'}
    fast = plan.Attempt(fast, figures(1.0, 90.0))
    refused = plan.Attempt(
        {'mesh.tensor': '2'}, {}, 'tformer: v5e:4x4: the program needs 21.30G of the 15.75G that ...'
    )
    lines = plan.table([large, refused, slow, fast], {'mesh.fsdp'}).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ['1', '2']
    assert lines[1].endswith('  data 4, fsdp 4, remat full, rules fsdp') and 'does not fit' in lines[3]
    assert lines[4].endswith('tensor 2: does not fit: 21.30G of 15.75G')
    flags = ('train.seed=1', 'mesh.data=4', 'mesh.fsdp=4', 'model.remat=full', 'mesh.rules=fsdp')
    assert lines[-1] == ' '.join(('the fastest:', *(f'--config.{flag}' for flag in flags)))
    with pytest.raises(errors.UserError, match=r'^no mesh that was compiled fits'):
        plan.table([large, refused])


def test_the_flags_undo_what_the_config_splits():
    """An axis of one device is named unless the config has it so; other fields are named, whatever they are."""
    given = {'train.seed': '1', 'mesh.data': '16', 'mesh.fsdp': '1', 'mesh.tensor': '1'}
    line = plan.table([plan.Attempt(given, figures(1.0, 90.0))], {'mesh.tensor'}).splitlines()[-1]
    assert line == 'the fastest: --config.train.seed=1 --config.mesh.data=16 --config.mesh.fsdp=1'


def test_the_fastest_mesh_is_compiled_with_each_other_choice():
    def tried(cfg, target=TPUS, tensor='1', pipeline='1', **overrides):
        given = {'mesh.fsdp': '8', 'mesh.tensor': tensor, 'mesh.pipeline': pipeline}
        found = plan.variants(asked(cfg, target, **overrides), given)
        assert all(len(each) == 1 for each in found)
        return [value for each in found for value in each.values()]

    kept = {'model__remat': 'None'}
    assert tried(model(vocab_size=32)) == ['dots', 'full', 'mosaic', 'chunked', 'reference']
    assert tried(model(vocab_size=32, remat='dots'))[:2] == ['None', 'full']
    assert tried(model(vocab_size=32), NODES, **kept) == ['triton', 'chunked', 'reference', 'False']
    assert tried(model(vocab_size=32, num_decoder_layers=96), NODES, **kept)[-1] == 'reference'  # too many to unroll
    assert tried(model(vocab_size=32, num_decoder_layers=16), **kept)[-1] == 'False'
    assert tried(model(vocab_size=32, num_decoder_layers=16), pipeline='2', **kept)[-1] == 'reference'  # scanned anyway
    assert tried(model(vocab_size=32, num_decoder_layers=96), NODES, pipeline='2', **kept)[-1] == 'False'
    assert tried(model(vocab_size=32, scan_layers=False), NODES, **kept)[-1] == 'reference'
    assert tried(model(vocab_size=32, attention_softcap=50.0), NODES, **kept)[0] == 'chunked'  # not cuDNN
    assert tried(model(vocab_size=32, attention_kernel='reference'), **kept) == ['flash', 'mosaic', 'chunked']
    assert tried(model(), **kept) == ['mosaic', 'chunked', 'reference', 'None']  # logits of a row are 125 MiB
    assert tried(model(), model__attention_kernel='auto', **kept) == ['None']
    held = {**kept, 'model__attention_kernel': 'auto', 'train__loss_chunk': 64}
    assert tried(model(), **held) == []
    assert tried(model(), tensor='2', **held) == ['fsdp_tp_sp']
    assert tried(model(), tensor='2', **held, mesh__rules='fsdp_tp') == []


def test_choices_that_are_faster_are_made_together_while_that_is_faster(monkeypatch):
    """Scanned layers cost 0.3 s, logits in chunks 0.1; to compute all again saves 0.2, but not where layers are not
    scanned. Kernels are slower. Nothing is left for a third round."""
    tried = []

    def compiled(asked, given):
        scanned, full = given.get('model.scan_layers') != 'False', given.get('model.remat') == 'full'
        seconds = 1 + 0.3 * scanned + 0.1 * (given.get('train.loss_chunk') != 'None')
        seconds += (-0.2 if scanned else 0.2) * full + 0.5 * ('model.attention_kernel' in given)
        peak = 150.0 if given.get('model.remat') == 'None' and 'train.microbatches' not in given else 90.0
        tried.append((round(seconds, 2), given.get('model.remat'), given.get('train.microbatches')))
        return plan.Attempt(given, figures(seconds, peak))

    monkeypatch.setattr(plan, 'compiled', compiled)
    given = {'mesh.fsdp': '16', 'model.remat': 'dots', 'train.microbatches': '2', 'train.seed': '1'}
    cfg = asked(model(), NODES, train__seed=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        best = plan.improved(cfg, plan.Attempt(given, figures(1.4, 90.0)), pool)
        too_large = plan.Attempt(given, figures(1.4, 190.0))
        assert plan.improved(cfg, too_large, pool) is too_large
    assert best.overrides == {**given, 'model.scan_layers': 'False', 'train.loss_chunk': 'None'}
    assert tried == [
        *((1.4, 'None', None), (1.4, 'None', '2'), (1.2, 'full', None)),  # each with as many parts as it needs
        *[(1.9, 'dots', '2')] * 3,  # kernels
        *((1.3, 'dots', '2'), (1.1, 'dots', '2')),  # logits, layers
        *((1.3, 'full', None), (1.0, 'dots', '2')),  # beside layers that are not scanned
    ]


@pytest.mark.parametrize('given', ['--most=0', '--jobs=-1'])
def test_numbers_of_meshes_and_processes_are_positive(given):
    flags = commands.COMMANDS['plan'].flag_values()
    flags(['tformer', '--device=h100:8', '--config=configs/gpt2.py', given])
    with pytest.raises(errors.UserError, match=f'^{given} must be at least 1$'):
        plan.run([], {}, flags)


def test_the_line_is_of_the_meshes_that_came_nearest():
    """Most meshes of three slices do not split data over them; those that do need another number of rows."""
    with pytest.raises(errors.UserError, match=r'^train\.batch_size=8 is not a multiple .* nearest that is: 12$'):
        mesh_candidates.meshes(model(rows=8), Target.parse('v5e:2x2:3'), set())
