"""A cluster on one machine: programs that are compiled for devices that are not here, and what is said of them."""

import json
import os
import re
import subprocess
import sys
import types

import jax
import pytest

import toy_hlo
from lives import HANG
from places import ROOT
from tformer import config, errors
from tformer.commands import inspect as inspection
from tformer.commands.planning import dry_run, dry_run_report, out_of_memory
from tformer.config import Config, Data, Model
from tformer.distributed import costs, devices, hlo
from tformer.distributed.devices import Target
from tformer.model import build
from tformer.training import dummy_batch, flops


# ------------------------------------------------------------------------------------------------ by formula
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
CPUS = Target('cpu', (8,))


def compiled(**fields):
    run = dry_run.compile_program('train step', small(**fields), CPUS)
    return run, {(row.kind, row.axes): row.bytes for row in run.collectives}


def parameters(run):
    """Returns the number of parameters."""
    batch = dummy_batch.random_batch(run.config)
    params = jax.eval_shape(build(run.config.model).init, jax.random.key(0), batch)['params']
    return sum(x.size for x in jax.tree.leaves(params))


def test_data_parallel_steps_reduce_every_gradient_once():
    run, sent = compiled(mesh={'data': 8})
    assert sent.keys() == {('all-reduce', ('data',))}
    assert sent['all-reduce', ('data',)] == pytest.approx(2 * 7 / 8 * 4 * parameters(run), rel=0.05)
    done = 8 * costs.flops(run.program)
    assert done == pytest.approx(run.asked, rel=0.02)


@pytest.mark.slow
def test_fsdp_gathers_each_layer_forward_and_again_backward():
    run, sent = compiled(mesh={'data': 1, 'fsdp': 8}, remat='full')
    assert {axes for _, axes in sent} == {('fsdp',)}
    gathered = 7 / 8 * 4 * 2 * LAYERS * LAYER
    assert sent['all-gather', ('fsdp',)] == pytest.approx(gathered, rel=0.05)
    # The CPU has no reduce-scatter: an all-reduce of twice the bytes.
    assert sent['all-reduce', ('fsdp',)] == pytest.approx(2 * 7 / 8 * 4 * parameters(run), rel=0.05)
    assert 8 * costs.flops(run.program) > 1.2 * run.asked  # the forward pass of the layers is made again

    norms = (2 * LAYERS + 1) * D  # whole on every device; all else is split, and so are both moments
    held = 4 * (norms + (parameters(run) - norms) / 8)
    assert run.held['parameters'] <= 1.05 * held
    assert run.held['optimizer state'] <= 1.05 * 2 * held + 64
    memory = run.executable.memory_analysis()
    assert memory.argument_size_in_bytes <= 1.05 * 3 * held + run.held['batch'] + 4096
    assert memory.argument_size_in_bytes < run.peak
    said = dry_run_report.describe(run)
    assert said.startswith('\ntrain step of 16 rows on cpu:8 (fsdp 8), rules fsdp_tp, compiled in ')
    assert re.search(r'\n  all-gather +fsdp +[\d,]+ +[\d,.]+ (GiB|B) +0%\n', said)
    assert 'MFU' not in said  # a CPU has no published peak
    figures = json.loads(json.dumps(dry_run_report.figures(run)))
    assert figures['peak_bytes'] == run.peak and figures['mesh'] == {'fsdp': 8} and figures['seconds'] is None
    assert figures['model_flops'] == run.asked == asked(small())


def test_tensor_parallel_layers_reduce_activations():
    """Forward after attention and after the feed-forward. Backward before them: the CPU's compiler reduces what comes
    from queries, keys and values one by one, three times, where Shoeybi et al. 2019 (section 3) reduce their sum."""
    _, sent = compiled(mesh={'data': 2, 'tensor': 4})
    assert {axes for _, axes in sent} == {('data',), ('tensor',)}
    activations = 4 * (16 / 2) * T * D
    once = 2 * 3 / 4 * activations
    layers = LAYERS * (2 + 3 + 1) * once
    assert sent['all-reduce', ('tensor',)] == pytest.approx(layers + once, rel=0.05)  # and before the logits


