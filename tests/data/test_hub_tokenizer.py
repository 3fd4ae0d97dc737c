"""Hub tokenizers: the ids of their file, their own special tokens, and texts that never turn into them."""

import base64
import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers as library
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from hub_files import FILES, TEXTS, gpt2, roberta
from small_decoding import generator
from tformer import checks
from tformer.checks import resolve
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers
from tformer.decode import text
from tformer.decode.rules import Rules
from tformer.errors import UserError
from tformer.model import build
from tformer.training import dummy_batch

SPECIALS = {  # pad, bos, eos, unk, mask, cls, sep
    'gpt2': ['<|endoftext|>'] * 4 + [None] + ['<|endoftext|>'] * 2,
    'roberta': ['<pad>', '<s>', '</s>', '<unk>', '<mask>', '<s>', '</s>'],
    'bert': ['[PAD]', '[CLS]', '[SEP]', '[UNK]', '[MASK]', '[CLS]', '[SEP]'],
    't5': ['<pad>', '<pad>', '</s>', '<unk>', None, '<pad>', '</s>'],
    'llama': ['</s>', '<s>', '</s>', '<unk>', None, '<s>', '</s>'],
}
LOSSLESS = ('gpt2', 'roberta')


@pytest.fixture(scope='module', params=FILES)
def kind(request):
    return request.param


@pytest.fixture(scope='module')
def file(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp(kind) / 'tokenizer.json'
    FILES[kind]().save(str(path))
    return path


@pytest.fixture(scope='module')
def ours(file):
    return HubTokenizer.train((), Data(tokenizer='huggingface', tokenizer_path=str(file.parent)))


@pytest.fixture(scope='module')
def theirs(file):
    made = library.Tokenizer.from_file(str(file))
    made.no_truncation()
    made.no_padding()
    return made


PLAIN = ['the quick fox returns x + 1', 'naïve café\n\tcosts 12', '', ' two  spaces ', 'The Ünknown 語 👩‍👩‍👧', 'a<b>c']


def test_ids_are_those_of_the_file(ours, theirs):
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in PLAIN]
    assert ours.encode_batch(PLAIN) == expected == [ours.encode(text) for text in PLAIN]
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids) for ids in expected]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.byte_lengths.shape == ours.ordinary.shape == (ours.vocab_size,)


def test_specials_are_found_by_their_names(kind, ours, theirs):
    fields = ('pad', 'bos', 'eos', 'unk', 'mask_or_none', 'cls', 'sep')
    found = [getattr(ours.specials, field) for field in fields]
    assert [index if index is None else theirs.id_to_token(index) for index in found] == SPECIALS[kind]
    if ours.specials.mask_or_none is None:
        with pytest.raises(UserError, match='no mask token'):
            _ = ours.specials.mask
    else:
        assert ours.specials.mask == ours.specials.mask_or_none
    for index in ours.specials.ids:
        assert not ours.ordinary[index] and ours.byte_lengths[index] == 0
        assert ours.piece(index) == theirs.id_to_token(index) and ours.decode([index]) == ''


def test_sentinels_are_those_of_the_file_and_those_that_are_added(kind, ours, theirs):
    own = [theirs.token_to_id(name) for name in ('<extra_id_0>', '<extra_id_1>')] if kind == 't5' else []
    assert ours.sentinels.tolist() == own
    more, size = ours.extended(2), ours.vocab_size
    assert more.sentinels.tolist() == [*own, size, size + 1] and more.vocab_size == size + 2
    assert not more.ordinary[more.sentinels].any() and not more.byte_lengths[more.sentinels].any()
    names = ['<extra_id_0>', '<extra_id_1>'] if own else []
    assert [more.piece(index) for index in more.sentinels] == [*names, '<sentinel_0>', '<sentinel_1>']
    assert more.decode([*ours.encode('a house'), *more.sentinels]) == ours.decode(ours.encode('a house'))


