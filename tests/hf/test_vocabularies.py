"""The older vocabularies of the hub give the ids of the programs that they were made for."""

import io
import json
import pathlib
import re

import pytest
import sentencepiece

import hub_files
from hub_files import PROBES as TEXTS
from hub_files import trained
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.errors import UserError
from tformer.hf import tokenizer_files, vocabularies


def tokenizer(place: pathlib.Path, family: str) -> HubTokenizer:
    target, source = tokenizer_files.read(place, family)
    assert source is None
    return HubTokenizer(target)


@pytest.mark.parametrize('bytes_', [True, False])
@pytest.mark.parametrize('normalization', ['nmt_nfkc', 'identity'])
@pytest.mark.parametrize('kind', ['unigram', 'bpe'])
def test_a_sentencepiece_model_gives_sentencepieces_ids(
    tmp_path: pathlib.Path, kind: str, normalization: str, bytes_: bool
) -> None:
    fields = {'model_type': kind, 'normalization_rule_name': normalization, 'byte_fallback': bytes_}
    theirs = trained(tmp_path, 'tokenizer.model', **fields)
    ours = tokenizer(tmp_path, 'llama')
    assert ours.vocab_size == theirs.vocab_size()
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'b']


def added(place: pathlib.Path, first: int) -> HubTokenizer:
    """Returns the tokenizer of a BERT of two words, to which one file adds a token of each kind."""
    (place / 'vocab.txt').write_text('\n'.join(WORDS) + '\n')
    (place / 'added_tokens.json').write_text(json.dumps({'</ent>': first + 1, '<ent>': first}))
    token = {'content': '<sep2>', 'special': True, 'normalized': False, 'lstrip': False, 'rstrip': False}
    listed = {str(index): {'content': word, 'special': True} for index, word in enumerate(WORDS[:5])}
    settings = {'added_tokens_decoder': {**listed, str(first + 2): token}}
    (place / 'tokenizer_config.json').write_text(json.dumps(settings))
    return tokenizer(place, 'bert')


def test_tokens_added_to_a_vocabulary_follow_it(tmp_path: pathlib.Path) -> None:
    found = added(tmp_path, 7)
    assert found.vocab_size == 10 and found.encode('a <ent> b </ent> A') == [5, 7, 6, 8, 5]
    assert found.special_names['<sep2>'] == 9 and found.encode('<sep2>').count(9) == 0


def test_tokens_added_elsewhere_are_refused(tmp_path: pathlib.Path) -> None:
    line = r"added_tokens\.json: '<ent>' has the id 9, and the vocabulary gives it 7$"
    with pytest.raises(UserError, match=line):
        added(tmp_path, 9)


def test_a_japanese_bert_is_not_read_as_english_words(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'vocab.txt').write_text('\n'.join(WORDS))
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    with pytest.raises(UserError, match=r'tokenizer_class=BertJapaneseTokenizer has no counterpart: it splits'):
        tokenizer_files.read(tmp_path, 'bert')


def test_the_pieces_that_were_merged_first_are_merged_first(tmp_path: pathlib.Path) -> None:
    """In these words every pair of letters is a piece, so that the order of the merges decides."""
    model, words = io.BytesIO(), ['abababab abcbcab bcabc cabca', 'bacab acbac bcbcbc', 'abc cab bac acb'] * 30
    fields = {'vocab_size': 60, 'model_type': 'bpe', 'hard_vocab_limit': False, 'minloglevel': 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=model, **fields)
    (tmp_path / 'tokenizer.model').write_bytes(model.getvalue())
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), tokenizer(tmp_path, 'llama')
    for text in ('abcabcab', 'bcabcacbab', 'cabcabbacab acbabc'):
        assert ours.encode(text) == theirs.encode(text), text


def test_spaces_that_a_model_keeps_are_kept(tmp_path: pathlib.Path) -> None:
    fields = {'add_dummy_prefix': False, 'remove_extra_whitespaces': False, 'normalization_rule_name': 'identity'}
    theirs = trained(tmp_path, 'tokenizer.model', byte_fallback=True, user_defined_symbols=['\n'], **fields)
    ours = tokenizer(tmp_path, 'llama')
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text