@pytest.mark.slow
def test_a_pipeline_is_compiled_as_a_pipeline():
    """Microbatches pass from stage to stage, no device holds the layers of another stage, and stages share the tables;
    the last norm is whole. Gradients of a stage's layers are summed over `data` once, and not at every tick."""
    run, sent = compiled(mesh={'data': 2, 'pipeline': 4}, num_decoder_layers=4)
    assert ('collective-permute', ('pipeline',)) in sent
    assert run.held['parameters'] == 4 * ((parameters(run) - D) / 4 + D)
    assert 4 * LAYER < sent['all-reduce', ('data',)] < 1.1 * run.held['parameters']


def test_generation_is_compiled_as_two_programs():
    """Of a prompt of 16 tokens but its last, without logits, and of that one with its logits; a device has 3 of the 23
    texts that are written together, or 2."""
    cfg = config.override(small(mesh={'data': 8}), {'decode.max_len': 16, 'decode.batch_size': 23})
    prefill, step = (dry_run.compile_program(name, cfg, CPUS) for name in ('prefill', 'decode step'))
    rows, weights, pairs = 3, LAYERS * LAYER, 2 * LAYERS * D * 32  # of 16 + 16 slots
    assert costs.flops(step.program) == rows * 2 * (weights + D * V + pairs)
    assert costs.flops(prefill.program) == rows * 15 * 2 * (weights + pairs)


@pytest.mark.slow
def test_devices_that_split_the_tokens_of_a_row_hold_and_read_a_part_of_its_slots():
    """Of 16 + 16, eight of each of eight rows. Nothing of a prompt but positions is gathered; in a step each layer's
    largest score, sum of weights and sum of values are those of all parts."""
    cfg = small(mesh={'data': 2, 'context': 4, 'rules': 'tp'})  # parameters are whole
    cfg = config.override(cfg, {'decode.max_len': 16, 'decode.batch_size': 16})
    prefill, step = (dry_run.compile_program(name, cfg, CPUS) for name in ('prefill', 'decode step'))
    cache = LAYERS * 2 * 8 * D * 8 * 4
    others = 8 * (1 + 1 + 32) * 4 + 8 * 32 + 4  # tokens and positions, prefix, index
    arguments = step.executable.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(step.held['parameters'] + cache + others, rel=0.01)
    assert sum(row.bytes for row in prefill.collectives if row.kind == 'all-gather') < cache / 100
    assert [(row.kind, row.axes) for row in step.collectives] == [('all-reduce', ('context',))]
    assert step.collectives[0].count <= 3 * LAYERS + 1
    assert costs.flops(step.program) < 8 * 2 * (LAYERS * LAYER + D * V + 2 * LAYERS * D * 32 / 2)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{'data': 8}, pytest.param({'data': 4, 'tensor': 2}, marks=pytest.mark.proof)])
def test_generation_in_eight_bits_holds_integers_and_scales_in_the_place_of_kernels(mesh):
    """A byte for each number of a product, and four for each of its outputs: of norms there are none. Those of the
    layers are there twice, as steps read each layer's by themselves."""
    cfg = small(mesh=mesh)
    plain, rounded = (
        dry_run.compile_program('decode step', config.override(cfg, {'decode.quantization': kind}), CPUS)
        for kind in (None, 'int8')
    )
    outputs = 2 * LAYERS * (3 * D + D + F + D) + V
    share = mesh.get('tensor', 1)
    more = (rounded.held['parameters'] - plain.held['parameters']) * share
    bytes_ = (1 - 4) * (2 * LAYERS * LAYER + D * V) + 4 * outputs
    assert more == pytest.approx(bytes_, rel=0.05 if share > 1 else 0)
    caches = config.override(cfg, {'decode.cache_quantization': 'int8'})
    arguments = [
        run.executable.memory_analysis().argument_size_in_bytes
        for run in (plain, dry_run.compile_program('decode step', caches, CPUS))
    ]
    assert arguments[1] < 0.9 * arguments[0]


# ------------------------------------------------------------------------------------------------ too large
TPU_SAYS = (
    'RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.30G of 15.75G '
    'hbm. Exceeded hbm capacity by 5.55G.\n\nTotal hbm usage >= 21.56G:\n    reserved        258.00M \n\n'
    'Largest program allocations in hbm:\n\n  1. Size: 4.50G\n     Operator: op_name="jit(step)/jvp(DecoderOnly)/'
    'decoder/stack/while/body/dynamic_update_slice"\n     Shape: f32[12,8,12,1024,1024]{4,3,2,1,0:T(8,128)}\n'
    '     Unpadded size: 4.50G\n     ==========================\n\n  2. Size: 1.53G\n     Operator: op_name='
    '"jit(step)/jvp(DecoderOnly)/head/embed.logits/dot_general"\n     Shape: f32[8,1024,50257]{2,1,0:T(8,128)}\n'
)