@pytest.mark.parametrize('where', ['{}', 'the {} fox', 'x{}{}y', '{}\n'])
def test_text_that_looks_like_a_special_token_stays_text(kind, ours, where):
    names = ['</s>', '<s>', '<unk>', '<pad>', '<mask>', '[MASK]', '[CLS]', '[UNK]', '<|endoftext|>', '<extra_id_0>']
    for name in names:
        ids = ours.encode(where.format(name, name))
        if kind == 'bert':  # characters that a vocabulary without bytes lacks are unknown
            ids = [index for index in ids if index != ours.specials.unk]
        assert ours.ordinary[ids].all(), (name, ids)
        assert ours.encode_batch([where.format(name, name)] * 2)[1] == ours.encode(where.format(name, name))
        if kind in LOSSLESS:
            assert ours.decode(ids) == where.format(name, name)


@pytest.mark.slow
@given(text=st.text() | st.text('ab \n\t\r▁\u00a0\u0000</s>'))
@example(text='<s></s><|endoftext|> [MASK] <0x0A>▁')
@settings(deadline=None, max_examples=50)
def test_what_is_called_lossless_is(kind, ours, text):
    assert ours.lossless == (kind in LOSSLESS)
    ids = ours.encode(text)
    if ours.lossless:
        assert ours.decode(ids) == text
        assert ours.byte_lengths[ids].sum() == len(text.encode())
    assert not set(ids) & (ours.specials.ids - {ours.specials.unk})


def test_byte_lengths_of_pieces(kind, ours, theirs):
    length = {piece: ours.byte_lengths[index] for piece, index in theirs.get_vocab().items()}
    if kind in ('t5', 'llama'):
        assert length['<0x0A>'] == 1 and length['▁'] == 1 and length['é'] == 2
        text = 'the café 語'
        assert ours.byte_lengths[ours.encode(text)].sum() == len(text.encode()) + 1  # the space in front
    if kind == 'bert':
        assert length['##e'] == 1


def words(ours, text):
    ids = np.array(ours.encode(text))
    parts = np.split(ids, np.flatnonzero(ours.word_starts(ids))[1:])
    return [ours.decode(part).strip() for part in parts]


def test_words_begin_where_the_vocabulary_says(kind, ours):
    for line in ('the quick fox returns x + 1', 'costs 12345 naïve cafes', 'fox'):
        found = words(ours, line)
        assert kind != 'bert' or len(found) == len(line.split())  # its small vocabulary lacks some
        if kind in ('t5', 'llama') and not found[0]:
            del found[0]  # the space in front, where it is a token of its own
        assert found == line.split() or kind == 'bert'
    if kind == 'bert':
        assert words(ours, 'the quick fox') == ['the', 'quick', 'fox']
    if kind == 'llama':  # a byte
        assert words(ours, 'the\nquick\n fox') == ['', 'the', 'quick', 'fox']
    if kind in LOSSLESS:
        assert words(ours, 'def f(x):\n    return x\n\tpass') == ['def', 'f(x):', 'return', 'x', 'pass']
    assert max(map(len, map(ours.encode, ('the', 'returns', 'quick')))) > 1  # the words had several tokens


def test_words_of_other_marks():
    specials = {'<unk>': 0, '</s>': 1}
    level = library.Tokenizer(models.WordLevel({**specials, 'a': 2, 'b': 3}, unk_token='<unk>'))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocab = {**specials, 'a': 2, 'b': 3, 'a</w>': 4, 'b</w>': 5}
    suffix = library.Tokenizer(models.BPE(vocab, [], unk_token='<unk>', end_of_word_suffix='</w>'))  # CLIP, GPT
    suffix.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bare = library.Tokenizer(models.BPE({**specials, 'a': 2, 'b': 3}, [], unk_token='<unk>'))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for made in (level, suffix, bare):
        made.add_special_tokens(['</s>', '<unk>'])
    level, suffix, bare = (HubTokenizer(made.to_str().encode()) for made in (level, suffix, bare))
    assert level.word_starts(np.array(level.encode('a b a'))).tolist() == [True] * 3
    ids = suffix.encode('ab a bab')
    assert ids == [2, 5, 4, 3, 2, 5]
    assert suffix.word_starts(np.array(ids)).tolist() == [True, False, True, True, False, False]
    with pytest.raises(UserError, match='needs a tokenizer that shows where words begin'):
        bare.word_starts(np.array(bare.encode('ab a')))


