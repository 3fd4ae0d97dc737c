"""Data that a resumed run must share with its checkpoint."""

import dataclasses
import re

import pytest

import toy_data
from tformer.config import Config, Data, Model, Train, override
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.training import dummy_batch, setup
from tformer.training.setup import VALIDATION, check_same_data
from whole_runs import load

FACTS = {'tokenizers': 'a', 'training examples': 10, VALIDATION: 'b'}


def test_other_training_data_are_refused_and_facts_that_are_not_recorded_are_not_compared():
    check_same_data(FACTS, FACTS)
    check_same_data({'tokenizers': 'a'}, FACTS)
    with pytest.raises(UserError, match=r'other data: training examples 10 there, 11 here$'):
        check_same_data(FACTS, {**FACTS, 'training examples': 11}, ['data.valid_path'])


def test_other_validation_data_are_said_where_they_may_differ_by_the_first_process(capsys, monkeypatch):
    other = {**FACTS, VALIDATION: 'c'}
    with pytest.raises(UserError, match=r'--may_differ=data\.valid_path accepts it$'):
        check_same_data(FACTS, other)
    check_same_data(FACTS, other, ['data.valid_path'])
    assert f'{VALIDATION} b there, c here' in capsys.readouterr().err
    monkeypatch.setattr(setup.processes, 'first', lambda: False)
    check_same_data(FACTS, other, ['data.valid_path'])
    assert not capsys.readouterr().err


def test_without_data_the_vocabulary_is_that_of_the_workdir_that_lends_its_tokenizers(tmp_path):
    read = Char.train(['abc'], Data(byte_fallback=False))
    Tokenizers(None, read).save(tmp_path)
    stated = Config(data=Data(tokenizer_from=str(tmp_path), tokenizer_vocab_size=77), train=Train(num_steps=1))
    assert dummy_batch.assumed(stated).model.vocab_size == read.vocab_size != 77
    nowhere = dataclasses.replace(stated, data=dataclasses.replace(stated.data, tokenizer_from=None))
    assert dummy_batch.assumed(nowhere).model.vocab_size == 77


def test_the_random_tokens_of_a_batch_are_those_of_other_objectives():
    def batch(objective):
        model = Model(family='encoder', vocab_size=50, num_classes=3)
        train = Train(num_steps=1, batch_size=2, objective=objective)
        return dummy_batch.random_batch(Config(model=model, data=Data(length=8), train=train))

    words, classes = batch('masked_lm'), batch('classification')
    assert 'labels' in classes and 'labels' not in words
    for name in words:
        assert (words[name] == classes[name]).all(), name


def test_a_run_states_in_how_many_processes_its_batches_are_made(tmp_path, monkeypatch):
    config = load('translate.py:smoke', tmp_path, data__cache_dir=str(tmp_path / 'cache'))
    assert config.data.num_workers is None
    mesh = meshes.make_mesh(config.mesh)
    monkeypatch.setattr(setup.os, 'cpu_count', lambda: 8)
    assert setup.load_data(config, tmp_path, mesh).config.data.num_workers == 0
    monkeypatch.setattr(setup.meshes, 'jax_platform', lambda mesh: 'gpu')
    assert setup.load_data(config, tmp_path, mesh).config.data.num_workers == 2
    stated = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=1))
    assert setup.load_data(stated, tmp_path, mesh).config.data.num_workers == 1
    assert [setup.num_workers('tpu', cores) for cores in (1, 3, 4, 16, 200)] == [0, 0, 1, 4, 4]


def test_the_lengths_of_the_training_split_decide_the_buckets_of_all_and_a_resumed_run_keeps_its_own(tmp_path):
    config = load('translate.py:smoke', tmp_path, data__cache_dir=str(tmp_path / 'cache'), train__num_steps='2000')
    mesh = meshes.make_mesh(config.mesh)

    def loaded(num_buckets, before=None):
        stated = dataclasses.replace(config, data=dataclasses.replace(config.data, num_buckets=num_buckets))
        return setup.load_data(stated, tmp_path, mesh, before)

    found, two = loaded(None), setup.checkpoint_metadata(loaded(2))
    number = found.config.data.num_buckets
    assert number == len(found.batches.shapes) == found.valid.num_buckets > 2
    assert loaded(None, setup.checkpoint_metadata(found)).fingerprint == found.fingerprint
    assert loaded(None, two).config.data.num_buckets == 2
    with pytest.raises(UserError, match=r'data\.num_buckets'):
        loaded(number, two)


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    """Returns (fields, --may_differ) -> the data of the life after the first of a run on two sets."""
    place = tmp_path_factory.mktemp('mixed')
    parts = [toy_data.parallel(place / name, train=size) for name, size in (('a', 48), ('b', 32))]
    fields = {'data__path': '()', 'data__cache_dir': str(place / 'cache'), 'data__tokenizer': 'symbol'}
    mixture = str(tuple(f'path={part} weight={weight}' for part, weight in zip(parts, (1, 2), strict=True)))
    config = load('translate.py:smoke', place, **fields, data__mixture=mixture, data__mixture_temperature='2')
    first = setup.load_data(config, place, meshes.make_mesh(config.mesh))

    def again(fields, may_differ=()):
        stated = override(config, fields)
        return setup.load_data(
            stated, place, meshes.make_mesh(stated.mesh), setup.checkpoint_metadata(first), may_differ
        )

    return again, config.data.mixture


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('data.mixture_stages', ('step=3 weights=1,3',)),
        ('data.mixture_temperature', 3.0),
        ('train.batch_size', 48),
    ],
)
def test_a_field_whose_batches_are_others_is_named_and_no_flag_is(mixed, field, value):
    again, _ = mixed
    difference = rf'{re.escape(field)} \([^:]* there, {re.escape(repr(value))} here\)'
    with pytest.raises(
        UserError, match=rf'another config: {difference}.*; --may_differ does not accept other batches$'
    ):
        again({field: value})
    with pytest.raises(UserError, match=rf'batches, with {difference}: (?!.*validation).* accept other batches$'):
        again({field: value}, [field])


def test_a_flag_is_named_that_accepts_a_field(mixed):
    again, _ = mixed
    cut = {'data.overlong': 'truncate'}  # no text is too long
    with pytest.raises(
        UserError, match=r"data\.overlong \('drop' there, .*\(or name the fields in --may_differ, where"
    ):
        again(cut)
    assert again(cut, ['data.overlong']).config.data.overlong == 'truncate'


def test_other_weights_of_a_mixture_are_named(mixed):
    again, (first, second) = mixed
    with pytest.raises(
        UserError, match=r"with data\.mixture \(.* there, .*weight=3'\) here\): .*fingerprint of the data"
    ):
        again({'data.mixture': (first, second.replace('weight=2', 'weight=3'))})
    doubled = first.replace('weight=1', 'weight=2'), second.replace('weight=2', 'weight=4')
    assert again({'data.mixture': doubled}).fingerprint == again({}).fingerprint