def test_a_program_that_is_too_large_is_refused_in_a_line_that_says_what_would_help():
    cfg = small(num_decoder_layers=12, vocab_size=50257)
    cfg = config.override(cfg, {'data.length': 1024, 'model.max_len': 1024, 'train.loss_chunk': None})
    cfg = config.override(cfg, {'model.attention_kernel': 'reference'})
    said = str(out_of_memory.refusal(cfg, Target('v5e', (2, 4)), TPU_SAYS, None, True))
    assert said == (
        'v5e:2x4: the program needs 21.30G of the 15.75G that a device has; the largest: 4.50G f32[12,8,12,1024,1024] '
        '(DecoderOnly/decoder/stack/dynamic_update_slice), 1.53G f32[8,1024,50257] (DecoderOnly/head/embed.logits/'
        'dot_general); '
        'lower it by model.attention_kernel, model.remat, train.loss_chunk, train.microbatches, mesh.fsdp, mesh.tensor'
    )
    failed = str(out_of_memory.refusal(cfg, CPUS, 'INTERNAL: no\nidea', None, True))
    assert 'the compiler failed: INTERNAL: no idea' in failed
    cfg = config.override(cfg, {'decode.cache_quantization': 'int8'})
    said = str(out_of_memory.refusal(cfg, Target('v5e', (2, 4)), TPU_SAYS, None, False))
    assert said.endswith('; lower it by decode.batch_size, decode.prefill_chunk, mesh.data, mesh.tensor')


def cures(sizes, device='h100', **fields):
    cfg = small(num_decoder_layers=12, vocab_size=50257, num_heads=16, emb_dim=1024, dtype='bfloat16', **fields)
    cfg = config.override(cfg, {'data.length': 1024, 'model.max_len': 1024, 'train.loss_chunk': None})
    said = out_of_memory.advice(cfg, Target(device, (8,)), [sizes], True)
    return said.removeprefix('lower it by ').split(', ')[:-3]


@pytest.mark.parametrize(
    ('sizes', 'fields', 'first'),
    [
        ((12, 1, 1024, 1024), {}, ['model.remat']),
        ((12, 1, 1024, 1024), {'remat': 'full'}, []),
        ((8, 16, 1024, 1024), {'attention_kernel': 'xla', 'remat': 'full'}, ['model.attention_kernel']),
        ((19, 3, 8, 1024, 1024), {'mesh': {'pipeline': 4}}, ['model.remat']),
        ((19, 3, 8, 1024, 1024), {'mesh': {'pipeline': 4}, 'remat': 'dots'}, []),
        ((8, 1024, 4096), {'scan_layers': False}, ['model.remat']),
        ((8192, 50304), {'remat': 'full'}, ['train.loss_chunk']),
        ((8192, 50257), {'remat': 'full'}, ['train.loss_chunk']),
        ((8192, 50176), {'remat': 'full'}, []),
    ],
)
def test_what_is_advised_cuts_the_arrays_that_are_large(sizes, fields, first):
    """The residual stream of as many tokens as it is wide is not an array of pairs; a stage of a pipeline has its own
    layers behind its ticks; GPUs pad the vocabulary."""
    assert cures(sizes, **fields) == first


def test_where_the_compiler_names_no_array_the_largest_of_the_traced_program_stand_for_them():
    def layer(x, _):
        with jax.named_scope('scores'):
            return (x @ x.T).sum() * x, x.astype('bfloat16')

    traced = jax.jit(lambda x: jax.lax.scan(layer, x, length=3)).trace(jax.ShapeDtypeStruct((2048, 64), 'float32'))
    said = 'RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (16.14G) exceeds available HBM (15.75G).'
    found = str(out_of_memory.refusal(small(), Target('v5e', (2, 4)), said, traced.jaxpr, True))
    start = 'v5e:2x4: the program needs 16.14G of the 15.75G that a device has; the largest of all devices together: '
    assert found.startswith(f'{start}0.02G float32[2048,2048] (scores/dot_general), ')


