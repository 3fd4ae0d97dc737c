"""Which fields may differ between a run and its continuation."""

import re

import pytest

from tformer import config as config_lib
from tformer.config import Config
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.training import checkpoint, setup, workdir


def test_what_changes_parameters_or_updates_is_bound():
    free = {name for name in config_lib.field_types() if workdir.is_free(name)}
    assert {'decode.beam_size', 'mesh.fsdp', 'data.path', 'train.log_every', 'model.remat', 'train.loss_chunk'} <= free
    sections = ('decode.', 'evaluate.', 'mesh.')
    assert {name for name in free if not name.startswith(sections)} == set(workdir.FREE_FIELDS)
    bound = {'optimizer.learning_rate', 'optimizer.beta2', 'train.seed', 'train.batch_size', 'train.num_steps'}
    assert not free & (bound | {'model.emb_dim', 'model.dropout_rate', 'data.length', 'train.microbatches'})
    assert {name for name in free if name.startswith('optimizer.')} == {'optimizer.offload'}  # where its state waits


def test_a_bound_field_is_refused_unless_it_is_named(tmp_path):
    before = Config()
    free = config_lib.override(before, {'train.log_every': 7, 'mesh.fsdp': 2})
    workdir.check_config(tmp_path, before, free)
    other = config_lib.override(free, {'optimizer.learning_rate': 0.5})
    line = f'optimizer.learning_rate ({before.optimizer.learning_rate!r} there, 0.5 here); use a fresh'
    with pytest.raises(UserError, match=re.escape(f'was trained with another config: {line}')):
        workdir.check_config(tmp_path, before, other)
    workdir.check_config(tmp_path, before, other, may_differ=['optimizer.learning_rate'])


def test_another_objective_is_refused_before_other_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(setup.mixture, 'load', lambda *given: pytest.fail('data are read'))
    config = config_lib.override(Config(), {'model.family': 'encoder', 'train.objective': 'masked_lm'})
    line = "model.family ('decoder' there, 'encoder' here), train.objective ('causal_lm' there, 'masked_lm' here)"
    before = config_lib.override(config, {'model.family': 'decoder', 'train.objective': 'causal_lm'})
    with pytest.raises(UserError, match=re.escape(f'was trained with another config: {line}')):
        setup.load_data(config, tmp_path, meshes.make_mesh(config.mesh), {'config': config_lib.to_dict(before)})


def test_no_fewer_steps_are_asked_for_than_were_made(tmp_path):
    checkpoint.directory(tmp_path, 6).mkdir(parents=True)
    before = config_lib.override(Config(), {'train.num_steps': 6})
    workdir.check_config(tmp_path, before, before)
    fewer = config_lib.override(before, {'train.num_steps': 5})
    with pytest.raises(UserError, match=r'^train\.num_steps=5: .* has made 6 steps already; use a fresh --workdir$'):
        workdir.check_config(tmp_path, before, fewer, may_differ=['train.num_steps'])


def test_what_was_trained_cannot_be_changed_later(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    line = f'config.model.emb_dim is part of what was trained in {tmp_path} and cannot be changed'
    with pytest.raises(UserError, match=f'^{re.escape(line)}$'):
        workdir.changed_config(tmp_path, {'decode.max_len': '9', 'model.emb_dim': '8'})


def test_the_tokenizers_are_those_that_are_named_then_the_models_then_the_teachers(tmp_path):
    """A workdir that `tformer import` made has a checkpoint of step 0, of its own model."""
    taught = config_lib.override(Config(), {'train.teacher': 'taught'})
    started = config_lib.override(taught, {'train.init_from': 'started'})
    named = config_lib.override(started, {'data.tokenizer_from': 'named'})
    found = [workdir.tokenizer_lender(each, tmp_path) for each in (Config(), taught, started, named)]
    assert found == [None, 'taught', 'started', 'named']
    (tmp_path / 'checkpoints' / '0').mkdir(parents=True)
    found = [workdir.tokenizer_lender(each, tmp_path) for each in (Config(), taught, started, named)]
    assert found == [str(tmp_path), str(tmp_path), 'started', 'named']


@pytest.fixture
def lent(monkeypatch):
    """A lender of a head whose classes are given."""

    def be(objective, labels):
        monkeypatch.setattr(workdir, '_lent_classes', lambda source: (objective, tuple(labels)))

    return be


def classes_of(made, objective='classification', **fields):
    fields = {'train.objective': objective, 'train.init_from': 'there', **fields}
    return workdir._with_lent_classes(
        config_lib.override(Config(), fields), Tokenizers(None, None, tuple(made)), None
    ).labels


def test_the_classes_of_a_lent_head_keep_their_order(lent, capsys):
    """Its rows are loaded by their number."""
    lent('classification', ['pos', 'neg', 'mid'])
    assert classes_of(['mid', 'neg', 'pos']) == ('pos', 'neg', 'mid')
    assert classes_of(['pos', 'neg']) == ('pos', 'neg')  # another number: the head is fresh
    assert classes_of(['mid', 'neg', 'pos'], 'token_classification') == ('mid', 'neg', 'pos')
    assert classes_of(['mid', 'neg', 'pos'], **{'train.init_from': None}) == ('mid', 'neg', 'pos')
    with pytest.raises(UserError, match=r'there: the classes of its head are pos, neg, mid, and here they are a, b, c'):
        classes_of(['a', 'b', 'c'])
    assert classes_of(['a', 'b', 'c'], **{'train.init_except': ('class_head',)}) == ('a', 'b', 'c')
    for other in ('pooler', 'class_head.classes.bias'):  # what is not the rows of the head, or not all of them
        assert classes_of(['mid', 'neg', 'pos'], **{'train.init_except': (other,)}) == ('pos', 'neg', 'mid')
    stated = ('mid', 'neg', 'pos')
    with pytest.raises(UserError, match=r'begins the head anew; or state data\.labels in that order'):
        classes_of(stated, **{'data.labels': stated})
    lent('token_classification', ['O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC'])
    found = classes_of(
        ['O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER'], 'token_classification', **{'data.labels': ('LOC', 'PER')}
    )
    assert found == ('O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC')
    capsys.readouterr()
    lent('classification', ['LABEL_0', 'LABEL_1'])
    assert classes_of(['a', 'b']) == ('a', 'b')
    assert 'its classes have no names, and are taken for a, b' in capsys.readouterr().err
