"""Texts on several devices: every way of writing has the rules of its mesh, and sends no more than they need."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fresh_runs import fresh_run
from tformer import config
from tformer.commands import row_writer, scoring, serve
from tformer.commands.planning import dry_run
from tformer.commands.streaming import stream
from tformer.decode import engine, generate, single_step
from tformer.decode.drawing import Drawing
from tformer.distributed import costs, meshes, sharding
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.layers import kernel_choice
from tformer.layers.dropout import DropoutRates
from tformer.layers.parallel import each_device
from tformer.model import DecoderFamily, build

TEXTS = ['a', 'abc', 'bb', 'cd', 'e', 'dd', 'ab', 'abcd', 'ee']
CPUS = Target('cpu', (8,))


def run_on(mesh, **decode):
    """A run whose parameters are where its mesh says."""
    run = fresh_run('causal_lm', family='decoder', layers=2)
    changes = {f'mesh.{axis}': size for axis, size in mesh.items()}
    changes |= {f'decode.{name}': value for name, value in decode.items()}
    made = config.override(run.config, changes)
    places = scoring.shardings(made, meshes.make_mesh(made.mesh))
    return type(run)(run.workdir, made, run.tokenizers, jax.device_put(run.variables, places), 1)


def batches(run):
    return run.generate(TEXTS[:3])


def free_rows(run):
    return run.generate(TEXTS)


def streamed(run):
    return [''.join(pieces) for pieces in stream(run, TEXTS, 0)]


def served(run):
    made, scheduler = serve.make_scheduler(run, rows=8, most_waiting=8)
    with scheduler.place():
        slots = made.engine.empty(scheduler.variables)
        batch = row_writer.examples(made)[0] | row_writer.bias_of({})
        made.engine.step(scheduler.variables, made.engine.insert(scheduler.variables, slots, batch, 0, Drawing()))


@pytest.mark.slow
@pytest.mark.parametrize('write', [batches, free_rows, streamed, served])
def test_every_way_of_writing_has_the_rules_of_its_mesh(monkeypatch, write):
    """Without them heads, experts and slots are computed whole on every device, to the same texts."""
    seen, extend = [], DecoderFamily.extend

    def noted(self, *given, **named):
        seen.append((each_device.splits(), each_device.ways(each_device.split('act_heads', 2))))
        return extend(self, *given, **named)

    monkeypatch.setattr(DecoderFamily, 'extend', noted)
    for cached in (scoring._writer, scoring._refill):
        cached.cache_clear()
    jax.clear_caches()
    write(run_on({'data': 4, 'tensor': 2}, batch_size=8))
    assert set(seen) == {(True, 2)}


@pytest.mark.slow
def test_writers_that_take_turns_leave_the_caller_its_own_context():
    run = run_on({'data': 4, 'tensor': 2}, batch_size=8)
    for make in (lambda: run.write(TEXTS), lambda: run.write(TEXTS[:3]), lambda: stream(run, TEXTS, 0)):
        one, other = make(), make()
        for turn in (one, other, one):
            next(turn)
            assert jax.sharding.get_abstract_mesh().empty and not each_device.splits()
        one.close()
        other.close()
        assert jax.sharding.get_abstract_mesh().empty and not each_device.splits()


@pytest.mark.slow
def test_a_text_that_begins_is_written_to_its_row_and_to_one_that_is_none():
    """A write to one row alone, at a place that is not known, would be one into rows that are gathered."""
    run = run_on({'data': 8})
    model, mesh = build(run.config.model), meshes.make_mesh(run.config.mesh)
    row = {'inputs': np.array([[1, 2, 3]], np.int32), 'positions': np.array([[0, 1, 2]], np.int32)}
    with sharding.placed(mesh, run.config.mesh):
        made = engine.make_engine(model, row, rows=8, slots=16)
        slots = made.empty(run.variables)
        lowered = made.insert.lower(run.variables, slots, row, jnp.int32(5), Drawing()).as_text()
        places = re.findall(r'"stablehlo\.scatter".*?\}\) : \(\S+ (\S+),', lowered, re.S)
        assert len(places) > 8 and set(places) == {'tensor<2x1xi32>'}
        found = jax.device_get(slots := made.insert(run.variables, slots, row, jnp.int32(5), Drawing()))
        none = made.insert(run.variables, slots, row, jnp.int32(8), Drawing())
        assert found.position_B.tolist() == none.position_B.tolist() == [-1] * 5 + [2] + [-1] * 2
    alone = engine.make_engine(model, row, rows=8, slots=16)
    whole = alone.insert(run.variables, alone.empty(run.variables), row, jnp.int32(5), Drawing())
    for one, other in zip(*map(jax.tree.leaves, (found.cache, whole.cache)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@functools.cache
def compiled(name, mesh=(), family='decoder', **decode):
    """A small program of generation, for eight CPUs."""
    changes = {'model.num_decoder_layers': 2, 'model.emb_dim': 64, 'model.num_heads': 8, 'model.mlp_dim': 128}
    changes |= {'model.vocab_size': 512, 'data.length': 32, 'model.max_len': 64, 'decode.batch_size': 8}
    changes |= {f'mesh.{axis}': size for axis, size in (mesh or (('data', 8),))}
    if family == 'encoder_decoder':
        changes |= {'train.objective': 'seq2seq', 'model.num_encoder_layers': 2}
    changes |= {f'decode.{field}': value for field, value in decode.items()}
    train, model = config.Train(objective='causal_lm', num_steps=1), config.Model(family=family)
    return dry_run.compile_program(name, config.override(config.Config(model, train=train), changes), CPUS)


@pytest.mark.slow
def test_the_tokens_that_a_cut_leaves_are_found_on_every_device_by_itself():
    """Their bounds are sought in some thirty passes over the logits, each of which would wait for all devices."""
    tensor = (('data', 1), ('tensor', 8))
    cut, plain = (
        compiled('decode step', tensor, strategy='sample', max_len=16, **cuts) for cuts in ({'top_p': 0.9}, {})
    )
    found, least = ({row.kind: row for row in run.collectives} for run in (cut, plain))
    assert found['all-reduce'].count <= least['all-reduce'].count
    assert found['all-to-all'].bytes <= 512 * 4  # a row for each device
    assert 'all-gather' not in found or found['all-gather'].bytes < 100


OPERATIONS = {
    'mbr': ({'strategy': 'mbr', 'candidates': 4}, 4),
    'draws': ({'strategy': 'sample', 'num_outputs': 3}, 3),
    'guidance': ({'strategy': 'greedy', 'guidance': 2.0}, 2),
    'drafts': ({'strategy': 'greedy', 'draft': 'prompt', 'draft_len': 3}, 4),
    'beams': ({'strategy': 'beam', 'beam_size': 4}, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize('way', OPERATIONS)
def test_a_step_computes_all_that_its_strategy_reads(way):
    fields, times = OPERATIONS[way]
    one = compiled('decode step', strategy='greedy', max_len=16)
    found = compiled('decode step', max_len=16, **fields)
    assert costs.flops(found.program) == pytest.approx(times * costs.flops(one.program), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize('way', OPERATIONS)
def test_the_first_step_reads_what_a_run_reads(monkeypatch, way):
    """Its rows, tokens and cache are those of the program that writes whole texts."""
    fields, _ = OPERATIONS[way]
    run = fresh_run('causal_lm', family='decoder', layers=1)
    cfg = config.override(run.config, {'decode.max_len': 4, **{f'decode.{x}': y for x, y in fields.items()}}).decode
    model, seen, extend = build(run.config.model), [], DecoderFamily.extend

    def noted(self, tokens, positions, cache, *rest):
        seen.append((tokens.shape, jax.tree.map(jnp.shape, cache)))
        return extend(self, tokens, positions, cache, *rest)

    monkeypatch.setattr(DecoderFamily, 'extend', noted)
    batch = {'inputs': np.full((2, 5), 3, np.int32), 'positions': np.arange(10, dtype=np.int32).reshape(2, 5) % 5}
    whole = generate.make_generate(model, cfg, eos=1)
    jax.eval_shape(getattr(whole, 'whole', whole), run.variables, batch, jax.random.key(0))
    steps = [each for each in seen if each[0][1] != 4 or way in ('drafts', 'beams')]
    steps = [each for each in steps if each[1].index] if way == 'drafts' else steps  # where rows go on by themselves
    seen.clear()
    found = jax.eval_shape(lambda: single_step.first_step(model, cfg, run.variables, batch).cache)
    rows = single_step.first_step(model, cfg, run.variables, batch).shape
    seen.clear()
    tokens = jnp.zeros(rows, jnp.int32)
    jax.eval_shape(lambda cache: single_step.step(model, cfg, run.variables, tokens, tokens, cache), found)
    assert seen[-1] in steps


@pytest.mark.slow
def test_prompts_are_as_long_as_new_tokens_allow_and_those_of_a_decoder_behind_an_encoder_are_its_start():
    whole, cut = (compiled('prefill', strategy='greedy', max_len=most) for most in (16, 49))
    assert costs.flops(cut.program) == pytest.approx(costs.flops(whole.program) * 15 / 31, rel=0.25)
    with pytest.raises(UserError, match=r'^decode\.max_len=65 leaves no room for a prompt in model\.max_len=64$'):
        compiled('prefill', strategy='greedy', max_len=65)
    both = compiled('decode step', family='encoder_decoder', strategy='greedy', max_len=16)
    own, across = 2 * 2 * 16 * 64 * 4, 2 * 2 * 32 * 64 * 4  # a row's keys and values in two layers
    arguments = both.executable.memory_analysis().argument_size_in_bytes - both.held['parameters']
    assert arguments == pytest.approx(own + across, rel=0.1)


@pytest.mark.slow
def test_what_is_not_trained_drops_nothing_and_has_a_kernel_that_cannot(monkeypatch):
    asked, pick = [], kernel_choice.pick

    def noted(cfg, platform, drops=True):
        asked.append(drops)
        return pick(cfg, platform, drops)

    monkeypatch.setattr(kernel_choice, 'pick', noted)
    run = fresh_run('causal_lm', family='decoder', fields={'attention_dropout_rate': 0.1})
    batch = run.batch(['abc'])
    for training in (False, True):
        asked.clear()
        build(run.config.model).apply(
            run.variables, batch, DropoutRates(attention=0.1), rngs={'dropout': jax.random.key(0)} if training else {}
        )
        assert set(asked) == {training}
    bfloat16 = dataclasses.replace(run.config.model, dtype='bfloat16', head_dim=8)
    assert [pick(bfloat16, 'gpu', drops) for drops in (True, False)] == ['triton', 'cudnn']
    assert kernel_choice.described(bfloat16, 'gpu', packed=False, drops=False) == 'attention by cudnn'