def test_a_program_that_is_compiled_but_does_not_fit_is_refused_likewise(monkeypatch):
    run, _ = compiled(mesh={'data': 8})
    dry_run.check_fits(run)  # a CPU has no limit
    monkeypatch.setitem(devices.DEVICES, 'cpu', devices.DEVICES['cpu']._replace(memory=run.peak - 1))
    with pytest.raises(
        errors.UserError, match=r'cpu:8: the program needs 0.00G of the 0.00G .* lower it by .*mesh.fsdp'
    ):
        dry_run.check_fits(run)
    assert '100% of' in dry_run_report.describe(run) and ': it does not fit' in dry_run_report.describe(run)
    monkeypatch.setitem(devices.DEVICES, 'cpu', devices.DEVICES['cpu']._replace(memory=run.peak))
    dry_run.check_fits(run)


# ------------------------------------------------------------------------------------------------ the command
def test_meshes_that_name_devices():
    assert dry_run.num_devices(config.Mesh()) == 1  # of all devices, however many: nothing to pretend
    assert dry_run.num_devices(config.Mesh(fsdp=64, tensor=8)) == 512
    assert dry_run.num_devices(config.Mesh(data=4, fsdp=64, tensor=8)) == 2048
    with pytest.raises(errors.UserError, match=r'train.batch_size=12 is not a multiple of .* 8 ways'):
        dry_run.compile_program('train step', small(mesh={'data': 8}, rows=12), CPUS)
    with pytest.raises(errors.UserError, match=r'cpu:8 has 8 devices, the mesh names 4: .*mesh.data=-1'):
        dry_run.compile_program('train step', small(mesh={'data': 4}), CPUS)
    with pytest.raises(errors.UserError, match=r'the mesh names 3: 3 does not divide 8; nearest that does: 2$'):
        dry_run.compile_program('train step', small(mesh={'data': 1, 'tensor': 3}), CPUS)


