"""What a hub directory says of its classes, its two tokenizers and its numbers."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

import hub_directories
import make_hf_reference as references
from tformer.commands.import_ import settled
from tformer.config import Data
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.errors import UserError
from tformer.hf import convert, tokenizer_files, vocabularies
from tformer.hf.directory import HubDirectory, open_hub

CLASSIFIER = {'model_type': 'bert', 'architectures': ['BertForSequenceClassification']}


@pytest.mark.parametrize(
    ('fields', 'labels'),
    [
        (
            {'id2label': {'10': 'k', **{str(i): 'abcdefghij'[i] for i in (2, 0, 1, *range(3, 10))}}},
            tuple('abcdefghijk'),
        ),
        ({'id2label': {'1': 'b', '2': 'c'}, 'num_labels': 3}, ('LABEL_0', 'LABEL_1', 'LABEL_2')),
        ({}, ('LABEL_0', 'LABEL_1')),
        ({'problem_type': 'regression', 'id2label': {'0': 'a'}}, ()),
    ],
)
def test_classes_have_their_names_in_the_order_of_their_ids(fields, labels) -> None:
    assert HubDirectory(pathlib.Path('nowhere'), {**CLASSIFIER, **fields}).labels == labels


def test_two_classes_of_one_name_are_refused() -> None:
    fields = {**CLASSIFIER, 'id2label': {'0': 'a', '1': 'b', '2': 'a'}}
    with pytest.raises(UserError, match=r"^config\.json: id2label names two classes 'a'; each must have its own name$"):
        _ = HubDirectory(pathlib.Path('nowhere'), fields).labels


def test_of_two_tokenizers_one_reads_and_the_other_writes(monkeypatch) -> None:
    source, target = (
        vocabularies.sentence_pieces(SentencePiece.train([text] * 50, Data(tokenizer_vocab_size=280)).dump(), 'here')
        for text in ('ab', 'yz')
    )
    for given, read in ((None, target), (source, source)):
        stored = target.encode(), given and given.encode()
        monkeypatch.setattr(tokenizer_files, 'read', lambda path, family, stored=stored: stored)
        marian = {'model_type': 'marian', 'architectures': ['MarianMTModel']}
        found = HubDirectory(pathlib.Path('nowhere'), marian).tokenizers
        assert found.source is not None and found.source.dump() == read.encode()
        assert found.target.dump() == target.encode()


def with_specials(place: pathlib.Path, name: str, names: list[str], around: str, **fields: object) -> HubDirectory:
    """Writes the directory of a reference with these special tokens, around a text as `around` says."""
    import tokenizers as library

    hub_directories.write(place, name, **fields)
    made = library.Tokenizer(
        library.models.WordLevel({**dict(zip(names, range(20), strict=False)), 'a': 30, 'b': 31}, 'a')
    )
    made.add_special_tokens(names)
    known = [(token, names.index(token)) for token in around.split() if token != '$A']
    made.post_processor = library.processors.TemplateProcessing(around, special_tokens=known)
    made.save(str(place / 'tokenizer.json'))
    return open_hub(str(place))


def test_an_encoder_has_the_special_tokens_of_its_config_where_its_file_has_others_by_better_known_names(
    tmp_path: pathlib.Path,
) -> None:
    """As ModernBERT's files have."""
    names = ['<|padding|>', '<|endoftext|>', '[UNK]', '[CLS]', '[SEP]', '[PAD]', '[MASK]']
    ids = {'bos_token_id': 3, 'eos_token_id': 4, 'cls_token_id': 3, 'sep_token_id': 4, 'pad_token_id': 5}
    hub = with_specials(tmp_path, 'modernbert', names, '[CLS] $A [SEP]', **ids)
    assert hub.run_config().train.objective == 'masked_lm'
    specials = hub.tokenizers.target.specials
    assert (specials.bos, specials.eos, specials.cls, specials.sep, specials.pad, specials.mask) == (3, 4, 3, 4, 5, 6)


