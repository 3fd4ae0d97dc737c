"""A frozen run writes what the run writes, from its files alone."""

import dataclasses
import shutil

import jax
import pytest

import hub_directories
from fresh_runs import fresh_run
from places import TESTS
from tformer import __main__ as command_line
from tformer import config
from tformer.commands.freeze import freeze, load_frozen
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.decode.drawing import Drawing
from tformer.errors import UserError

pytest.importorskip('flatbuffers')


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['llama', pytest.param('deepseek_v3', marks=pytest.mark.proof), 'encoder_decoder'])
@pytest.mark.proof_cases('encoder_decoder')
def test_a_frozen_run_writes_what_the_run_writes(kind, tmp_path) -> None:
    """Prompts of three padded lengths, more texts than rows."""
    if kind != 'encoder_decoder':
        hub_directories.write(tmp_path / 'hub', kind, max_position_embeddings=64)
        import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
        texts = ['a b', 'c', 'd ' * 20, 'e ' * 40, 'f g']
    else:
        shutil.copytree(TESTS / 'stored_run', tmp_path / 'run')
        texts = ['the small bird', 'a', 'a green tree sees the river']
    command_line.main(['tformer', 'freeze', f'--workdir={tmp_path}/run', f'{tmp_path}/frozen', '--rows=2'])
    plain = Run.load(tmp_path / 'run', {'decode.strategy': 'greedy', 'decode.max_len': '8'})
    drawn = Run.load(tmp_path / 'run', {'decode.strategy': 'sample', 'decode.max_len': '8'})
    expected = plain.generate(texts), [drawn.generate([text], 4)[0] for text in texts]
    shutil.rmtree(tmp_path / 'run')
    frozen = load_frozen(tmp_path / 'frozen')
    assert frozen.parts.rows == 2
    assert frozen.write(texts, 8) == expected[0]
    assert frozen.write(texts, 8, Drawing(1.0, seed=4)) == expected[1]
    with pytest.raises(UserError, match=r'^a text of \d+ tokens leaves \d+ new ones, and 500 are asked for$'):
        frozen.write(texts, 500)


@pytest.mark.slow
@pytest.mark.parametrize('objective', ['seq2seq', pytest.param('denoising', marks=pytest.mark.proof)])
def test_a_decoder_that_reads_less_than_its_model_is_frozen_for_all_it_reads(objective, tmp_path) -> None:
    run = fresh_run(objective, family='decoder', letters='abcdefgh', fields={'max_len': 64})
    freeze(run, tmp_path / 'frozen', rows=2)
    frozen = load_frozen(tmp_path / 'frozen')
    most = run.config.data.length - len(frozen.parts.writer.read([''])[0])
    texts = ['a', 'abc', 'h' * most]
    assert frozen.write(texts) == run.generate(texts)
    for write in (frozen.write, run.generate):
        with pytest.raises(UserError, match=rf'has {most + 1} tokens, the model takes {most} '):
            write(['h' * (most + 1)])


@pytest.mark.slow
def test_a_frozen_run_holds_kernels_in_the_dtype_of_the_activations(tmp_path) -> None:
    sizes = {}
    for dtype in ('float32', 'bfloat16'):
        run = fresh_run('causal_lm', family='decoder', letters='abcdefgh', fields={'dtype': dtype})
        run = dataclasses.replace(run, config=config.override(run.config, {'decode.max_len': '7'}))
        freeze(run, tmp_path / dtype, rows=2)
        frozen, texts = load_frozen(tmp_path / dtype), ['a', 'abc', 'h' * 20]
        assert frozen.write(texts, 7) == run.generate(texts)
        sizes[dtype] = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen.variables))
    assert sizes['bfloat16'] < 0.6 * sizes['float32']


