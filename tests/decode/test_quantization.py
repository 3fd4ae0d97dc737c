"""Texts that are written by products in eight bits, or with a cache of eight bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from fresh_runs import fresh_run
from tformer import checks, config
from tformer.commands.freeze import freeze, load_frozen
from tformer.commands.score import score
from tformer.commands.streaming import stream
from tformer.decode.generate import begin
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.layers.quantized import INT8, numbers, quantize
from tformer.model import for_steps, quantized

TEXTS = ['ab', 'c.', 'dea', 'e d', 'bb', '', 'abcde', 'e', '. .', 'deed', 'cab', 'a b']
DRAWS = {'strategy': 'sample', 'temperature': 4.0, 'max_len': 20}  # which small differences change


def run_of(family: str, quantization: str | None = 'int8', **decode: object):
    objective = 'causal_lm' if family == 'decoder' else 'seq2seq'
    run = fresh_run(objective, family=family, layers=2)
    fields = {'strategy': 'greedy', 'max_len': 6, 'quantization': quantization, **decode}
    cfg = dataclasses.replace(run.config, decode=config.Decode(**fields))
    return dataclasses.replace(run, config=checks.settled(cfg))


def batch_of(family: str) -> dict[str, jax.Array]:
    tokens = jnp.arange(12).reshape(2, 6) % 7 + 3
    return {'inputs': tokens} if family == 'decoder' else {'inputs': tokens, 'encoder_inputs': tokens[:, ::-1]}


BOTH = ['decoder', pytest.param('encoder_decoder', marks=pytest.mark.proof)]


@pytest.mark.parametrize('family', BOTH)
def test_all_products_with_parameters_read_integers_alone(family) -> None:
    """No kernel is left, and with the table's rows zeroed where they are not looked up, logits are the same bits."""
    run = run_of(family)
    tied = dataclasses.replace(run.config.model, tied_embeddings='all' if family == 'encoder_decoder' else 'output')
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, model=tied))
    variables = quantized(run.model, run.variables, 'int8')
    kernels = {path for path in traverse_util.flatten_dict(run.variables['params']) if path[-1] == 'kernel'}
    integers = {path for path in traverse_util.flatten_dict(variables[INT8]) if path[-1] in ('kernel', 'table')}
    assert integers >= kernels and len(kernels) >= 6
    left = traverse_util.flatten_dict(variables['params']).keys()
    assert left == traverse_util.flatten_dict(run.variables['params']).keys() - kernels
    assert quantized(run.model, variables, 'int8') is variables
    read = jnp.isin(jnp.arange(run.config.model.vocab_size), batch_of(family)['inputs'])[:, None]

    def without(path, x: jax.Array) -> jax.Array:
        return x * read if path[-1].key == 'table' else x

    gone = jax.tree.map_with_path(without, variables['params'])
    assert not np.array_equal(gone['embed']['table'], variables['params']['embed']['table'])
    apply = jax.jit(run.model.apply)
    logits = apply(variables, batch_of(family))
    np.testing.assert_array_equal(logits, apply({**variables, 'params': gone}, batch_of(family)))
    small = jax.tree.map(lambda x: x / 3, run.variables)  # as they are initialised
    exact, rounded = (apply(quantized(run.model, small, kind), batch_of(family)) for kind in (None, 'int8'))
    assert 1e-4 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize('family', BOTH)
@pytest.mark.parametrize('strategy', ['greedy', pytest.param('beam', marks=pytest.mark.proof)])
def test_the_score_of_a_text_is_that_of_its_tokens_read_at_once(family, strategy) -> None:
    run = run_of(family, strategy=strategy, length_penalty=0.0)
    written = next(iter(run.write(['ab'])))[1][0]
    text = {'source': 'ab', 'target': written.text}
    [found] = score(run, [text], ended=written.length < 6)
    assert written.score == pytest.approx(found.log_likelihood, abs=2e-3)
    [exact] = score(dataclasses.replace(run, config=run_of(family, None).config), [text], ended=written.length < 6)
    assert abs(found.log_likelihood - exact.log_likelihood) > 1e-3


ROUNDED = {'quantization': 'int8', 'cache_quantization': 'int8'}


@pytest.mark.slow
@pytest.mark.parametrize('family', BOTH)
@pytest.mark.parametrize('field', [pytest.param('quantization', marks=pytest.mark.proof), 'cache_quantization'])
def test_rows_that_come_free_and_streams_write_the_same(family, field) -> None:
    fields = {**dict.fromkeys(ROUNDED), field: 'int8'}
    run = run_of(family, batch_size=2, **{**DRAWS, **fields})
    expected = run.generate(TEXTS)
    assert expected != run_of(family, None, **DRAWS).generate(TEXTS)
    assert [outputs[0].text for _, outputs in sorted(run.write(TEXTS))] == expected
    assert [''.join(pieces) for pieces in stream(run, TEXTS, 0)] == expected


