"""A hub directory becomes a workdir that computes the hub's numbers, and trains on; what is wrong is said in a line."""

import importlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hub_directories
import make_hf_reference as references
from lives import HANG, environment
from tformer import checks, config
from tformer.commands import reading
from tformer.commands.embed import embed
from tformer.commands.export import export
from tformer.commands.import_ import import_hub
from tformer.commands.predict import predict
from tformer.commands.run import Run
from tformer.commands.train import train
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.hf import directory, safetensors
from tformer.hf.convert import Stacked
from tformer.model import build
from tformer.training import checkpoint, pretrained

FRAMED = {  # (data.start, data.source_start, decode.forced_end)
    'gpt2': ((), (), False),
    'llama': (('bos',), (), False),
    't5': (('bos',), (), False),  # T5's <pad>
    'bart': (('eos', 'bos'), ('bos',), True),
}


@pytest.fixture(scope='module')
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp('texts')
    for split in ('train', 'valid', 'test'):
        (place / f'{split}.txt').write_text('a b cc d e\n\nb c d\n' * 4)
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    ['gpt2', 'llama', 'bert', *(pytest.param(each, marks=pytest.mark.proof) for each in ('t5', 'bart', 'deepseek_v3'))],
)
@pytest.mark.proof_cases('llama', 'bert')
def test_the_workdir_computes_what_the_hubs_library_does(tmp_path: pathlib.Path, name: str) -> None:
    reference = hub_directories.write(tmp_path / 'hub', name, shard_bytes=4000)
    assert (tmp_path / 'hub' / safetensors.INDEX).exists()
    said = import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    run = Run.load(tmp_path / 'run')
    assert f'{run.num_parameters:,} parameters, train.objective={run.config.train.objective}' in said
    batch = {key: jnp.asarray(value) for key, value in reference.batch.items()}
    found = build(run.config.model).apply({'params': run.params}, batch)
    real = reference.batch['positions'] >= 0
    np.testing.assert_allclose(np.asarray(found)[real], reference.outputs['logits'][real], atol=1e-4)
    if name in FRAMED:
        data, decode = run.config.data, run.config.decode
        assert (data.start, data.source_start, decode.forced_end) == FRAMED[name]
        assert len(run.generate(['a b c'])) == 1


@pytest.mark.parametrize(('change', 'tied'), [(1.0, 'inputs'), (0.0, 'all')])
def test_an_output_of_mt5_is_its_own_where_it_differs_whatever_config_json_says(
    tmp_path: pathlib.Path, change: float, tied: str
) -> None:
    tensors = references.load('mt5').tensors
    tensors['lm_head.weight'] = tensors['shared.weight'] + change
    hub_directories.write(tmp_path, 'mt5', tensors=tensors, tie_word_embeddings=True)
    hub = directory.open_hub(str(tmp_path))
    model = hub.run_config().model
    assert model.tied_embeddings == tied and ('head/logits/kernel' in hub.parameters(model)) is (tied == 'inputs')


def first_loss(workdir: pathlib.Path) -> float:
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return next(line['train/loss'] for line in lines if 'train/loss' in line)


FIELDS = {'train.num_steps': 2, 'train.batch_size': 4, 'train.log_every': 1, 'evaluate.samples': 0, 'mesh.data': 1}


@pytest.mark.proof
def test_training_in_place_is_training_from_the_workdir_or_from_the_hub(tmp_path: pathlib.Path, texts) -> None:
    hub_directories.write(tmp_path / 'hub', 'gpt2')
    for name in ('own', 'lender'):
        import_hub(str(tmp_path / 'hub'), tmp_path / name, {'data.path': str(texts), 'data.length': 16})
    chosen = checks.load(f'{tmp_path}/own/config.json', FIELDS)
    for lender in ('lender', 'hub'):
        train(config.override(chosen, {'train.init_from': str(tmp_path / lender)}), tmp_path / f'of_{lender}')
    assert train(chosen, tmp_path / 'own').step == 2 and checkpoint.steps(tmp_path / 'own') == [0, 2]
    assert first_loss(tmp_path / 'own') == first_loss(tmp_path / 'of_lender') == first_loss(tmp_path / 'of_hub')
    train(chosen, tmp_path / 'fresh')
    assert first_loss(tmp_path / 'fresh') != first_loss(tmp_path / 'own')