def test_what_changes_text_is_not_lossless():
    changes = {
        'normalizer': normalizers.NFC(),
        'pre_tokenizer': pre_tokenizers.ByteLevel(add_prefix_space=True),
        'decoder': decoders.BPEDecoder(),
    }
    for part, value in changes.items():
        made = gpt2()
        setattr(made, part, value)
        assert not HubTokenizer(made.to_str().encode()).lossless, part
    made = gpt2()
    made.add_tokens([AddedToken('fox', rstrip=True)])
    assert not HubTokenizer(made.to_str().encode()).lossless
    short = library.Tokenizer(models.BPE())
    short.pre_tokenizer, short.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    short.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=['</s>']))
    assert not HubTokenizer(short.to_str().encode()).lossless
    assert HubTokenizer(gpt2().to_str().encode()).normalized('nfc').lossless is False


def test_a_run_stores_the_file(file, ours, tmp_path):
    data = Data(tokenizer='huggingface', tokenizer_path=str(file), normalization='nfc')
    made = train_tokenizers(Config(data=data), [{'text': 'x'}])
    made.save(tmp_path)
    loaded = Tokenizers.load(tmp_path)
    assert (tmp_path / 'tokenizer.target.huggingface').read_bytes() == file.read_bytes()
    assert loaded.fingerprint == made.fingerprint and loaded.target.normalization == 'nfc'
    assert loaded.target.fingerprint != ours.fingerprint
    assert loaded.target.specials == ours.specials
    assert loaded.target.encode('café </s>') == ours.encode('café </s>')


def test_added_tokens_that_are_text_and_ids_that_are_none():
    made = gpt2()
    made.add_tokens(['fox'])
    tree = json.loads(made.to_str())
    last = max(tree['model']['vocab'], key=tree['model']['vocab'].get)
    hole = tree['model']['vocab'].pop(last)  # the last merge makes a piece that the file then lacks
    tree['model']['merges'] = [merge for merge in tree['model']['merges'] if ''.join(merge) != last]
    tree['model']['vocab']['unreached'] = hole + 10
    for number, token in enumerate(tree['added_tokens']):
        token['id'] = hole + 11 + number
    tree['model']['vocab'] |= {token['content']: token['id'] for token in tree['added_tokens']}
    ours = HubTokenizer(json.dumps(tree).encode())
    assert ours.vocab_size == hole + 13
    assert not ours.ordinary[hole : hole + 10].any() and ours.ordinary[hole + 10]
    assert ours.piece(hole) == '' and ours.decode([hole, *ours.encode('a'), 10**6]) == 'a'
    fox = hole + 12
    assert ours.encode('a fox') == [*ours.encode('a '), fox] and ours.byte_lengths[fox] == 3
    assert ours.lossless


def test_a_special_token_that_the_file_calls_ordinary_stays_text_too():
    tree = json.loads(roberta().to_str())
    for token in tree['added_tokens']:
        token['special'] = False
    ours = HubTokenizer(json.dumps(tree).encode())
    assert ours.specials.eos == 2 and ours.decode(ours.encode('a</s>')) == 'a</s>'


# ------------------------------------------------------------------------------------------- the user's mistakes
def refused(data, words):
    with pytest.raises(UserError, match=words) as error:
        HubTokenizer.train((), data)
    assert '\n' not in str(error.value)


