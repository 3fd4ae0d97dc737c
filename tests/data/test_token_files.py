"""Files of tokens as sources: where documents are, which splits, whose ids, and what is refused."""

import dataclasses
import itertools
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from tformer.config import Model
from tformer.config.run import Config, Data, Train
from tformer.data import ragged
from tformer.data.batches import mixture, pipeline
from tformer.data.inspection import report
from tformer.data.sources import sources
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers
from tformer.errors import UserError

RNG = np.random.default_rng(0)
TEXTS = [''.join(map(chr, RNG.integers(97, 123, int(size)))) for size in RNG.integers(1, 40, 60)]
MODEL = Model(family='decoder', vocab_size=300)


def config(**data: object) -> Config:
    data = {'tokenizer': 'byte', 'length': 16, 'batching': 'pad', **data}
    return Config(model=MODEL, train=Train(objective='causal_lm', batch_size=4), data=Data(**data))


def tokenizers(own: Config) -> Tokenizers:
    return train_tokenizers(own, [{'text': 'a'}])


def ids(text: str) -> list[int]:
    return tokenizers(config()).target.encode_batch([text])[0]


def nanogpt(file: Path, tokens: list[int], dtype: str = '<u2', head: bytes = b'') -> None:
    """As nanoGPT's prepare.py writes tokens; with the header of llm.c as its dataloader asks for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head + np.array(tokens, dtype).tobytes())


def header(count: int, magic: int = 20240520) -> bytes:
    return np.array([magic, 1, count, *[0] * 253], '<i4').tobytes()


def megatron(
    prefix: Path, documents: list[list[list[int]]], dtype: str = '<u2', code: int = 8, modes: bool = False
) -> None:
    """Documents of sequences, as `IndexedDatasetBuilder` of Megatron-LM writes them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    prefix.with_suffix('.bin').write_bytes(b''.join(np.array(each, dtype).tobytes() for each in sequences))
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize if sizes else []
    ends = np.cumsum([0, *map(len, documents)])
    prefix.with_suffix('.idx').write_bytes(
        b'MMIDIDX\x00\x00' + struct.pack('<QBQQ', 1, code, len(sizes), len(ends))
        + np.array(sizes, '<i4').tobytes() + np.array(pointers, '<i8').tobytes() + np.array(ends, '<i8').tobytes()
        + bytes(len(sizes) * modes)
    )  # fmt: skip


def batches(own: Config, split: str = 'train', training: bool = True) -> pipeline.Batches:
    return pipeline.Batches(own, tokenizers(own), split, training=training)


def texts(own: Config, split: str = 'train') -> list[list[int]]:
    loaded = batches(own, split, training=False)
    return [row.tolist() for part in loaded.parts for row in part.examples.columns['tokens']]