def test_t5_has_its_sentinels_behind_the_pieces_in_reverse(tmp_path: pathlib.Path) -> None:
    theirs = trained(tmp_path, 'spiece.model', pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / 'tokenizer_config.json').write_text('{"extra_ids": 3, "tokenizer_class": "T5Tokenizer"}')
    ours = tokenizer(tmp_path, 't5')
    size = theirs.vocab_size()
    assert ours.vocab_size == size + 3 and ours.sentinels.tolist() == [size + 2, size + 1, size]
    assert (ours.specials.pad, ours.specials.eos, ours.specials.unk) == (0, 1, 2)
    (tmp_path / 'tokenizer_config.json').write_text('{"extra_ids": -1}')
    with pytest.raises(UserError, match='extra_ids=-1 is not from 0 to 10,000'):
        tokenizer(tmp_path, 't5')


def test_xlm_roberta_has_other_ids_than_its_model(tmp_path: pathlib.Path) -> None:
    theirs = trained(tmp_path, 'sentencepiece.bpe.model', pad_id=-1)  # <unk>, <s>, </s>, as the hub's files have
    ours, specials = tokenizer(tmp_path, 'xlm-roberta'), tokenizer(tmp_path, 'xlm-roberta').specials
    assert (specials.bos, specials.pad, specials.eos, specials.unk) == (0, 1, 2, 3)
    assert specials.mask == ours.vocab_size - 1 == theirs.vocab_size() + 1
    ids = theirs.encode('the quick fox')
    assert theirs.unk_id() not in ids and ours.encode('the quick fox') == [index + 1 for index in ids]


def test_marians_two_models_share_the_ids_of_a_file(tmp_path: pathlib.Path) -> None:
    sides = {
        'source': trained(tmp_path, 'source.spm', pad_id=-1, bos_id=-1, eos_id=0, unk_id=1),
        'target': trained(tmp_path, 'target.spm', pad_id=-1, bos_id=-1, eos_id=0, unk_id=1, vocab_size=200),
    }
    pieces = {p.id_to_piece(i) for p in sides.values() for i in range(p.vocab_size())} - {'</s>', '<unk>'}
    ids = {name: index for index, name in enumerate(['</s>', '<unk>', *sorted(pieces), '<pad>'])}
    (tmp_path / 'vocab.json').write_text(json.dumps(ids))
    found = tokenizer_files.read(tmp_path, 'marian')
    assert found[1] is not None
    for side, stored in zip(('target', 'source'), found, strict=True):
        ours = HubTokenizer(stored or b'')
        for text in ('the quick fox', 'hello world 17 times'):
            assert ours.encode(text) == [ids[piece] for piece in sides[side].encode(text, out_type=str)], side
        assert (ours.specials.eos, ours.specials.pad) == (0, len(ids) - 1)


def test_a_piece_that_only_the_other_model_of_marian_has_is_never_worth_taking() -> None:
    """Its score is far below that of any text of known pieces; the others stay in the order of their ids."""
    (b, low), *known = vocabularies.in_order_of({'b': 0, 'a': 1, 'c': 2})([('a', -1.0), ('c', -3.0)])
    assert known == [('a', -1.0), ('c', -3.0)] and b == 'b' and low < -50


def test_berts_list_of_pieces(tmp_path: pathlib.Path) -> None:
    made = hub_files.bert()
    pieces = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    (tmp_path / 'vocab.txt').write_text(''.join(f'{piece}\n' for piece in pieces))
    ours = tokenizer(tmp_path, 'bert')
    assert ours.specials.cls == pieces.index('[CLS]') and ours.specials.mask == pieces.index('[MASK]')
    assert [ours.piece(i) for i in ours.encode('The QUICK <fox')] == ['the', 'quick', '<', 'fox']
    (tmp_path / 'tokenizer_config.json').write_text('{"do_lower_case": false}')
    assert tokenizer(tmp_path, 'bert').encode('QUICK') == [ours.specials.unk]