@pytest.mark.parametrize(
    ('family', 'chunk'),
    [
        ('decoder', 2),
        *(pytest.param('encoder_decoder', chunk, marks=pytest.mark.proof) for chunk in (None, 2)),
    ],
)
def test_steps_see_the_rounded_keys_and_values_of_earlier_tokens_and_of_the_encoder(family, chunk) -> None:
    """As a forward pass does whose attention gets them rounded: each token and head by a scale of its own."""
    run = run_of(family)
    batch = batch_of(family)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    variables = for_steps(run.model.cfg, run.variables)

    @jax.jit
    def in_steps(batch):
        extend, cache, _ = begin(run.model, variables, batch, 8, None, 'int8')
        assert all(x.dtype == np.int8 for x in jax.tree.leaves((cache.own, cache.cross))[::2])
        logits = []
        for first in range(0, 6, chunk or 6):
            part = slice(first, first + (chunk or 6))
            new, cache = extend(batch['inputs'][:, part], positions[:, part], cache)
            logits.append(new)
        return jnp.concatenate(logits, 1)

    def rounding(call, args, kwargs, context):
        found = call(*args, **kwargs)
        if context.method_name != 'keys_values' or context.module.stack == 'encoder':
            return found
        return tuple(numbers(quantize(x, [3]), jnp.float32) for x in found)

    def forward(batch):
        with nn.intercept_methods(rounding):
            return run.model.apply(run.variables, batch)

    found, expected = in_steps(batch), jax.jit(forward)(batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - run.model.apply(run.variables, batch)).max() > 1e-2


@pytest.mark.proof
def test_a_frozen_program_writes_by_its_integers(tmp_path) -> None:
    run = run_of('decoder', cache_quantization='int8')
    freeze(run, tmp_path / 'frozen', rows=2)
    loaded = load_frozen(tmp_path / 'frozen')
    assert any(x.dtype == np.int8 for x in loaded.variables)
    assert loaded.write(TEXTS, 6) == run.generate(TEXTS)


@pytest.mark.proof
@pytest.mark.parametrize('decode', [{}, {'strategy': 'sample'}, {'strategy': 'beam'}])
@pytest.mark.parametrize('sizes', [{'data': 2, 'tensor': 2}, {'data': 2, 'context': 4}])
@pytest.mark.parametrize('kind', ['int8', None])
def test_rows_over_a_mesh_with_split_products_or_slots_write_the_same(kind, sizes, decode) -> None:
    run = run_of('decoder', kind, batch_size=4, cache_quantization=kind, **decode)
    mesh = meshes.make_mesh(config.Mesh(**sizes))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = dataclasses.replace(run.config, mesh=config.Mesh(**sizes))
    spread = dataclasses.replace(run, config=placed, variables=jax.device_put(run.variables, everywhere))
    assert spread.generate(TEXTS) == run.generate(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['int8', None])
def test_a_run_for_writing_has_no_kernels_and_writes_and_scores_the_same(kind) -> None:
    run = run_of('decoder', kind, batch_size=4)
    writing = run.for_writing()
    assert writing.for_writing().variables is writing.variables and (writing is run) == (kind is None)
    names = {path[-1] for path in traverse_util.flatten_dict(writing.params)}
    assert ('kernel' in names) == (kind is None) and 'table' in names
    assert dict(writing.write(TEXTS)) == dict(run.write(TEXTS))
    assert score(writing, TEXTS[:3]) == score(run, TEXTS[:3])


@pytest.mark.proof
def test_stages_of_a_pipeline_compute_by_integers() -> None:
    run = run_of('decoder')
    staged = dataclasses.replace(run, config=dataclasses.replace(run.config, mesh=config.Mesh(data=1, pipeline=2)))
    [alone], [found] = (score(each, ['abcde']) for each in (run, staged))
    [exact] = score(run_of('decoder', None), ['abcde'])
    assert found.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-4)
    assert abs(exact.log_likelihood - found.log_likelihood) > 1e-3


@pytest.mark.proof
def test_a_draft_is_in_eight_bits_too_and_changes_no_token() -> None:
    run = run_of('decoder', cache_quantization='int8')
    drafted = run_of('decoder', draft='prompt', draft_len=2, cache_quantization='int8')
    assert drafted.generate(TEXTS) == run.generate(TEXTS)


def test_a_recurrent_model_has_no_such_products() -> None:
    line = r'^model\.recurrence=gru computes with no integers: decode\.quantization=int8 must be None$'
    model = config.Model('decoder', recurrence='gru')
    run = config.Config(model, train=config.Train(objective='causal_lm', num_steps=1))
    with pytest.raises(UserError, match=line):
        checks.resolve(config.override(run, {'decode.quantization': 'int8'}), vocab_size=8)


def test_each_output_of_a_kernel_has_a_scale() -> None:
    run = run_of('decoder')
    layers = quantized(run.model, run.variables, 'int8')[INT8]['decoder']['stack']['layers']
    found = {' '.join(path[-3:-1]): kernel.scales.shape for path, kernel in traverse_util.flatten_dict(layers).items()}
    assert found == {
        **dict.fromkeys((f'attention {name}' for name in ('query', 'key', 'value')), (2, 1, 2, 8)),  # layers, D, N, H
        'attention out': (2, 1, 1, 16),
        'mlp in_0': (2, 1, 32),
        'mlp out': (2, 1, 16),
    }
