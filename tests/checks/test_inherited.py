"""A config whose model is that of the run or the hub directory that it starts from."""

import json
import pathlib

import pytest

import hub_directories
import recipes
import toy_data
from tformer import checks, config
from tformer.commands.train import train
from tformer.config import Config, tasks
from tformer.errors import UserError
from tformer.hf.directory import open_hub

TUNED = {'train.init_model': True, 'train.num_steps': 2, 'train.objective': 'classification', 'data.length': 16}


def lender(place: pathlib.Path, **fields: object) -> str:
    """Returns a workdir of which only config.json is there."""
    changed = {'train.num_steps': 9, **{name.replace('__', '.'): value for name, value in fields.items()}}
    place.mkdir()
    (place / 'config.json').write_text(json.dumps(config.to_dict(config.override(Config(), changed))))
    return str(place)


def settled(place: str, *stated: str, **fields: object) -> Config:
    changed = {**TUNED, 'train.init_from': place, **{name.replace('__', '.'): value for name, value in fields.items()}}
    return checks.settle(config.override(Config(), changed), stated)


def test_the_model_is_theirs_and_how_it_is_computed_is_ours(tmp_path: pathlib.Path) -> None:
    theirs = lender(
        tmp_path / 'bert', model__family='encoder', model__emb_dim=96, model__norm_placement='post',
        model__dropout_rate=0.2, model__param_dtype='bfloat16', model__scan_layers=False, model__num_classes=7,
        train__objective='classification', train__num_epochs=None,
    )  # fmt: skip
    ours = settled(theirs, model__dropout_rate=0.3)
    model = ours.model
    assert (model.family, model.emb_dim, model.norm_placement, model.dropout_rate) == ('encoder', 96, 'post', 0.3)
    assert (model.param_dtype, model.scan_layers, model.num_classes) == ('float32', True, None)
    assert ours.train.num_steps == 2 and ours.train.init_from == theirs and not ours.train.init_model
    assert checks.settle(ours) == ours
    assert settled(theirs, 'model.dropout_rate').model.dropout_rate == 0.1  # stated, although it is the default


def test_tokens_around_a_text_are_theirs(tmp_path: pathlib.Path) -> None:
    theirs = lender(
        tmp_path / 'gpt2', train__objective='causal_lm', data__start=(), data__bidirectional_prefix=False,
        data__length=99, data__end=(), data__separator=(),
    )  # fmt: skip
    data = settled(theirs, train__objective='seq2seq').data
    assert (data.start, data.bidirectional_prefix, data.length) == ((), False, 16)
    data = settled(theirs).data
    assert (data.start, data.end, data.separator) == ((), (), ())


@pytest.mark.parametrize(
    ('family', 'objective', 'pooling', 'wanted'),
    [
        ('decoder', 'causal_lm', 'max', ('last', False)),
        ('encoder', 'masked_lm', 'cls', ('mean', False)),
        ('encoder', 'classification', 'cls', ('cls', True)),
        ('decoder', 'classification', 'mean', ('mean', True)),
    ],
)
def test_texts_are_pooled_as_there_or_as_their_family_can(tmp_path, family, objective, pooling, wanted) -> None:
    theirs = lender(
        tmp_path / 'run', model__family=family, model__pooling=pooling, model__pooler=True, train__objective=objective
    )
    model = settled(theirs).model
    assert (model.pooling, model.pooler) == wanted
    tagged = settled(theirs, train__objective='token_classification').model
    assert (tagged.pooling, tagged.pooler) == ('mean', False)


NARROW = {'train__init_narrow': ('optimizer.learning_rate=2e-4', 'optimizer.lr_multipliers=embed=10,mlp=2')}