def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path):
    refused(Data(tokenizer_path=str(tmp_path / 'none')), 'none does not exist')
    refused(Data(tokenizer_path=str(tmp_path)), r'tokenizer\.json does not exist; it must be')
    (tmp_path / 'tokenizer.json').write_text('{"model": {"vocab": {}, "type": "BPE"\n')
    refused(Data(tokenizer_path=str(tmp_path / 'tokeniser.json')), 'did you mean')
    for wrong in ('{"model": {"vocab":\n', '[]', '{}', '{"model": {"vocab": {"a": 0}}}', '{"model": 3}', '\udcff'):
        (tmp_path / 'tokenizer.json').write_bytes(wrong.encode(errors='surrogateescape'))
        refused(Data(tokenizer_path=str(tmp_path)), 'is not a tokenizer of the tokenizers library')


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        ({'model': {'type': 'WordLevel', 'vocab': {}, 'unk_token': '[UNK]'}}, 'is not a tokenizer of .* Missing'),
        (
            {'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': 'AAAA'}},
            'is not a tokenizer of .* Precompiled',
        ),
        ({'model': {'type': 'WordLevel', 'vocab': {'</s>': 0, 'a': 2**31}, 'unk_token': '</s>'}}, 'has the id 2,147'),
    ],
)
def test_a_file_that_the_library_reads_and_cannot_use_is_one_line(tmp_path, fields, said):
    end = {'id': 0, 'content': '</s>', 'special': True, 'single_word': False, 'lstrip': False, 'rstrip': False}
    model = {'type': 'WordLevel', 'vocab': {'</s>': 0}, 'unk_token': '</s>'}
    tree = {'added_tokens': [{**end, 'normalized': False}], 'model': model, 'version': '1.0', **fields}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(tree))
    refused(Data(tokenizer_path=str(tmp_path)), said)


def test_a_damaged_normalizer_is_one_line_and_the_library_says_nothing(tmp_path, capfd):
    made = FILES['llama']()
    for damaged in (4 * b'\0', 3 * b'\0'):  # with the first the library panics when it reads a text
        tree = json.loads(made.to_str())
        tree['normalizer'] = {'type': 'Precompiled', 'precompiled_charsmap': base64.b64encode(damaged).decode()}
        (tmp_path / 'tokenizer.json').write_text(json.dumps(tree))
        refused(Data(tokenizer_path=str(tmp_path)), 'is not a tokenizer of the tokenizers library: ')
    assert capfd.readouterr().err == ''


def test_a_file_without_an_end_is_refused(tmp_path):
    made = library.Tokenizer(models.WordLevel({'a': 0, '[UNK]': 1}, unk_token='[UNK]'))
    made.save(str(tmp_path / 'tokenizer.json'))
    refused(Data(tokenizer_path=str(tmp_path)), r'no special token that ends a text \(it has \[UNK\]; valid: </s>')


def test_declared_tokens_come_before_names_and_are_stored_where_these_say_others(tmp_path):
    made = roberta()
    made.add_special_tokens(['<|turn|>', '<|fill|>'])
    stored, ids = made.to_str().encode(), made.token_to_id
    plain = HubTokenizer(stored)
    own = HubTokenizer(
        stored, declared={'eos': ['<|turn|>', 2], 'pad': ['absent', ids('<|fill|>')], 'unk': [0], 'bos': [0]}
    )
    turned = dataclasses.replace(plain.specials, eos=ids('<|turn|>'), pad=ids('<|fill|>'))
    assert own.specials == turned and own.fingerprint != plain.fingerprint
    for number, (tokenizer, side) in enumerate(((own, None), (own, plain), (plain, own), (plain, plain))):
        kept = Tokenizers(side, tokenizer)
        kept.save(tmp_path / str(number))
        loaded = Tokenizers.load(tmp_path / str(number))
        assert loaded.target.specials == tokenizer.specials and loaded.fingerprint == kept.fingerprint
        assert side is None or loaded.source.specials == side.specials
        assert ('declared' in (tmp_path / str(number) / 'tokenizer.json').read_text()) == (own in (tokenizer, side))