@pytest.mark.parametrize(('dtype', 'code'), [('<u2', 8), ('<i4', 4), ('<i8', 5), ('<i2', 3)])
def test_documents_of_megatron_make_the_batches_of_their_texts(tmp_path, dtype: str, code: int) -> None:
    eos = tokenizers(config()).target.specials.eos
    documents = [[ids(text[:5]), [], [*ids(text[5:]), eos]] for text in TEXTS]  # with --append-eod
    megatron(tmp_path / 'train', documents, dtype, code, modes=code == 4)
    (tmp_path / 'jsonl').mkdir()
    (tmp_path / 'jsonl' / 'train.jsonl').write_text(''.join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    own = config(path=(str(tmp_path / 'train.bin'),), valid_path=('x',), test_path=('x',))
    found, wanted = batches(own), batches(config(path=(str(tmp_path / 'jsonl'),)))
    assert found.num_examples == wanted.num_examples > len(TEXTS)
    again = pickle.loads(pickle.dumps(found))
    assert isinstance(again.parts[0].examples.columns['tokens'].arrays[0].base, np.memmap)
    for step in (0, 3, 1000, 1):
        for made in (found, again):
            batch = made.batch(step)
            assert all(np.array_equal(batch[name], value) for name, value in wanted.batch(step).items())
    sample = dataclasses.replace(own, data=dataclasses.replace(own.data, train_examples=7))
    chosen = mixture.load(sample, 'train').splits[0].contents.documents
    assert len(chosen) == 7 and {tuple(row) for row in chosen} <= {(*ids(text), eos) for text in TEXTS}


@pytest.mark.parametrize('head', [b'', header(1000)], ids=['nanoGPT', 'llm.c'])
def test_a_stream_is_one_text_and_its_end_is_held_out(tmp_path, head: bytes) -> None:
    tokens = RNG.integers(20, 250, 1000).tolist()
    nanogpt(tmp_path / 'all.bin', tokens, head=head)
    own = config(path=(str(tmp_path / 'all.bin'),))
    assert [texts(own, split) for split in sources.SPLITS] == [[tokens[:960]], [tokens[960:980]], [tokens[980:]]]
    nanogpt(tmp_path / 'nano' / 'train.bin', tokens[:900])
    nanogpt(tmp_path / 'nano' / 'val.bin', tokens[900:])
    own = config(path=(str(tmp_path / 'nano'),))
    assert [texts(own, split) for split in ('train', 'valid')] == [[tokens[:900]], [tokens[900:]]]
    both = tuple(str(tmp_path / 'nano' / f'{name}.bin') for name in ('train', 'val'))
    own = config(path=both, valid_path=('x',), test_path=('x',))
    assert texts(own) == [tokens[:900], tokens[900:]]
    seen = batches(own)
    rows = [row for step in range(int(seen.steps_per_epoch) + 1) for row in seen.batch(step)['inputs'].tolist()]
    assert set(itertools.pairwise(tokens[1:15])) <= {pair for row in rows for pair in itertools.pairwise(row)}


def test_small_ids_are_no_halves_of_wide_ones(tmp_path) -> None:
    nanogpt(tmp_path / 'train.bin', [token % 12 for token in range(1000)])
    assert texts(config(path=(str(tmp_path),))) == [[token % 12 for token in range(1000)]]


def test_documents_are_held_out_whole(tmp_path) -> None:
    megatron(tmp_path / 'none', [])
    for split in sources.SPLITS:
        with pytest.raises(UserError, match=rf'the {split} split of .*none.bin is empty'):
            len(sources.load(Data(path=(str(tmp_path / 'none.bin'),)), 'causal_lm', split))
    megatron(tmp_path / 'all', [[ids(text)] for text in TEXTS * 5])
    parts = [texts(config(path=(str(tmp_path / 'all.bin'),)), split) for split in sources.SPLITS]
    assert [text for part in parts for text in part] == [ids(text) for text in TEXTS * 5]
    assert len(parts[0]) > 250 and parts[1] and parts[2]


def test_token_files_are_parts_of_mixtures(tmp_path) -> None:
    nanogpt(tmp_path / 'train.bin', ids('abc' * 20))
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'train.txt').write_text('xyz' * 20)
    own = config(mixture=(f'path={tmp_path}/train.bin', f'path={tmp_path}/other'))
    assert {*np.unique(batches(own).batch(0)['targets'])} >= {*ids('abcxyz')}


def test_fingerprints_are_of_contents(tmp_path) -> None:
    def mark(**data: object) -> str:
        return sources.load(Data(**data), 'causal_lm', 'train').fingerprint

    path, found = (str(tmp_path / 'train.bin'),), []
    megatron(tmp_path / 'train', [[[1, 2]], [[3]]])
    found.append(mark(path=path))
    megatron(tmp_path / 'train', [[[1, 2], [3]]])
    found.append(mark(path=path))
    found.append(mark(path=path, valid_path=('x',)))
    (tmp_path / 'train.idx').unlink()
    found.append(mark(path=path))
    nanogpt(tmp_path / 'train.bin', [1, 2, 4])
    found.append(mark(path=path))
    assert len(set(found)) == len(found)
    (tmp_path / 'train.bin').rename(tmp_path / 'b.bin')
    assert mark(path=(str(tmp_path / 'b.bin'),)) == found[-1]


