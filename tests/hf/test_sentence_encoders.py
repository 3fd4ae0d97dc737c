"""What a sentence encoder's directory says of its vectors is said where they are made otherwise."""

import dataclasses
import json
import pathlib

import pytest

import hub_directories
from tformer.commands.export import export
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.config import override
from tformer.hf import sentence_encoders


def write(place: pathlib.Path, mode: str, length: object = None, *modules: str) -> None:
    modes = {f'pooling_mode_{name}': name == mode for name in ('cls_token', 'mean_tokens', 'mean_sqrt_len_tokens')}
    for name in ('1_Pooling', *modules):
        (place / name).mkdir(parents=True)
    (place / sentence_encoders.POOLING).write_text(json.dumps({'word_embedding_dimension': 16, **modes}))
    (place / sentence_encoders.LENGTH).write_text(json.dumps({'max_seq_length': length, 'do_lower_case': False}))


@pytest.mark.parametrize(
    ('mode', 'length', 'modules', 'said'),
    [
        ('mean_tokens', None, ['2_Normalize'], None),
        ('mean_tokens', 512, [], None),
        ('mean_tokens', 256, ['2_Normalize'], '--length=256'),
        ('cls_token', None, [], '--pooling=cls'),
        ('cls_token', 128, ['2_Dense'], '--pooling=cls, --length=128, layers that are left out: 2_Dense'),
        ('mean_sqrt_len_tokens', None, [], "a pooling without counterpart: ['mean_sqrt_len_tokens']"),
    ],
)
def test_what_the_defaults_of_embed_do_not_do_is_named(
    tmp_path: pathlib.Path, mode: str, length: int | None, modules: list[str], said: str | None
) -> None:
    assert sentence_encoders.vectors_of(tmp_path, 512) is None
    write(tmp_path, mode, length, *modules)
    line = f'{tmp_path}: its vectors of texts are those of {said}'
    assert sentence_encoders.vectors_of(tmp_path, 512) == (line if said else None)


@pytest.mark.slow
def test_an_import_says_so(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub_directories.write(tmp_path / 'hub', 'bert')
    write(tmp_path / 'hub', 'cls_token')
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    assert capsys.readouterr().err == f'{tmp_path}/hub: its vectors of texts are those of --pooling=cls\n'


def test_a_run_that_compares_texts_is_exported_as_a_sentence_encoder(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the hub's library reads beside the model; a model of another objective has none of it."""
    hub_directories.write(tmp_path / 'hub', 'bert')
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    run = Run.load(tmp_path / 'run', headless=True)
    fields = {'train.objective': 'contrastive', 'model.pooling': 'max', 'data.length': 7, 'model.output_bias': False}
    pairs = dataclasses.replace(run, config=override(run.config, fields))
    export(pairs, tmp_path / 'out')
    written = {
        name: json.loads((tmp_path / 'out' / name).read_text()) for name in sentence_encoders.files(pairs.config)
    }
    assert [(each['path'], each['type'].rpartition('.')[2]) for each in written['modules.json']] == [
        ('', 'Transformer'),
        ('1_Pooling', 'Pooling'),
    ]
    pooling = written['1_Pooling/config.json']
    assert pooling.pop('word_embedding_dimension') == run.config.model.emb_dim
    assert [name for name, on in pooling.items() if on] == ['pooling_mode_max_tokens'] and len(pooling) == 4
    assert written['sentence_bert_config.json']['max_seq_length'] == 7
    capsys.readouterr()
    import_hub(str(tmp_path / 'out'), tmp_path / 'back')
    assert capsys.readouterr().err == f'{tmp_path}/out: its vectors of texts are those of --pooling=max, --length=7\n'
    export(run, tmp_path / 'plain')
    assert not (tmp_path / 'plain' / 'modules.json').exists()