def test_a_declared_end_stands_for_what_a_file_lacks():
    made = library.Tokenizer(models.WordLevel({'a': 0, 'end': 1}, unk_token='a'))
    made.add_special_tokens(['end'])
    found = HubTokenizer(made.to_str().encode(), declared={'eos': ['end']}).specials
    assert (found.pad, found.bos, found.eos, found.sep, found.mask_or_none) == (1, 1, 1, 1, None)


def test_the_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    with pytest.raises(UserError, match=r"pip install 'tformer\[hub\]'"):
        HubTokenizer(b'{}')


def test_the_package_is_loaded_when_it_is_needed():
    code = "import sys, tformer.commands.run; assert 'tokenizers' not in sys.modules"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_the_path_and_the_tokenizer_go_together():
    train = Train(num_steps=1)
    for data in (Data(tokenizer='huggingface'), Data(tokenizer='byte', tokenizer_path='x')):
        with pytest.raises(UserError, match=r'data\.tokenizer_path=.*set both or neither'):
            checks.check_here(Config(data=data, train=train))
    for data in (
        Data(tokenizer='huggingface', tokenizer_path='x'),
        Data(tokenizer='byte', source_tokenizer='huggingface', tokenizer_path='x'),
    ):
        checks.check_here(Config(data=data, train=train))


# ------------------------------------------------------------------------------------------- generation
@pytest.mark.slow
@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
def test_generation_ends_at_the_files_own_end(tmp_path, family):
    path = tmp_path / 'tokenizer.json'
    gpt2().save(str(path))
    objective = {'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}[family]
    cfg = Config(
        model=Model(family=family, emb_dim=16, mlp_dim=16, num_heads=2, num_decoder_layers=1, max_len=16),
        data=Data(tokenizer='huggingface', tokenizer_path=str(path), length=16),
        train=Train(objective=objective, num_steps=1),
        decode=Decode(max_len=6, batch_size=2),
    )
    made = train_tokenizers(cfg, [{'text': 'x', 'source': 'x', 'target': 'x'}])
    size, specials = made.target.vocab_size, made.target.specials
    assert specials.bos == specials.eos != 2
    assert dummy_batch.assumed(cfg).model.vocab_size == size
    cfg = resolve(cfg, vocab_size=size, encoder_vocab_size=size if made.source else None)
    model = build(cfg.model)
    tokens = np.ones((1, 4), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), {'inputs': tokens, 'encoder_inputs': tokens})
    generate = generator(model, cfg, made, cut=True)
    outputs = generate(variables, ['the fox', '', 'x + 1'])
    assert len(outputs) == 3 and all('<|endoftext|>' not in output for output in outputs)

    class Ending(type(model)):
        """The same model, which always wants to end."""

        def extend(self, *args, **kwargs):
            logits, cache = super().extend(*args, **kwargs)
            return logits.at[..., specials.eos].add(1e4), cache

    assert generator(Ending(cfg.model), cfg, made, cut=True)(variables, ['the fox']) == ['']


def test_nothing_but_text_and_the_end_is_generated():
    made = gpt2()
    made.add_special_tokens(['<pad>', '<mask>'])
    tokens = Tokenizers(None, HubTokenizer(made.to_str().encode()))
    size, eos = tokens.target.vocab_size, tokens.target.specials.eos
    model = Model(family='decoder', emb_dim=16, mlp_dim=16, num_heads=2, num_decoder_layers=1, max_len=16)
    cfg = Config(model=model, train=Train(num_steps=1), decode=Decode(max_len=2, batch_size=1), data=Data(length=16))
    cfg = resolve(dataclasses.replace(cfg, model=dataclasses.replace(model, vocab_size=size + 3)), vocab_size=size)
    seen = {}

    def make_generate(model, decode, **given):
        seen.update(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, 'make_generate', make_generate)
        generator(build(cfg.model), cfg, tokens, cut=True)
    banned = [eos + 1, eos + 2, *range(size, size + 3)]
    assert seen == {'eos': eos, 'others': [], 'banned': banned, 'rules': Rules(), 'draft': None}
