"""Vectors of texts, of models of the hub that are small enough to keep."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import hub_directories
from fresh_runs import fresh_run
from lives import HANG, environment
from tformer import __main__ as command_line
from tformer import config as config_lib
from tformer.commands import reading
from tformer.commands.embed import embed
from tformer.commands.import_ import import_hub
from tformer.commands.predict import predict
from tformer.commands.run import Run
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError
from tformer.evaluation import many_rows

TEXTS = ['b cc d', 'd e b a c ' * 4, 'a b c', '']
POOLED = {
    'mean': lambda x_TD: x_TD.mean(0),
    'cls': lambda x_TD: x_TD[0],
    'last': lambda x_TD: x_TD[-1],
    'max': lambda x_TD: x_TD.max(0),
}


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp('hub')
    for name in ('bert', 'gpt2', 't5'):
        hub_directories.write(place / 'of_the_hub' / name, name)
        import_hub(str(place / 'of_the_hub' / name), place / name, {'mesh.data': '4'} if name == 'bert' else {})
    return place


def one_by_one(run: Run, texts: list[str], pooling: str) -> np.ndarray:
    """The vector of each text, in a batch of its own without padding."""
    method = {'encoder_decoder': 'encode'}.get(run.config.model.family, 'features')
    read = jax.jit(lambda batch: run.model.apply(run.variables, batch, method=method))
    states = [np.asarray(read(run.batch([text])))[0] for text in texts]
    return np.stack(list(map(POOLED[pooling], states)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'pooling'), [('bert', 'mean'), ('gpt2', 'last'), pytest.param('t5', 'mean', marks=pytest.mark.proof)]
)
@pytest.mark.proof_cases('gpt2-last')
def test_vectors_are_those_of_each_text_alone_in_the_order_of_the_texts(workdirs, name, pooling) -> None:
    run = Run.load(workdirs / name, headless=True)
    found = embed(run, TEXTS, pooling, batch_size=2)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), run.config.model.emb_dim)
    np.testing.assert_allclose(found, one_by_one(run, TEXTS, pooling), atol=2e-5)
    unit = embed(run, TEXTS, pooling, normalize=True, batch_size=2)
    np.testing.assert_allclose(unit, found / np.sqrt((found**2).sum(1, keepdims=True)), atol=1e-6)


@pytest.mark.slow
def test_poolings_differ_and_the_default_is_the_mean_of_a_language_model(workdirs) -> None:
    run = Run.load(workdirs / 'bert', headless=True)
    assert run.config.model.pooling == 'cls'  # of its head for pairs of sentences, which its vectors are not made by
    for pooling in ('cls', 'max'):
        np.testing.assert_allclose(
            embed(run, TEXTS[:2], pooling, batch_size=2), one_by_one(run, TEXTS[:2], pooling), atol=2e-5
        )
    np.testing.assert_array_equal(embed(run, TEXTS[:2], batch_size=2), embed(run, TEXTS[:2], 'mean', batch_size=2))
    with pytest.raises(UserError, match="pooling='meen' is unknown; did you mean 'mean'"):
        embed(run, TEXTS, 'meen')


def test_vectors_of_a_run_that_compares_texts_are_those_that_it_compares() -> None:
    run = fresh_run('cosine_similarity')
    pooled = config_lib.override(run.config, {'model.pooling': 'max'})
    run, texts = dataclasses.replace(run, config=pooled), ['ab', 'c d e']
    one, other = embed(run, texts, normalize=True)
    (found,) = predict(run, [dict(zip(('text', 'pair'), texts, strict=True))])
    assert one @ other == pytest.approx(found['cosine'], abs=1e-5)
    np.testing.assert_array_equal(embed(run, texts), embed(run, texts, 'max'))
    assert np.abs(embed(run, texts) - embed(run, texts, 'mean')).max() > 0.1


def test_an_encoder_decoder_reads_texts_by_the_tokenizer_of_its_sources(monkeypatch) -> None:
    source, target, read = Char('abc'), Char('xyzc'), []
    run = fresh_run('masked_lm')
    config = config_lib.override(run.config, {'model.family': 'encoder_decoder', 'train.objective': 'seq2seq'})
    run = dataclasses.replace(run, config=config, tokenizers=Tokenizers(source, target))
    monkeypatch.setattr(reading, 'outputs', lambda run, rows, *given: read.extend(rows) or [0.0] * len(rows))
    embed(run, ['cab'])
    assert read[0]['encoder_inputs'].tolist() == [*source.encode('cab'), source.specials.eos]
    assert source.encode('c') != target.encode('c')


def test_long_texts_are_cut_to_what_the_model_takes_and_counted(workdirs, capsys) -> None:
    run = Run.load(workdirs / 'bert', headless=True)
    room = run.config.model.max_len - 2
    long = ['a b ' * room, 'b ' * (room + 1), 'b ' * room]
    found = embed(run, long)
    assert capsys.readouterr().err == f'2 of 3 texts were cut to {room} tokens\n'
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_allclose(found, one_by_one(run, ['a b ' * (room // 2), long[2], long[2]], 'mean'), atol=2e-5)


def test_a_length_cuts_texts_and_must_leave_a_token(workdirs, capsys) -> None:
    run = Run.load(workdirs / 'bert', headless=True)
    found = embed(run, ['a b b b', 'a b', 'a'], length=4)
    assert capsys.readouterr().err == '1 of 3 texts were cut to 2 tokens\n'
    np.testing.assert_array_equal(found[0], found[1])
    for length in (2, run.config.model.max_len + 1):
        with pytest.raises(UserError, match=rf'--length={length} must be from 3 to model\.max_len='):
            embed(run, ['a'], length=length)


def test_few_shapes_serve_all_lengths_the_longest_first() -> None:
    sizes = [1, 16, 17, 40, 64, 65, 100, 3]
    rows = [{'inputs': np.arange(size)} for size in sizes]
    seen = list(many_rows.batches(rows, 9, 2, 100))
    assert [batch['inputs'].shape for _, batch in seen] == [(2, 100), (2, 64), (2, 32), (2, 16), (2, 16)]
    assert sorted(index for chosen, _ in seen for index in chosen) == list(range(len(sizes)))
    chosen, batch = seen[2]
    assert chosen == [2] and batch['inputs'][0].tolist() == [*range(17), *[9] * 15]
    assert batch['positions'].tolist() == [[*range(17), *[-1] * 15], [-1] * 32]


def test_padding_of_rows_with_positions_of_their_own_has_none() -> None:
    rows = [
        {'inputs': [5, 6], 'positions': [0, 1], 'segment_ids': [1, 1], 'segment_weights': [1]},
        {'inputs': [5, 6, 7], 'positions': [0, 1, 0], 'segment_ids': [1, 1, 2], 'segment_weights': [1, 1]},
    ]
    ((chosen, batch),) = many_rows.batches(rows, 9, 3, 4)
    assert chosen == [0, 1]
    assert batch['positions'].tolist() == [[0, 1, -1, -1], [0, 1, 0, -1], [-1] * 4]
    assert batch['segment_ids'].tolist() == [[1, 1, 0, 0], [1, 1, 2, 0], [0] * 4]
    assert batch['segment_weights'].tolist() == [[1, 0], [1, 1], [0, 0]]  # of rows, not of tokens


@pytest.mark.slow
def test_the_command_writes_a_file_of_vectors_from_lines(workdirs, tmp_path) -> None:
    (tmp_path / 'in.txt').write_text('\n'.join(TEXTS[:3]) + '\n')
    flags = [f'--workdir={workdirs}/gpt2', f'--input={tmp_path}/in.txt', '--pooling=last', '--normalize']
    ran = subprocess.run(
        [sys.executable, '-m', 'tformer', 'embed', *flags, f'--output={tmp_path}/out.npy'],
        env=environment(), capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, '')
    found, run = np.load(tmp_path / 'out.npy'), Run.load(workdirs / 'gpt2')
    assert ran.stdout == f'{tmp_path}/out.npy: 3 vectors of {found.shape[1]} numbers\n'
    vectors = one_by_one(run, TEXTS[:3], 'last')
    np.testing.assert_allclose(found, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=2e-5)


def test_parquet_holds_the_texts_beside_their_vectors(workdirs, tmp_path) -> None:
    parquet = pytest.importorskip('pyarrow.parquet')
    command_line.main(
        ['tformer', 'embed', f'--workdir={workdirs}/bert', f'--output={tmp_path}/out.parquet', 'a b', 'c']
    )
    table = parquet.read_table(tmp_path / 'out.parquet').to_pydict()
    assert table['text'] == ['a b', 'c']
    np.testing.assert_array_equal(np.array(table['embedding'], np.float32), embed(workdirs / 'bert', ['a b', 'c']))


@pytest.mark.parametrize(
    ('output', 'line'),
    [
        ('out.npz', r"the ending='.npz' is unknown; did you mean '.npy'"),
        ('nowhere/out.npy', 'nowhere does not exist'),
        ('out.parquet', r"needs the package pyarrow: pip install 'tformer\[parquet\]'; or write .npy"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, output, line
) -> None:
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=line):
        command_line.main(['tformer', 'embed', '--workdir=nothing', f'--output={tmp_path}/{output}', 'a'])
    assert not list(tmp_path.iterdir())


def test_devices_share_the_rows(workdirs) -> None:
    run = Run.load(workdirs / 'bert', headless=True)
    assert run.config.mesh.data == 4 <= jax.device_count()
    np.testing.assert_allclose(embed(run, TEXTS[:1]), one_by_one(run, TEXTS[:1], 'mean'), atol=2e-5)