def test_the_settings_of_a_tokenizer_come_before_config_json(tmp_path: pathlib.Path) -> None:
    names = ['<s>', '</s>', '<|endoftext|>', '<|turn|>']
    hub = with_specials(tmp_path, 'llama', names, '<s> $A', bos_token_id=0, eos_token_id=[2, 1], pad_token_id=1)
    assert hub.run_config().decode.ends == ('</s>',)
    settings = {'eos_token': {'content': '<|turn|>'}, 'pad_token': 'b'}  # the last of which is no special token
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    hub = open_hub(str(tmp_path))
    assert (hub.tokenizers.target.specials.eos, hub.tokenizers.target.specials.pad) == (3, 1)
    assert hub.run_config().decode.ends == ('<|endoftext|>', '</s>')


@pytest.mark.parametrize(('pad', 'end'), [(1, ()), (None, ('eos',)), (2, ('eos',))])
def test_a_decoder_pools_the_last_token_that_is_not_the_padding_of_config_json(tmp_path, pad, end) -> None:
    names = ['<s>', '</s>', '<unk>']
    hub = with_specials(tmp_path, 'gpt2_class', names, '<s> $A </s>', bos_token_id=0, eos_token_id=1, pad_token_id=pad)
    assert hub.run_config().data.end == end


def test_positions_that_a_token_of_texts_is_left_out_of_are_refused(tmp_path: pathlib.Path) -> None:
    names = ['<s>', '</s>', '<pad>']
    with pytest.raises(
        UserError, match=r"roberta: with model.position_offset=2 .* 1 \('</s>'\), .* valid: a tokenizer in"
    ):
        settled(with_specials(tmp_path, 'roberta', names, '<s> $A </s>', pad_token_id=1), {})


@pytest.mark.parametrize(('wide', 'dtype'), [('lm_head.weight', 'float32'), ('model.norm.weight', 'bfloat16')])
def test_parameters_are_narrow_where_all_matrices_are(tmp_path, wide, dtype) -> None:
    tensors = references.load('llama').tensors
    narrow = {name: x if name == wide else np.asarray(x, ml_dtypes.bfloat16) for name, x in tensors.items()}
    hub_directories.write(tmp_path / 'hub', 'llama', tensors=narrow)
    assert open_hub(str(tmp_path / 'hub')).run_config().model.param_dtype == dtype


@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(monkeypatch, dtype) -> None:
    monkeypatch.setattr(convert, '_AT_ONCE', 4)
    most = ml_dtypes.finfo(dtype).max
    good = np.array([[0, 1, -1], [most, -most, 3], [5, 6, 7], [-0.0, 1e-7, 2]], dtype)
    assert all(convert._is_finite(x) for x in (good, good.T, good[0], good[0, 0], good[:0], good[:, :0]))
    for wrong in (np.nan, -np.nan, np.inf, -np.inf):
        for place in np.ndindex(good.shape):
            bad = good.copy()
            bad[place] = wrong
            assert not any(map(convert._is_finite, (bad, bad.T, bad.reshape(-1), bad[place])))


@pytest.mark.parametrize('named', ['BertForSequenceClassification', [3], {'a': 1}])
def test_classes_that_are_not_a_list_of_names_are_refused(named) -> None:
    hub = HubDirectory(pathlib.Path('nowhere'), CLASSIFIER | {'architectures': named})
    with pytest.raises(UserError, match=r'^config.json: architectures=.* is not a list of names$'):
        _ = hub.objective


@pytest.mark.parametrize('kind', ['pipe', 'directory', 'link to nowhere'])
@pytest.mark.parametrize(
    'name',
    ['config.json', 'generation_config.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja',
     'adapter_config.json', 'model.safetensors', 'model.safetensors.index.json'],
)  # fmt: skip
def test_what_has_the_name_of_a_file_and_is_none_is_refused(tmp_path, name, kind) -> None:
    """And not taken for one that is not there, which would change how the model reads or writes."""
    hub_directories.write(tmp_path, 'gpt2')
    for there in {name, 'model.safetensors' if name.startswith('model') else name}:
        (tmp_path / there).unlink(missing_ok=True)
    make = {'pipe': os.mkfifo, 'directory': os.mkdir, 'link to nowhere': lambda file: os.symlink('nowhere', file)}
    make[kind](tmp_path / name)
    with pytest.raises(UserError, match=rf'^(no file )?{tmp_path}/{name}[^\n]*$'):
        hub = open_hub(str(tmp_path))
        _ = hub.generation, hub.tokenizers, hub.tensors