WIDE = {'dtype': 'bfloat16', 'emb_dim': 256, 'mlp_dim': 256, 'num_heads': 4, 'max_len': 256, 'norm': 'rmsnorm'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('backend', 'platforms', 'kernel'),
    [('gpu', [], 'auto'), ('gpu', ['cpu', 'cuda'], 'triton'), ('tpu', ['cpu', 'tpu'], 'auto')],
)
@pytest.mark.proof_cases('tpu-platforms2-auto')
def test_an_accelerator_writes_programs_without_kernels_of_its_own(
    monkeypatch, tmp_path, backend, platforms, kernel
) -> None:
    """Prompts are long and activations wide enough for all kernels."""
    run = fresh_run('causal_lm', family='decoder', letters='abcdefgh', fields=WIDE | {'num_experts': 4})
    run = dataclasses.replace(run, config=config.override(run.config, {'decode.max_len': '7'}))
    with monkeypatch.context() as pretended:
        pretended.setattr(jax, 'default_backend', lambda: backend)
        there = dataclasses.replace(run, config=config.override(run.config, {'model.attention_kernel': kernel}))
        freeze(there, tmp_path / 'frozen', rows=2, platforms=platforms)
    frozen, texts = load_frozen(tmp_path / 'frozen'), ['a', 'abcdefgh' * 20]
    assert frozen.write(texts, 7) == run.generate(texts)


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['cpu', pytest.param('tpu', marks=pytest.mark.proof)])
def test_programs_for_a_tpu_alone_have_its_kernels(monkeypatch, tmp_path, backend) -> None:
    run = fresh_run('causal_lm', family='decoder', letters='abcdefgh', fields=WIDE | {'num_experts': 4})
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    freeze(run, tmp_path / 'frozen', rows=2, platforms=['tpu'])
    program = jax.export.deserialize(bytearray((tmp_path / 'frozen' / 'insert_256.bin').read_bytes()))
    assert program.platforms == ('tpu',) and 'tpu_custom_call' in program.mlir_module()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        ({'decode.strategy': 'sample', 'decode.temperature': '0.8', 'decode.top_k': '5'}, ''),
        (
            {'decode.strategy': 'beam'},
            'decode.strategy=beam is not frozen: the programs write by the likeliest token\n',
        ),
    ],
)
def test_what_a_run_says_of_lengths_and_draws_is_frozen_with_it(tmp_path, capsys, fields, said) -> None:
    run = fresh_run('causal_lm', family='decoder', letters='abcdefgh')
    run = dataclasses.replace(run, config=config.override(run.config, {'decode.max_len': '6', **fields}))
    freeze(run, tmp_path / 'frozen', rows=2)
    assert capsys.readouterr().err == said
    frozen, texts = load_frozen(tmp_path / 'frozen'), ['a', 'abc', 'h' * 20]
    if said:
        run = dataclasses.replace(run, config=config.override(run.config, {'decode.strategy': 'greedy'}))
    assert frozen.write(texts) == run.generate(texts) and frozen.write(texts, seed=3) == run.generate(texts, 3)
    assert (frozen.write(texts) == frozen.write(texts, seed=3)) == bool(said)


@pytest.mark.proof
def test_a_form_and_biases_are_frozen_with_their_run(tmp_path) -> None:
    run = fresh_run('causal_lm', family='decoder', letters='abcdefgh')
    changes = {'decode.regex': '[a-h]{4,6}', 'decode.bias': 'ab=5,c=9', 'decode.max_len': '7'}
    run = dataclasses.replace(run, config=config.override(run.config, changes))
    freeze(run, tmp_path / 'frozen', rows=2)
    frozen, texts = load_frozen(tmp_path / 'frozen'), ['a', 'abc', 'h' * 20]
    assert frozen.write(texts, 7) == run.generate(texts)
    with pytest.raises(UserError, match=r'^the shortest text that fits has 5 tokens with its end, and 4 '):
        frozen.write(texts, 4)


@pytest.mark.proof
def test_a_schema_is_frozen_with_its_run(tmp_path) -> None:
    schema = tmp_path / 'schema.json'
    schema.write_text('{"type": "integer", "minimum": 10, "maximum": 47}')
    run = fresh_run('causal_lm', family='decoder', letters='0123456789')
    changes = {'decode.json_schema': str(schema), 'decode.max_len': '4'}
    run = dataclasses.replace(run, config=config.override(run.config, changes))
    texts = ['1', '77', '5' * 20]
    expected = run.generate(texts)
    freeze(run, tmp_path / 'frozen', rows=2)
    schema.unlink()
    assert load_frozen(tmp_path / 'frozen').write(texts, 4) == expected
    assert all(10 <= int(text) <= 47 for text in expected)


def test_what_cannot_be_frozen_is_named(tmp_path) -> None:
    run = fresh_run('causal_lm', family='decoder', letters='abc')
    for given, line in (
        ({'rows': 0}, r'^--rows=0 must be at least 1$'),
        ({'platforms': ['gpu']}, r'^--platforms=gpu is unknown; valid: cpu, cuda, rocm, tpu$'),
    ):
        with pytest.raises(UserError, match=line):
            freeze(run, tmp_path / 'frozen', **given)
    with pytest.raises(UserError, match=r'^model\.family=encoder does not generate text'):
        freeze(fresh_run('masked_lm'), tmp_path / 'frozen')
    with pytest.raises(UserError, match='holds no programs'):
        load_frozen(tmp_path / 'frozen')
    assert not list(tmp_path.iterdir())