@pytest.mark.parametrize(('width', 'narrow'), [(512, True), (520, False)])
def test_a_narrow_model_is_trained_by_the_fields_for_one(tmp_path: pathlib.Path, width: int, narrow: bool) -> None:
    theirs = lender(tmp_path / 'bert', model__emb_dim=width)
    ours = settled(theirs, optimizer__learning_rate=5e-5, **NARROW)
    assert ours.optimizer.learning_rate == (2e-4 if narrow else 5e-5)
    assert ours.optimizer.lr_multipliers == (('embed=10', 'mlp=2') if narrow else ())
    assert ours.train.init_narrow == () and checks.settle(ours) == ours
    stated = settled(theirs, 'optimizer.learning_rate', optimizer__learning_rate=5e-5, **NARROW)
    assert stated.optimizer.learning_rate == 5e-5


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ('optimizer.rate', r'^train\.init_narrow=optimizer\.rate is not FIELD=VALUE'),
        ('optimizer.rat=1', r'^config\.optimizer\.rat is not a field'),
        ('optimizer.learning_rate=a', r"^config\.optimizer\.learning_rate='a' is not float$"),
    ],
)
def test_a_malformed_field_of_narrow_models_is_one_line(tmp_path: pathlib.Path, given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        settled(lender(tmp_path / 'bert'), train__init_narrow=(given,))


def test_fields_of_narrow_models_are_refused_where_no_model_is_taken() -> None:
    cfg = config.override(Config(), {'train.num_steps': 2, 'train.init_narrow': ('optimizer.learning_rate=1e-4',)})
    with pytest.raises(UserError, match=r'init_narrow=.* has no effect here: .* train\.init_model is True'):
        checks.settle(cfg, ['train.init_narrow'])


def test_a_run_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    lender(tmp_path / 'bert')
    with pytest.raises(UserError, match=r"train.init_from=.*/bret has no config.json; did you mean '.*/bert'\?$"):
        settled(f'{tmp_path}/bret')
    with pytest.raises(UserError, match=r'^train.init_model=True needs train.init_from: a workdir or'):
        checks.load(f'{recipes.FOLDER}/finetune_classify.py')
    with pytest.raises(UserError, match=r'^train.init_model=True needs train.init_from: '):
        checks.resolve(config.override(Config(), TUNED), vocab_size=9)


TRAINED = [  # a recipe, the family of a hub directory, the head that is fresh
    ('finetune_classify:', 'bert', 'class_head'),
    ('finetune_classify:regression,lora', 'gpt2', 'number_head'),
    ('finetune_tag:layer_decay', 'bert', 'tag_head'),
    ('finetune_qa:frozen', 'bert', 'span_head'),
    ('finetune_lm:masked', 'bert', 'none'),
    ('finetune_lm:small', 'gpt2', 'none'),
    ('finetune_seq2seq:t5', 't5', 'none'),
    ('finetune_seq2seq:', 'gpt2', 'none'),
]


def loaded(variant: str, hub: pathlib.Path, **fields: object) -> Config:
    file, _, argument = variant.partition(':')
    small = {'data.length': 16, 'optimizer.frozen_layers': 1} if argument == 'frozen' else {'data.length': 16}
    more = {'decode.max_len': 4} if file == 'finetune_seq2seq' else {}
    stated = {**small, **more, 'train.init_from': str(hub), **fields}
    return checks.load(f'{recipes.FOLDER}/{file}.py:{argument}', stated)


@pytest.mark.parametrize(('variant', 'family', 'fresh'), TRAINED)
def test_a_recipe_states_no_shape_and_says_nothing_of_what_it_takes(tmp_path, capsys, variant, family, fresh) -> None:
    hub_directories.write(tmp_path / 'hub', family)
    theirs = open_hub(str(tmp_path / 'hub')).run_config().model
    cfg = loaded(variant, tmp_path / 'hub')
    ours = cfg.model
    for name in ('family', 'emb_dim', 'num_encoder_layers', 'vocab_size', 'position', 'norm_placement', 'activation'):
        assert getattr(ours, name) == getattr(theirs, name)
    assert cfg.train.objective in tasks.TASKS and capsys.readouterr().err == ''
    checks.resolve(cfg, vocab_size=theirs.vocab_size or 1, encoder_vocab_size=theirs.vocab_size, num_classes=2)


@pytest.mark.proof
@pytest.mark.parametrize(('variant', 'family', 'fresh'), TRAINED)
def test_a_recipe_trains_from_the_hub(tmp_path, capsys, variant, family, fresh) -> None:
    hub_directories.write(tmp_path / 'hub', family)
    data = MADE[variant.partition(':')[0]](tmp_path / 'data')
    short = {'train.num_epochs': None, 'train.num_steps': 4, 'train.batch_size': 4}
    quick = {'data.path': str(data), 'mesh.data': 1, 'evaluate.samples': 0}
    run = train(loaded(variant, tmp_path / 'hub', **short, **quick), tmp_path / 'run')
    assert (run.config.train.eval_every, run.config.optimizer.warmup_steps) == (1, 1)
    said = capsys.readouterr()
    assert fresh in said.out.partition('fresh: ')[2].partition('\n')[0] and 'loaded: ' in said.out
    assert 'was trained otherwise' not in said.err


def letters(place: pathlib.Path, line: str, ending: str) -> pathlib.Path:
    for split in ('train', 'valid', 'test'):
        toy_data.write(place / f'{split}.{ending}', [line, line.replace('1', '2').replace('X', 'Y')] * 8)
    return place


ANSWERS = {'question': 'a', 'context': 'b c d', 'answers': {'text': ['b'], 'answer_start': [0]}}
MADE = {
    'finetune_classify': lambda place: letters(place, '1\ta b c', 'tsv'),
    'finetune_tag': lambda place: letters(place, 'a B-X\nb O\n', 'conll'),
    'finetune_qa': lambda place: letters(place, json.dumps(ANSWERS), 'jsonl'),
    'finetune_seq2seq': lambda place: letters(place, 'a b\tb a', 'tsv'),
    'finetune_lm': lambda place: letters(place, 'a b c d e f', 'txt'),
}