def test_gpt2s_list_of_merges(tmp_path: pathlib.Path) -> None:
    made = hub_files.gpt2()
    model = json.loads(made.to_str())['model']
    (tmp_path / 'vocab.json').write_text(json.dumps(made.get_vocab()))
    merges = [' '.join(pair) if isinstance(pair, list) else pair for pair in model['merges']]
    (tmp_path / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges, '']))
    ours, whole = tokenizer(tmp_path, 'gpt2'), HubTokenizer(made.to_str().encode())
    for text in TEXTS:
        assert ours.encode(text) == whole.encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.specials == whole.specials and ours.exact
    (tmp_path / 'tokenizer_config.json').write_text('{"add_prefix_space": true}')
    assert tokenizer(tmp_path, 'gpt2').encode('the') == ours.encode(' the')


WRONG = {
    ('tokenizer.model', b'no model'): 'is not a SentencePiece model',
    ('tokenizer.model', b''): 'is not a SentencePiece model of type unigram or BPE',
    ('spiece.model', b'\x0a\xff\xff\xff\xff\x0f'): 'is not a SentencePiece model',
    ('vocab.txt', b'\xff\xfe'): "can't decode byte",
    ('vocab.json', b'{"a": 0, "b": 2}'): 'the ids are not 0 to 1',
    ('vocab.json', b'{"a": "0"}'): 'the ids are not 0 to 0',
    ('merges.txt', b'a b\n'): "'a b' does not merge into a piece of vocab.json",
}


FAMILY = {'tokenizer.model': 'llama', 'spiece.model': 't5', 'vocab.txt': 'bert'}


@pytest.mark.parametrize(('name', 'content'), WRONG)
def test_a_malformed_vocabulary_is_refused_in_one_line(tmp_path: pathlib.Path, name: str, content: bytes) -> None:
    if name in ('vocab.json', 'merges.txt'):
        (tmp_path / 'vocab.json').write_text('{"a": 0, "<|endoftext|>": 1}')
        (tmp_path / 'merges.txt').write_text('')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(WRONG[name, content])) as error:
        tokenizer_files.read(tmp_path, FAMILY.get(name, 'gpt2'))
    assert '\n' not in str(error.value)


def test_a_vocabulary_of_another_family_is_not_read(tmp_path: pathlib.Path) -> None:
    trained(tmp_path, 'sentencepiece.bpe.model', pad_id=-1)
    for family, valid in (('qwen2', 'tokenizer.json'), ('bert', 'tokenizer.json, vocab.txt')):
        with pytest.raises(UserError, match=f'has no vocabulary of {family}; valid: {re.escape(valid)}$'):
            tokenizer_files.read(tmp_path, family)


@pytest.mark.parametrize(
    ('family', 'settings', 'lowers', 'spaced'),
    [
        ('bert', {'do_lower_case': True}, True, False),
        ('bert', {'do_lower_case': True, 'tokenizer_class': 'PreTrainedTokenizerFast'}, False, False),
        ('bert', {'do_lower_case': None}, False, False),
        ('gpt2', {'add_prefix_space': True, 'tokenizer_class': 'GPT2Tokenizer'}, False, True),
        ('llama', {'do_lower_case': True, 'add_prefix_space': True}, False, False),
    ],
)
def test_a_tokenizer_is_set_as_the_hubs_classes_set_it(
    tmp_path: pathlib.Path, family: str, settings: dict, lowers: bool, spaced: bool
) -> None:
    """Where tokenizer_config.json contradicts tokenizer.json, the hub's library goes by the settings."""
    tree = {'normalizer': {'type': 'BertNormalizer', 'lowercase': False, 'strip_accents': None}}
    tree['pre_tokenizer'] = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(tree))
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    stored = tokenizer_files.read(tmp_path, family)[0]
    found = json.loads(stored)
    assert (found['normalizer']['lowercase'], found['pre_tokenizer']['add_prefix_space']) == (lowers, spaced)
    assert (stored == (tmp_path / 'tokenizer.json').read_bytes()) == (not lowers and not spaced)
