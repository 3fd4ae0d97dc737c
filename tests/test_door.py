"""The Python door: its names, its ten lines, and the values inside a model."""

import dataclasses
import functools
import operator
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tformer
from fresh_runs import fresh_run
from places import ROOT
from tformer.errors import UserError
from tformer.training import dummy_batch

LAYERS = 'decoder.stack.layers'


def test_importing_loads_no_jax_and_every_name_is_there() -> None:
    code = (
        'import sys, tformer; assert set(tformer.__all__) <= set(dir(tformer)); '
        "tformer.Config, tformer.UserError; assert not {'jax', 'flax'} & set(sys.modules), 'loaded'"
    )
    ran = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for name in tformer.__all__:
        assert getattr(tformer, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        tformer.trian  # noqa: B018


# ------------------------------------------------------------------------------------------------ the ten lines
@pytest.fixture(scope='module')
def run(tmp_path_factory) -> tformer.Run:
    overrides = {'mesh.data': 1, 'model.scan_layers': True, 'evaluate.samples': 0}
    config = tformer.load_config(f'{ROOT}/configs/g2p.py:smoke', overrides)
    return tformer.train(config, tmp_path_factory.mktemp('runs') / 'demo')


@pytest.mark.slow
def test_the_ten_lines(run: tformer.Run, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line for line in (tformer.__doc__ or '').splitlines() if line.startswith('    ')]
    assert len(lines) == 10
    names: dict[str, object] = {}
    exec('\n'.join(line.strip() for line in lines).replace('runs/demo', str(run.workdir)), names)
    logits, batch, state, maps = (names[name] for name in ('logits', 'batch', 'state', 'maps'))
    assert logits.shape == (*batch['inputs'].shape, 512)  # type: ignore[attr-defined,index]
    assert int(state.step) == 1 and 0 < names['metrics']['loss'] < 10  # type: ignore[attr-defined,index]
    (weights,) = maps.values()  # type: ignore[attr-defined]
    assert weights.shape[:2] == (2, 1)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_objects_print_what_they_are(run: tformer.Run) -> None:
    assert repr(run) == (
        f'Run({str(run.workdir)!r}, step=2, family={"encoder_decoder"!r}, parameters={run.num_parameters:,})'
    )
    config = tformer.Config(model=tformer.Model(norm='rmsnorm'), train=tformer.Train(num_steps=3))
    assert repr(config) == "Config(model=Model(norm='rmsnorm'), train=Train(num_steps=3))"
    assert eval(repr(config), vars(tformer) | {name: getattr(tformer, name) for name in tformer.__all__}) == config
    state = tformer.new_state(run.config, tformer.random_batch(run.config))
    assert repr(state).startswith(f'TrainState(step=0, parameters={run.num_parameters:,}, optimizer_state=')


@pytest.mark.proof
def test_the_commands_are_functions(run: tformer.Run, capsys) -> None:
    found = tformer.evaluate(run, 'valid')
    assert run.results.keys() == {'test', 'valid'} and run.evaluate('valid') == found
    assert tformer.generate(run.workdir, ['a']) == run.generate(['a'])
    assert f'{run.num_parameters:,} parameters' in tformer.inspect(run.config)
    assert 'step 2' in next(iter(tformer.replay(run.workdir, 2)))
    assert tformer.benchmark(run.config, 1)['params'] == run.num_parameters
    assert tformer.attention(run, ['ab']).is_file()


# ------------------------------------------------------------------------------------------------ inside a model
@dataclasses.dataclass
class Case:
    run: tformer.Run
    batch: dict[str, np.ndarray]
    logits: jax.Array


@pytest.fixture(scope='module', params=[True, False], ids=['scanned', 'unrolled'])
def case(request) -> Case:
    model = tformer.Model(vocab_size=31, emb_dim=16, num_decoder_layers=3, max_len=16, scan_layers=request.param)
    train, decode = tformer.Train(num_steps=3, batch_size=2), tformer.Decode(max_len=8)
    stated = tformer.Config(model=model, data=tformer.Data(length=6), train=train, decode=decode)
    config = dummy_batch.assumed(stated)
    batch = tformer.random_batch(config)
    params = tformer.new_state(config, batch).params
    run = tformer.Run(pathlib.Path('none'), config, None, {'params': params}, 0)  # type: ignore[arg-type]
    return Case(run, batch, run.model.apply(run.variables, batch))  # type: ignore[arg-type]


def close(x, y) -> None:
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.proof_cases('unrolled')
def test_activations_are_those_of_a_forward_pass_by_hand(case: Case) -> None:
    """The stream of a pre-norm block is the sum of what its sub-layers add, and the head reads its norm."""
    names = case.run.activation_names(case.batch)
    assert names[f'{LAYERS}.attention'] == (3, 2, 6, 16) and names['output'] == (2, 6, 31)
    found = jax.device_get(case.run.activations(case.batch, list(names)))
    assert {name: value.shape for name, value in found.items()} == names
    assert case.run.config.model.norm_placement == 'pre'
    stacked = jax.device_get(case.run.params['decoder']['stack']['layers'])
    x = found['decoder.input_embedding']
    for layer in range(3):
        params = jax.tree.map(operator.itemgetter(layer), stacked)
        scale, bias = params['attention_norm']['scale'], params['attention_norm'].get('bias', 0)
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias
        close(found[f'{LAYERS}.attention_norm'][layer], normed)
        values = np.einsum('BSD,DKV->BKSV', normed, params['attention']['value']['kernel'])
        mixed = np.einsum('BNTS,BNSV->BNTV', found[f'{LAYERS}.attention.probabilities'][layer, :, :, 0], values)
        attended = np.einsum('BNTV,NVD->BTD', mixed, params['attention']['out']['kernel'])
        close(found[f'{LAYERS}.attention'][layer], attended)
        x = x + attended + found[f'{LAYERS}.mlp'][layer]
        close(found[LAYERS][layer], x)
    close(found['output'], case.logits)
    close(found['output'], case.run.apply(case.batch))


@pytest.mark.slow
def test_one_layer_is_named_by_its_number(case: Case) -> None:
    found = case.run.activations(case.batch, [f'{LAYERS}.mlp', f'{LAYERS}.2.mlp'])
    np.testing.assert_array_equal(found[f'{LAYERS}.mlp'][2], found[f'{LAYERS}.2.mlp'])


@pytest.mark.slow
def test_an_identity_replacement_changes_nothing(case: Case) -> None:
    names = [name for name in case.run.activation_names(case.batch) if name != 'output']
    same = case.run.apply(case.batch, replace={name: lambda x: x for name in names})
    close(same, case.logits)
    values = case.run.activations(case.batch, names)
    close(case.run.apply(case.batch, replace=values), case.logits)


def without_attention(case: Case, layers: list[int]) -> jax.Array:
    """The logits of the model whose attention's output projection is zero in some layers."""
    params = jax.tree.map(lambda x: x, case.run.params)
    kernel = params['decoder']['stack']['layers']['attention']['out']['kernel']
    params['decoder']['stack']['layers']['attention']['out']['kernel'] = kernel.at[jnp.array(layers)].set(0)
    return case.run.model.apply({'params': params}, case.batch)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.proof_cases('unrolled')
def test_replacing_an_attention_by_zero_is_the_model_without_it(case: Case) -> None:
    for replace, layers in (
        ({f'{LAYERS}.attention': 0.0}, [0, 1, 2]),
        ({f'{LAYERS}.attention': jnp.zeros((3, 2, 6, 16))}, [0, 1, 2]),
        ({f'{LAYERS}.1.attention': lambda x: 0 * x}, [1]),
        ({f'{LAYERS}.0.attention': 0, f'{LAYERS}.2.attention': np.zeros((2, 6, 16))}, [0, 2]),
    ):
        changed = case.run.activations(case.batch, ['output', f'{LAYERS}.attention'], replace)  # type: ignore[arg-type]
        close(changed['output'], without_attention(case, layers))
        assert [bool(jnp.any(x)) for x in changed[f'{LAYERS}.attention']] == [layer not in layers for layer in range(3)]
        assert float(jnp.abs(changed['output'] - case.logits).max()) > 0.01


def test_replacing_attention_probabilities_mixes_the_values_by_others(case: Case) -> None:
    """Where each query of the second layer looks at itself alone, its attention is its own values, projected out."""
    name, norm = f'{LAYERS}.1.attention.probabilities', f'{LAYERS}.1.attention_norm'
    itself = np.broadcast_to(np.eye(6), case.run.activation_names(case.batch)[f'{LAYERS}.attention.probabilities'][1:])
    for replacement in (itself, lambda probs: jnp.broadcast_to(jnp.eye(6), probs.shape)):
        wanted = ['output', name, norm, f'{LAYERS}.1.attention']
        found = case.run.activations(case.batch, wanted, {name: replacement})
        params = jax.tree.map(operator.itemgetter(1), case.run.params['decoder']['stack']['layers']['attention'])
        values = np.einsum('BTD,DKV->BKTV', found[norm], params['value']['kernel'])
        close(found[f'{LAYERS}.1.attention'], np.einsum('BNTV,NVD->BTD', values, params['out']['kernel']))
        close(found[name], itself)
        assert float(jnp.abs(found['output'] - case.logits).max()) > 0.01


@pytest.mark.proof
@pytest.mark.parametrize('recurrence', ['lstm', 'gru'])
def test_recurrent_layers_have_names(recurrence: str) -> None:
    """The outputs of the layers, and what the decoder attends to, can be read and replaced."""
    model = tformer.Model(
        family='encoder_decoder', recurrence=recurrence, recurrent_attention='additive', vocab_size=31, emb_dim=16,
        num_encoder_layers=2, num_decoder_layers=2, max_len=16, encoder_vocab_size=31,
    )  # fmt: skip
    data, decode = tformer.Data(length=6, source='files'), tformer.Decode(max_len=8)
    train = tformer.Train(num_steps=3, batch_size=2, objective='seq2seq')
    config = dummy_batch.assumed(tformer.Config(model=model, data=data, train=train, decode=decode))
    batch = tformer.random_batch(config)
    run = tformer.Run(pathlib.Path('none'), config, None, {'params': tformer.new_state(config, batch).params}, 0)  # type: ignore[arg-type]
    output, weights = f'{LAYERS}.output', 'decoder.stack.cross_attention.probabilities'
    names = run.activation_names(batch)
    assert names[output] == (2, 2, 6, 16) and names['encoder.stack.layers.output'] == (2, 2, 6, 16)
    found = run.activations(batch, [output, f'{LAYERS}.1.output', weights, 'output'])
    np.testing.assert_array_equal(found[output][1], found[f'{LAYERS}.1.output'])
    close(found[weights].sum(-1), np.ones((2, 6)))
    for name in (output, f'{LAYERS}.0.output', 'encoder.stack.layers.1.output', weights):
        close(run.apply(batch, replace={name: lambda x: x}), found['output'])
        assert float(jnp.abs(run.apply(batch, replace={name: 0.0}) - found['output']).max()) > 1e-4, name


def test_what_cannot_be_named_or_replaced_is_refused_in_a_line(case: Case) -> None:
    mistakes = {
        f"no activation '{LAYERS}.atention'; did you mean '{LAYERS}.attention'": {f'{LAYERS}.atention': 0},
        'it has 3 layers': {f'{LAYERS}.3.mlp': 0},
        'can be read and not replaced': {'output': 0},
        'which (5,) does not fit': {'head': np.zeros(5)},
        'a replacement has shape (2, 6)': {'decoder': lambda x: x[..., 0]},
    }
    for message, replace in mistakes.items():
        with pytest.raises(UserError) as error:
            case.run.apply(case.batch, replace=replace)  # type: ignore[arg-type]
        assert message in str(error.value) and '\n' not in str(error.value)


def test_a_run_is_loaded_without_a_warning(caplog) -> None:
    """Such as Orbax's of what else a checkpoint holds."""
    tformer.load_run(ROOT / 'tests' / 'stored_run')
    assert not caplog.records


def test_a_checkpoint_that_is_asked_for_is_one_that_there_is() -> None:
    """Or the mean of the newest, which is no one of them."""
    with pytest.raises(UserError, match=r"^which='lastest' is unknown; did you mean 'latest'\?"):
        tformer.load_run(ROOT / 'tests' / 'stored_run', which='lastest')
    with pytest.raises(UserError, match=r'^--average=2 is of the newest checkpoints, --checkpoint=latest of one'):
        tformer.load_run(ROOT / 'tests' / 'stored_run', which='latest', average=2)


def test_a_text_becomes_a_batch(run: tformer.Run) -> None:
    batch = run.batch(['ab', 'abc'], ['', ''])
    assert batch['encoder_positions'].tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]
    specials = run.tokenizers.target.specials
    assert batch['inputs'].tolist() == [[specials.bos], [specials.bos]]
    assert run.apply(batch).shape == (2, 1, run.config.model.vocab_size)
    with pytest.raises(UserError, match=r'longer than model.max_len=64'):
        run.batch(['a' * 64])
    with pytest.raises(UserError, match=r'^1 targets do not go with 2 texts$'):
        run.batch(['ab', 'abc'], [''])
    with pytest.raises(UserError, match=r'^no texts make no batch$'):
        run.batch([])