def inspect(*flags, code=0):
    ran = subprocess.run(
        [sys.executable, '-m', 'tformer', 'inspect', '--config=configs/shapes.py:smoke', *flags],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'},  # as JAX set it
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.returncode == code, ran.stderr
    return ran.stdout, ran.stderr


@pytest.mark.slow
@pytest.mark.stack
def test_the_command_on_64_devices():
    """There are eight here (conftest.py). All that a step holds is split as the mesh says; the products are shared."""
    mesh = {'data': 4, 'fsdp': 4, 'tensor': 4}
    said, told = inspect(
        '--config.train.batch_size=32', *(f'--config.mesh.{axis}={size}' for axis, size in mesh.items())
    )
    assert told.startswith('compiling the train step for 64 x CPU ...\ncompiled in ') and told.count('\n') == 2
    assert json.loads(said[: said.index('\n}\n') + 2])['mesh']['fsdp'] == 4
    assert 'decoder.stack.layers.mlp.out.kernel' in said
    assert '\ntrain step of 32 rows on cpu:64 (data 4 x fsdp 4 x tensor 4), rules fsdp_tp' in said
    for kind, axes in (('all-gather', 'fsdp'), ('all-reduce', 'tensor'), ('all-reduce', 'data')):
        assert re.search(rf'\n  {kind} +{axes} +[\d,]+ +[\d,.]+ (GiB|B) +\d+%\n', said), (kind, axes)
    found = re.search(r'one device +(\S+)\n +model FLOPs, all devices +(\S+)  (\d+)% of those computed', said)
    assert found and float(found[3]) == pytest.approx(100 * float(found[2]) / (64 * float(found[1])), abs=1)
    assert 30 < float(found[3]) <= 100


@pytest.mark.slow
def test_what_is_trained_in_packed_rows_is_decoded_one_text_a_row():
    cfg = small('encoder_decoder')
    packed = config.override(cfg, {'data.batching': 'pack'})
    runs = [dry_run.compile_program('decode step', each, Target('cpu', (1,))) for each in (cfg, packed)]
    assert costs.flops(runs[0].program) == costs.flops(runs[1].program) > 0


@pytest.mark.parametrize('kernel', ['cudnn', 'flash', 'triton'])
def test_the_table_of_parameters_is_that_of_a_kernel_for_other_devices(kernel):
    """As of a config for a chip, by whoever has none."""
    named, either = (
        config.load('configs/shapes.py:smoke', {'model.attention_kernel': name}) for name in (kernel, 'auto')
    )
    tables = [inspection.inspect(each).partition('\n}\n')[2] for each in (named, either)]
    assert tables[0] == tables[1] and 'decoder.stack.layers.mlp.out.kernel' in tables[0]


def test_without_a_mesh_nothing_is_compiled():
    said, told = inspect()
    assert 'parameters, with a vocabulary' in said and 'train step' not in said and told == ''


@pytest.mark.proof
def test_flags_that_do_not_go_together_are_refused():
    assert 'not both' in inspect('--data', '--device=cpu:8', code=2)[1]
    assert 'need --device' in inspect('--decode', code=2)[1]
    encoder = ['--config=configs/bert.py', '--device=cpu:1', '--decode']
    assert 'model.family=encoder does not generate text' in inspect(*encoder, code=2)[1]
    assert "'v5e:8' is not a layout of TPU v5e" in inspect('--device=v5e:8', code=2)[1]


@pytest.mark.slow
@pytest.mark.parametrize('tied', ['all', None])
def test_more_chunks_of_the_loss_exchange_no_more_between_devices(tied):
    """Each device adds up the gradient of its own rows over all chunks, and exchanges the sum."""
    cfg = small(mesh={'data': 1, 'fsdp': 8}, vocab_size=512, num_decoder_layers=1, tied_embeddings=tied)
    runs = [
        dry_run.compile_program('train step', config.override(cfg, {'train.loss_chunk': chunk}), CPUS)
        for chunk in (8, 2)
    ]
    few, many = (sum(row.bytes for row in run.collectives) for run in runs)
    assert 512 * D * 4 < many < 1.02 * few


@pytest.mark.slow
def test_the_gradient_of_rows_that_are_read_is_summed_by_the_devices_that_hold_their_columns():
    """Of each row of a table that is read a device gathers what others hold, and sends nothing of its gradient. Of the
    kernel of logits it gathers that, too, and on CPUs sums the gradient of the whole, twice as many bytes."""
    cfg = small(mesh={'data': 1, 'fsdp': 8}, num_decoder_layers=1, tied_embeddings=None)
    sent = []
    for vocab_size in (512, 1024):
        run = dry_run.compile_program('train step', config.override(cfg, {'model.vocab_size': vocab_size}), CPUS)
        sent.append(sum(row.bytes for row in run.collectives))
    assert sent[1] - sent[0] == pytest.approx((1 + 3) * 512 * D * 4 * 7 / 8, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('tied', ['all', None])
@pytest.mark.parametrize(('chunk', 'halves'), [(None, 1), (8, 2)])
def test_a_vocabulary_that_the_mesh_does_not_divide_gathers_gradients_and_no_logits(tied, chunk, halves):
    """Devices compute unequal parts of the logits. Of a table, which each of two has whole, they gather the other half
    of the gradient, and none of the moments; that of chunks once more, beside that of the tokens that are read."""
    V = 1001
    cfg = small(mesh={'data': 2, 'tensor': 2}, rows=32, vocab_size=V, num_decoder_layers=1, tied_embeddings=tied)
    run = dry_run.compile_program('train step', config.override(cfg, {'train.loss_chunk': chunk}), Target('cpu', (4,)))
    half = 4 * (V + 1) * D / 2
    logits = 4 * (32 / 2) * T * V / 2
    sent = sum(row.bytes for row in run.collectives if 'tensor' in row.axes and row.kind != 'all-reduce')
    assert sent == (halves if tied else halves + 1) * half < logits


CUDNN = ('a', '__cudnn$fmhaSoftmax', '')
TRITON = ('b', '__gpu$xla.gpu.triton', 'mix/pairs_50/attention_fwd_tiles/pallas_call')


@pytest.mark.parametrize(
    ('name', 'calls', 'line'),
    [
        ('train step', [CUDNN], 'attention by cudnn'),
        ('train step', [TRITON], 'attention by triton (cudnn does not serve packed rows)'),
        ('prefill', [TRITON], 'attention by triton (cudnn does not serve this mask)'),
        ('train step', [CUDNN, TRITON], 'attention by cudnn; by triton what it does not serve'),
        ('train step', [], 'attention by XLA: cudnn serves none of it'),
        ('decode step', [], 'attention to the cache by reference'),
    ],
)
def test_attentions_kernel_is_that_which_the_program_calls(name, calls, line):
    run = types.SimpleNamespace(
        name=name,
        config=Config(Model(dtype='bfloat16'), Data(batching='pack')),
        target=types.SimpleNamespace(jax_platform='gpu'),
        program=hlo.parse(toy_hlo.calling(*calls)),
    )
    assert dry_run_report._attention(run) == line