@pytest.mark.parametrize('place', [0, 7, ragged._AT_ONCE, ragged._AT_ONCE + 5])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path, place: int) -> None:
    size = tokenizers(config()).target.vocab_size
    tokens = np.full(ragged._AT_ONCE + 9, size - 1)
    tokens[place] = size
    nanogpt(tmp_path / 'train.bin', tokens.tolist() if place < 9 else tokens)
    own = config(path=(str(tmp_path),), batching='pad')
    with pytest.raises(UserError, match=rf'train.bin: token {size} at place {place:,} is outside of the vocabulary'):
        batches(own)


def test_ids_below_0_are_refused(tmp_path) -> None:
    megatron(tmp_path / 'train', [[[5, -1, 6]]], '<i4', 4)
    with pytest.raises(UserError, match=r'train.bin: token -1 at place 1 is outside of the vocabulary'):
        batches(config(path=(str(tmp_path),)))


def damaged(name: str, change: object) -> object:
    def write(place: Path) -> None:
        megatron(place / 'train', [[[5, 6], [7]], [[8]]])
        file = place / name
        content = bytearray(file.read_bytes())
        change(content)  # type: ignore[operator]
        file.write_bytes(content)

    return write


def put(at: int, value: bytes) -> object:
    return lambda content: content.__setitem__(slice(at, at + len(value)), value)


CASES = {  # the index has 34 bytes before lengths of 4, pointers of 8 and ends of 8 bytes
    'index cut': (damaged('train.idx', lambda x: x.pop()), r'train.idx has 93 bytes, and 3 sequences take 94'),
    'index of its head': (damaged('train.idx', lambda x: x.__delitem__(slice(20, None))), r'is not an index'),
    'another index': (damaged('train.idx', put(0, b'TNTIDX')), r'train.idx is not an index of Megatron-LM'),
    'real numbers': (damaged('train.idx', put(17, b'\6')), r'train.idx has version 1 and numbers of kind 6'),
    'version': (damaged('train.idx', put(9, b'\2')), r'train.idx has version 2'),
    'count': (damaged('train.idx', put(18, b'\xff' * 7)), r'train.idx has 94 bytes, and .* it is cut off'),
    'outside': (damaged('train.idx', put(42, b'\2')), r'train.idx describes 10 bytes of train.bin, which has 8'),
    'pointer': (damaged('train.idx', put(54, b'\2')), r'train.idx does not point at one sequence after the other'),
    'negative': (damaged('train.idx', put(34, b'\xff' * 4)), r'train.idx does not point at one sequence'),
    'documents': (damaged('train.idx', put(78, b'\7')), r'train.idx does not divide its 3 sequences into documents'),
    'tokens cut': (damaged('train.bin', lambda x: x.pop()), r'describes 8 bytes of train.bin, which has 7'),
    'tokens more': (damaged('train.bin', lambda x: x.extend(b'ab')), r'describes 8 bytes of train.bin, which has 10'),
    'odd': (lambda place: (place / 'train.bin').write_bytes(b'abc'), r'train.bin has 3 bytes, which are not whole'),
    'packed': (lambda place: (place / 'train.bin.gz').write_bytes(b'abcd'), r'train.bin.gz is not a .bin file'),
    'index of nothing': (
        lambda place: (nanogpt(place / 'train.bin', [5, 6]), (place / 'train.idx').symlink_to('none')),
        r'train.idx cannot be read: No such file',
    ),
    'empty': (lambda place: (place / 'train.bin').write_bytes(b''), r'train.bin has 0 bytes, which are not whole'),
    'wide': (lambda place: nanogpt(place / 'train.bin', list(range(9, 50)), '<i4'), r'train.bin looks like numbers'),
    'wider': (lambda place: nanogpt(place / 'train.bin', list(range(9, 50)), '<i8'), r'train.bin looks like numbers'),
    'wide, of a large vocabulary': (
        lambda place: nanogpt(place / 'train.bin', [9, 70_000, 300, 128_000] * 99, '<i4'), r'looks like numbers of 32'
    ),
    'no documents': (lambda place: megatron(place / 'train', []), r'the train split of .* is empty'),
    'llm.c cut': (lambda place: nanogpt(place / 'train.bin', [9] * 7, head=header(8)), r'7 tokens, and its header'),
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_files_that_are_damaged(tmp_path, case: str) -> None:
    write, message = CASES[case]
    write(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as error:
        len(sources.load(Data(path=(str(tmp_path),)), 'causal_lm', 'train'))
    assert '\n' not in str(error.value)


def test_what_needs_texts_says_so(tmp_path) -> None:
    nanogpt(tmp_path / 'train.bin', [5, 6, 7])
    place = (str(tmp_path),)
    with pytest.raises(UserError, match=r'train.bin holds tokens and no text, which this needs: set the tokenizer'):
        train_tokenizers(config(tokenizer='char'), sources.load(Data(path=place), 'causal_lm', 'train'))
    with pytest.raises(UserError, match=r'train.bin has only tokens and seq2seq needs source and target'):
        sources.load(Data(path=place), 'seq2seq', 'train')
    with pytest.raises(UserError, match=r"train.bin: data.columns=\('a',\) has no effect on a file of tokens"):
        sources.load(Data(path=place, columns=('a',)), 'causal_lm', 'train')
    (tmp_path / 'train.txt').write_text('text')
    with pytest.raises(UserError, match=r'train.txt holds no tokens, unlike other files'):
        sources.load(Data(path=(str(tmp_path / 'train.bin'), str(tmp_path / 'train.txt'))), 'causal_lm', 'train')
    own = dataclasses.replace(config(path=(str(tmp_path / 'train.bin'),)), train=Train(objective='simcse'))
    with pytest.raises(UserError, match=r'files of tokens, and train.objective=simcse needs texts'):
        batches(dataclasses.replace(own, model=Model(family='encoder')))


def test_records_are_texts_once_the_tokenizer_is_known(tmp_path) -> None:
    megatron(tmp_path / 'valid', [[ids(text)] for text in TEXTS])
    own = config(path=('x',), valid_path=(str(tmp_path / 'valid.bin'),), test_path=('x',))
    loaded = mixture.load(own, 'valid')
    first = loaded.first(7)
    for records, count in ((first, 7), (loaded, len(TEXTS))):
        made = pipeline.Batches(own, tokenizers(own), 'valid', training=False, records=records)
        assert [record['text'] for record in records] == TEXTS[:count] == [record['text'] for record in made.records]
    nanogpt(tmp_path / 'valid.bin', ids('a' * 30_000))
    (tmp_path / 'valid.idx').unlink()
    (stream,) = batches(own, 'valid', training=False).records
    assert stream['text'] == 'a' * 10_000
    nanogpt(tmp_path / 'train.bin', ids('b' * 99))
    own = config(path=(str(tmp_path),))
    lines = list(report.report(own, tokenizers(own), mixture.load(own, 'train'), lambda line: None))
    assert any('files of tokens have none' in str(line) for line in lines)


def test_a_file_that_changes_is_noticed(tmp_path) -> None:
    nanogpt(tmp_path / 'train.bin', [50, 60, 70])
    own = config(path=(str(tmp_path),))
    records = mixture.load(own, 'train')
    nanogpt(tmp_path / 'train.bin', [50, 60, 71, 72])
    with pytest.raises(UserError, match=r'train.bin changed while it was being read'):
        pipeline.Batches(own, tokenizers(own), 'train', training=True, records=records)


def test_special_tokens_around_a_document_are_left_out() -> None:
    numbers = np.array([1, 5, 2, 1, 2, 5, 6, 2, 1], np.uint16)
    edges = np.array([0, 3, 5, 7, 8, 9, 9])
    found = ragged.Documents((numbers,), np.zeros(6, np.int64), edges[:-1], edges[1:] if len(edges) == 7 else edges)
    assert [row.tolist() for row in found.stripped(1, 2)] == [[5], [], [5, 6], [], [], []]
    assert found.lengths.tolist() == [3, 2, 2, 1, 1, 0]