@pytest.mark.parametrize(('objective', 'after'), [('seq2seq', ['sep']), ('prefix_lm', []), ('causal_lm', [])])
def test_a_batch_is_what_a_decoder_writes_after(objective: str, after: list[str]) -> None:
    """The likeliest token is the first one that greedy search writes; a given text is seen whole."""
    run = fresh_run(objective, family='decoder', letters='abcde')
    batch = run.batch(['abc', 'bead'])
    specials = run.tokenizers.target.specials
    assert batch['inputs'][1].tolist() == [specials.bos, *run.tokenizers.target.encode('bead'), *specials.of(after)]
    assert ('prefix' in batch) == (objective != 'causal_lm')
    logits_BTV, ends = np.asarray(run.apply(batch)), (batch['positions'] >= 0).sum(1) - 1
    may_come = [*run.tokenizers.target.encode('abcde'), specials.eos]
    for text, row, end in zip(run.generate(['abc', 'bead']), logits_BTV, ends, strict=True):
        assert text[:1] == [*'abcde', ''][row[end][may_come].argmax()]


@pytest.mark.parametrize('seed', [2**70, -(2**64), 'a', 1.0])
def test_a_seed_is_an_integer_of_64_bits(run: tformer.Run, seed: object) -> None:
    with pytest.raises(UserError, match=rf'^seed={seed!r} is not an integer of 64 bits$'):
        run.generate(['ab'], seed=seed)