@pytest.mark.slow
def test_a_run_starts_from_its_own_imported_workdir(tmp_path: pathlib.Path, texts: pathlib.Path) -> None:
    """Before the first update its parameters are the hub's, and so are its tokenizers."""
    reference = hub_directories.write(tmp_path / 'hub', 'gpt2')
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run', {'data.path': str(texts), 'data.length': 16})
    stopped = checks.load(f'{tmp_path}/run/config.json', {**FIELDS, 'optimizer.learning_rate': 1e-30})
    run = train(stopped, tmp_path / 'run')
    assert run.step == 2 and run.tokenizers.target.dump() == (tmp_path / 'hub' / 'tokenizer.json').read_bytes()
    table = reference.tensors['transformer.wte.weight']
    np.testing.assert_array_equal(run.params['embed']['table'], table)


asked: list[int] = []


class Counted(Stacked):
    """A parameter that notes which of its tensors are read."""

    def read(self, number: int) -> np.ndarray:
        asked.append(number)
        return super().read(number)


def test_a_parameter_is_placed_in_shares_by_any_mesh() -> None:
    """Each tensor is read once for each parameter, and each device holds its share of it, bit for bit."""
    reference = references.load('mixtral')
    hub = directory.HubDirectory(pathlib.Path(), reference.config)
    cfg = directory.models.model_of(reference.config)
    parameters = directory.convert.stacked_params(hub.family, reference.tensors, cfg)
    mesh = meshes.make_mesh(config.Mesh(data=2, fsdp=2, tensor=2))
    for parameter in parameters.values():
        counted = Counted(**vars(parameter))
        split = iter(('data', 'fsdp', 'tensor', *[None] * 9))
        axes = jax.sharding.PartitionSpec(*(next(split) if size % 2 == 0 else None for size in parameter.shape))
        asked.clear()
        placed = pretrained.place(counted, jax.sharding.NamedSharding(mesh, axes), 'float32')
        np.testing.assert_array_equal(np.asarray(placed), parameter.whole())
        assert asked == list(range(len(parameter.names))) and len(placed.addressable_shards) == 8


@pytest.mark.slow
def test_a_checkpoint_in_bfloat16_stays_so_and_one_in_float16_is_widened(tmp_path: pathlib.Path) -> None:
    for dtype, expected in ((ml_dtypes.bfloat16, 'bfloat16'), (np.float16, 'float32')):
        place = tmp_path / expected
        reference = hub_directories.write(place / 'hub', 'gpt2', dtype=dtype)
        import_hub(str(place / 'hub'), place / 'run')
        run = Run.load(place / 'run')
        table = run.params['embed']['table']
        assert run.config.model.param_dtype == str(table.dtype) == expected
        assert run.config.optimizer.master_dtype == ('float32' if expected == 'bfloat16' else None)
        wanted = reference.tensors['transformer.wte.weight'].astype(np.float32)
        np.testing.assert_array_equal(np.asarray(table, np.float32), wanted)


def test_a_checkpoint_without_a_head_is_exported_and_has_vectors_and_is_not_scored(
    tmp_path: pathlib.Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = references.load('bert').tensors
    base = {name: value for name, value in tensors.items() if name.startswith('bert.')}
    for named in ('BertForMaskedLM', 'BertModel'):
        hub_directories.write(tmp_path / 'hub', 'bert', tensors=base, architectures=[named])
        import_hub(str(tmp_path / 'hub'), tmp_path / ('other' if named != 'BertModel' else 'run'))
        said = capsys.readouterr().err
        assert (f'architectures={named}, but it has no tensors of head: only embed' in said) == (named != 'BertModel')
    with pytest.raises(UserError, match=r'was imported without head, which train\.objective=masked_lm needs'):
        Run.load(tmp_path / 'run')
    export(tmp_path / 'run', tmp_path / 'out')
    assert {*(safetensors.open_directory(tmp_path / 'out') or ())} == {*base}
    monkeypatch.setattr(reading, 'outputs', lambda run, rows, *given: [np.ones(16)] * len(rows))
    np.testing.assert_array_equal(embed(tmp_path / 'run', ['a b']), np.ones((1, 16)))


# -------------------------------------------------------------------------------------------------------- mistakes
def _changed(place: pathlib.Path, **fields: object) -> None:
    file = place / 'config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _linked(file: pathlib.Path, to: pathlib.Path) -> None:
    file.unlink()
    file.symlink_to(to)


def _numbers(place: pathlib.Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = dict(references.load('gpt2').tensors)
    tensors['transformer.wte.weight'] = change(tensors['transformer.wte.weight'])
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(place / 'model.safetensors', shapes, tensors.__getitem__)


def _framed(place: pathlib.Path, frame: object) -> None:
    file = place / 'tokenizer.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {'post_processor': frame}))


def _adapters_of(place: pathlib.Path, base: pathlib.Path) -> None:
    fields = {'peft_type': 'LORA', 'base_model_name_or_path': str(base), 'r': 2, 'lora_alpha': 4}
    (place / 'adapter_config.json').write_text(json.dumps({**fields, 'target_modules': ['c_attn']}))


WRONG: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    'no config.json': (lambda p: (p / 'config.json').unlink(), 'no file'),
    'a config.json of ours': (lambda p: (p / 'config.json').write_text('{}'), 'is not that of a hub'),
    'an unknown family': (lambda p: _changed(p, model_type='lama'), "did you mean 'llama'"),
    'a field without a counterpart': (lambda p: _changed(p, scale_attn_weights=False), 'scale_attn_weights=False'),
    'a head of another family': (lambda p: _changed(p, architectures=['GPT2ForMaskedLM']), 'architectures=GPT2For'),
    'no tensors': (lambda p: (p / 'model.safetensors').unlink(), 'has no tensors; valid: model.safetensors'),
    'truncated tensors': (lambda p: (p / 'model.safetensors').write_bytes(b'\x08'), 'is truncated'),
    'a missing tensor': (lambda p: _changed(p, n_layer=4), 'the checkpoint has no tensor transformer.h.3'),
    'another shape': (lambda p: _changed(p, n_positions=99), 'has shape (24, 16), the model needs (99, 16)'),
    'no vocabulary': (lambda p: (p / 'tokenizer.json').unlink(), 'has no vocabulary of gpt2; valid: tokenizer.json'),
    'an empty vocabulary': (lambda p: (p / 'tokenizer.json').write_bytes(b''), 'is not a tokenizer of'),
    'tokens around a text': (lambda p: _framed(p, {'type': 'Frame'}), 'the tokens around a text cannot be read: '),
    'a broken vocabulary': (lambda p: (p / 'tokenizer.json').write_text('[]'), 'is not a tokenizer of'),
    'another end': (lambda p: _changed(p, eos_token_id=5), 'eos_token_id=5, but the tokenizer ends a text with 0'),
    'a size that is no number': (lambda p: _changed(p, n_embd=float('nan')), 'n_embd=nan is not a whole number'),
    'layers beyond any model': (lambda p: _changed(p, n_layer=10**9), 'must be at most 1,024'),
    'a link to itself': (lambda p: _linked(p / 'model.safetensors', p / 'model.safetensors'), 'is not a file'),
    'whole numbers': (
        lambda p: _numbers(p, lambda x: x.astype(np.int64)),
        'transformer.wte.weight holds int64, not floating-point numbers',
    ),
    'a number that is none': (
        lambda p: _numbers(p, lambda x: np.where(np.arange(16) == 3, np.nan, x)),
        'gpt2: tensor transformer.wte.weight holds numbers that are NaN or infinite',
    ),
    'adapters of themselves': (lambda p: _adapters_of(p, p), 'has adapters itself'),
    'a broken generation_config.json': (lambda p: (p / 'generation_config.json').write_text('{'), 'generation_config'),
}  # fmt: skip


@pytest.mark.parametrize('case', WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: pathlib.Path, case: str) -> None:
    hub_directories.write(tmp_path / 'hub', 'gpt2')
    change, words = WRONG[case]
    change(tmp_path / 'hub')
    with pytest.raises(UserError, match=re.escape(words)) as error:
        import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    assert '\n' not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ['hub']


def test_a_head_that_the_family_has_no_place_for_is_named(tmp_path: pathlib.Path) -> None:
    hub = directory.HubDirectory(tmp_path, {'model_type': 't5', 'architectures': ['T5ForTokenClassification']})
    with pytest.raises(UserError, match='architectures=T5ForTokenClassification has no counterpart in t5'):
        _ = hub.objective


@pytest.mark.parametrize('named', ['T5ForQuestionAnswering', 'BartForQuestionAnswering'])
def test_answers_of_two_stacks_are_refused(tmp_path: pathlib.Path, named: str) -> None:
    hub = directory.HubDirectory(tmp_path, {'model_type': named[:-20].lower(), 'architectures': [named]})
    with pytest.raises(UserError, match=f'architectures={named} has no counterpart: its decoder reads the text one'):
        _ = hub.objective


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('transformers'), reason='needs torch and transformers')
@pytest.mark.parametrize(
    'name', ['gpt2', *(pytest.param(x, marks=pytest.mark.proof) for x in ('roberta', 't5', 'bart'))]
)
def test_classes_of_one_text_and_two_are_those_of_the_hubs_library(tmp_path: pathlib.Path, name: str) -> None:
    import tokenizers
    import torch

    torch.manual_seed(1)
    model = references.CASES[f'{name}_class'](16).eval()
    for key, index in hub_directories.ids(name).items():
        setattr(model.config, key, index)
    model.config.pad_token_id = 1 if name in ('roberta', 'bart') else 0
    model.config.decoder_start_token_id = {'t5': 0, 'bart': 2}.get(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / 'hub')
    made = tokenizers.Tokenizer.from_str(hub_directories.tokenizer(name))
    around = {'gpt2': ('$A', '$A $B'), 't5': ('$A </s>', '$A </s> $B </s>')}
    single, pair = around.get(name, ('<s> $A </s>', '<s> $A </s> </s> $B </s>'))
    known = [(token, made.token_to_id(token)) for token in {*pair.split()} - {'$A', '$B'}]
    made.post_processor = tokenizers.processors.TemplateProcessing(single, pair, known)
    made.save(str(tmp_path / 'hub' / 'tokenizer.json'))
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    texts = [('a b c',), ('d e f g', 'h i'), ('k',), ('a b', 'c d e f')]
    found = predict(tmp_path / 'run', [dict(zip(('text', 'pair'), given, strict=False)) for given in texts])
    for ours, given in zip(found, texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([made.encode(*given).ids])).logits[0]
        theirs = torch.softmax(logits, -1).tolist()
        np.testing.assert_allclose([*ours['probabilities'].values()], theirs, atol=1e-5)


ONE = {'id2label': {'0': 'score'}}


@pytest.mark.parametrize(
    ('fields', 'objective'),
    [
        ({}, 'classification'),
        (ONE, 'regression'),
        ({'num_labels': 1}, 'regression'),
        ({**ONE, 'problem_type': 'single_label_classification'}, 'classification'),
        ({'problem_type': 'regression'}, 'regression'),
    ],
)
def test_one_label_is_a_number_as_in_the_hubs_library(tmp_path: pathlib.Path, fields: dict, objective: str) -> None:
    named = {'model_type': 'bert', 'architectures': ['BertForSequenceClassification'], **fields}
    assert directory.HubDirectory(tmp_path, named).objective == objective
    several = {**named, 'problem_type': 'multi_label_classification'}
    with pytest.raises(UserError, match="problem_type='multi_label_classification' has no counterpart"):
        _ = directory.HubDirectory(tmp_path, several).objective


def test_a_workdir_in_use_is_not_written_over(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'gpt2')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'notes').touch()
    with pytest.raises(UserError, match='exists and is not empty'):
        import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['notes']


# ------------------------------------------------------------------------------------- repositories and pickles
def test_a_repositorys_name_is_downloaded_by_the_hubs_package(tmp_path: pathlib.Path, monkeypatch) -> None:
    hub_directories.write(tmp_path / 'hub', 'gpt2')
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path / 'hub')

    monkeypatch.setitem(sys.modules, 'huggingface_hub', types.SimpleNamespace(snapshot_download=download))
    assert directory.open_hub('org/name').family == 'gpt2'
    assert asked == [('org/name', directory.DOWNLOADED)] and not any('bin' in each for each in directory.DOWNLOADED)
    asked.clear()
    for file in (tmp_path / 'hub').glob('*.safetensors'):
        file.unlink()
    directory.open_hub('org/name')
    assert asked == [('org/name', directory.DOWNLOADED), ('org/name', (*directory.DOWNLOADED, 'pytorch_model*.bin'))]
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(UserError, match=r"org/name is not a directory, and .* pip install 'tformer\[hub\]'"):
        directory.open_hub('org/name')
    with pytest.raises(UserError, match=r'/nowhere/at/all is not a directory$'):
        directory.open_hub('/nowhere/at/all')


def test_adapters_of_a_repository_of_adapters_are_refused(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / 'outer').mkdir()
    _adapters_of(tmp_path / 'outer', pathlib.Path('org/inner'))
    hub_directories.write(tmp_path / 'hub', 'gpt2')
    _adapters_of(tmp_path / 'hub', tmp_path / 'hub')
    download = types.SimpleNamespace(snapshot_download=lambda name, allow_patterns: str(tmp_path / 'hub'))
    monkeypatch.setitem(sys.modules, 'huggingface_hub', download)
    with pytest.raises(UserError, match='base_model_name_or_path=org/inner has adapters itself'):
        directory.open_hub(str(tmp_path / 'outer'))


def test_a_pickle_is_refused_where_torch_is_not_installed(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / 'pytorch_model.bin').write_bytes(b'\x80\x02cos\nsystem\n.')
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(UserError, match=r'pytorch_model\.bin is a pickle, which only torch reads'):
        _ = directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors


@pytest.mark.skipif(not importlib.util.find_spec('torch'), reason='needs torch')
def test_a_pickle_is_read_weights_only_where_torch_is_installed(tmp_path: pathlib.Path) -> None:
    torch = importlib.import_module('torch')
    tensors = references.load('gpt2').tensors
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, tmp_path / 'pytorch_model.bin')
    found = directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors
    assert {*found} == {*tensors} and all(np.array_equal(found[name], tensors[name]) for name in tensors)
    torch.save({'x': torch.ones(2, dtype=torch.bfloat16)}, tmp_path / 'pytorch_model.bin')
    assert directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors['x'].dtype == ml_dtypes.bfloat16
    torch.save({'x': torch.ones(2)}, tmp_path / 'pytorch_model.bin', _use_new_zipfile_serialization=False)
    assert directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors['x'].sum() == 2
    torch.save({'x': torch.ones(2).to_sparse()}, tmp_path / 'pytorch_model.bin')
    with pytest.raises(UserError, match=r'tensor x of torch\.float32 is not read'):
        _ = directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors['x']
    for held, words in (({'x': pathlib.PurePosixPath('a')}, 'cannot be read weights-only'), ([], 'other things than')):
        torch.save(held, tmp_path / 'pytorch_model.bin')
        with pytest.raises(UserError, match=words) as error:
            _ = directory.HubDirectory(tmp_path, {'model_type': 'gpt2'}).tensors
        assert '\n' not in str(error.value)


@pytest.mark.slow
def test_the_commands_are_processes_that_end_in_a_line(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'gpt2')

    def tformer(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, '-m', 'tformer', *map(str, arguments)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG)

    ran = tformer('import', tmp_path / 'hub', f'--workdir={tmp_path}/run', '--config.decode.max_len=3')
    assert (ran.returncode, ran.stderr) == (0, ''), ran.stderr
    assert re.fullmatch(rf'{tmp_path}/run: gpt2, [\d,]+ parameters, train\.objective=causal_lm\n', ran.stdout)
    assert Run.load(tmp_path / 'run').config.decode.max_len == 3
    again = tformer('import', tmp_path / 'hub', f'--workdir={tmp_path}/run')
    assert (again.returncode, again.stdout, again.stderr.count('\n')) == (2, '', 1)
    ran = tformer('export', tmp_path / 'out', f'--workdir={tmp_path}/run', '--shard_bytes=9000')
    assert (ran.returncode, ran.stderr) == (0, ''), ran.stderr
    assert re.fullmatch(rf'{tmp_path}/out: gpt2, [\d,]+ numbers in \d+ file\(s\)\n', ran.stdout)
    assert directory.open_hub(str(tmp_path / 'out')).family == 'gpt2'