def test_a_seed_may_be_an_integer_of_numpy_and_jax(run: tformer.Run) -> None:
    wanted = run.generate(['ab'], seed=3)
    for seed in (np.int32(3), np.array(3), jax.numpy.int32(3)):
        assert run.generate(['ab'], seed=seed) == wanted


def test_a_text_by_itself_is_no_list_of_texts(run: tformer.Run) -> None:
    for asked in (
        run.generate,
        run.write,
        run.batch,
        *map(functools.partial, (tformer.embed, tformer.score), [run] * 2),
    ):
        with pytest.raises(UserError, match=r"^texts must be a list of texts, such as \['transformer'\], and not one"):
            asked('transformer')


def test_characters_that_training_had_none_of_are_named(run: tformer.Run, capsys) -> None:
    run.generate(['zürich'])
    assert capsys.readouterr().err == "training had none of these, so the output means little: 'ü'\n"


# ------------------------------------------------------------------------------------------------ help
def test_help_and_versions_are_printed_without_jax() -> None:
    wanted = {
        'help': 'Scores a checkpoint, or the mean',
        'evaluate --help': 'on a split.',
        '--version': f', jax {jax.__version__}, ',
    }
    for arguments, said in wanted.items():
        code = f'import sys; from tformer import __main__ as m; sys.argv[1:] = {arguments.split()}\n'
        code += 'try: m.run()\nfinally: '
        code += "assert 'jax' not in sys.modules"
        ran = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout
