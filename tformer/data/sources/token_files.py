"""Files of tokens as sources: Megatron-LM's .bin with its .idx, and the .bin of nanoGPT and llm.c.

Their numbers are read where they are, through memory maps, and are tokens of the run's tokenizer. A file of Megatron-LM
has documents; the others are a stream of tokens, in which a document ends with a special token, if anything tells.
"""

import dataclasses
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from tformer.data import remote
from tformer.data.ragged import Documents, mapped
from tformer.data.sources.records import Record, View
from tformer.data.sources.text_reader import File, changed, find, state
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError

HELD_OUT = 0.02  # the share of a file that is held out for a split without files of its own
ENDING, INDEX = '.bin', '.idx'
_MAGIC, _HEAD = b'MMIDIDX\0\0', 34  # of an index, and the bytes before its arrays
_DTYPES = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}  # by Megatron-LM's codes; others are not whole
_LLM_C = {20240520: '<u2', 20240801: '<u4'}  # the first number of llm.c's header of 1,024 bytes
_HEADER = 1024
_SHOWN = 10_000  # tokens of a document that samples and reports may show

Decode = Callable[[Iterable[int]], str]


class TokenFile(NamedTuple):
    """A file of tokens, found and hashed."""

    file: File
    idx: File | None
    state: tuple[int, int]  # of the file, before it was hashed


def found(path: Path) -> TokenFile:
    """Returns a file of tokens with its index if it has one; raises a `UserError` if it cannot be read."""
    index = path.with_suffix(INDEX)
    before = state(path)
    return TokenFile(find(path), find(index) if os.path.lexists(index) else None, before)


class Tokens(View):
    """The documents of token files, in place of records with text."""

    def __init__(self, files: Sequence[TokenFile], documents: Documents) -> None:
        self._files, self.documents = files, documents
        self._decode: Decode | None = None

    def __len__(self) -> int:
        return len(self.documents)

    @remote.by_url()
    def _records(self, indices: Sequence[int]) -> list[Record]:
        """Returns the text of documents, or of long ones of their beginning, once their vocabulary is known."""
        if self._decode is None:
            name = self._files[0].file.path if self._files else 'a prepared set'
            raise UserError(
                f'{name} holds tokens and no text, which this needs: set the tokenizer that wrote '
                'it, data.tokenizer=huggingface with data.tokenizer_path, or data.tokenizer_from'
            )
        return [{'text': self._decode(self.documents[index][:_SHOWN].tolist())} for index in indices]

    def taken(self, indices: Sequence[int]) -> 'Tokens':
        return Tokens(self._files, self.documents.taken(np.array(indices, np.int64)))

    @remote.by_url()
    def of_tokenizer(self, tokenizer: Tokenizer, lender: str | None = None) -> Documents:
        """Returns the documents without the special tokens around them, all of whose tokens have been read once.

        From then on the records have text. The `lender` is the prepared set of the same mixture whose tokenizer it is.

        Raises:
          UserError: a token is not of the tokenizer's vocabulary, or a file has changed since it was found.
        """
        size = tokenizer.vocab_size
        for at, (place, token) in enumerate(self.documents.outside(size)):
            if place >= 0:
                where = f'{self._files[at].file.path}: token {token} at place {place:,}'
                raise UserError(f'{where} is outside of the vocabulary of {size:,}: it is of another tokenizer')
        for each in self._files:
            if state(each.file.path) != each.state:
                raise changed(each.file.path)
        self._decode = tokenizer.decode
        return self.documents.stripped(tokenizer.specials.bos, tokenizer.specials.eos)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads a split of files, each with the splits that are held out of it.

    Held-out splits are the end of a file, from the start of a document on, as of a .txt file.
    """

    files: Sequence[tuple[TokenFile, tuple[str, ...]]]
    split: str
    of_tokens: ClassVar[bool] = True

    def __call__(self) -> tuple[Tokens, int]:
        """Returns the documents; none is skipped."""
        maps, owners, starts, stops = [], [], [], []
        for number, (file, held_out) in enumerate(self.files):
            tokens, first, last = _documents(file) if file.idx else _stream(file)
            if held_out and len(first):
                first, last = _part(first, last, held_out, self.split, cut=file.idx is None)
            maps.append(tokens)
            owners.append(np.full(len(first), number))
            starts.append(first)
            stops.append(last)
        own = (np.concatenate(parts).astype(np.int64) for parts in (owners, starts, stops))
        return Tokens([file for file, _ in self.files], Documents(tuple(maps), *own)), 0


def _part(
    starts: np.ndarray, stops: np.ndarray, held_out: Sequence[str], split: str, cut: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents of a split; a stream, which is one document, is cut."""
    first, size = int(starts[0]), int(HELD_OUT * (stops[-1] - starts[0]))
    end = int(stops[-1])
    edges = [first, *(end - size * left for left in range(len(held_out), -1, -1))]
    place = ['train', *held_out].index(split)
    if cut:
        return np.array(edges[place : place + 1]), np.array(edges[place + 1 : place + 2])
    low, high = (int(np.searchsorted(starts, edge)) for edge in edges[place : place + 2])
    return starts[low:high], stops[low:high]


def _stream(file: TokenFile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers of a file of nanoGPT or llm.c, and where its one document begins and ends."""
    path, size = file.file.path, file.state[0]
    with path.open('rb') as stored:
        head = np.frombuffer(stored.read(_HEADER), '<u1')
    magic = int(head[:4].view('<u4')[0]) if size >= 4 else 0
    dtype = _LLM_C.get(magic, '<u2')
    width = np.dtype(dtype).itemsize
    if not size or size % width:
        raise UserError(f'{path} has {size:,} bytes, which are not whole tokens of {width} bytes each')
    first, last = 0, size // width
    if magic in _LLM_C:
        first = _HEADER // width
        count = int(head[8:12].view('<u4')[0]) if len(head) == _HEADER else 0
        if last - first != count:
            raise UserError(f'{path} has {last - first:,} tokens, and its header says {count:,}: it is cut off')
    elif len(head) > 16 and _is_wide(head[: len(head) // 4 * 4].view('<u2')):
        raise UserError(f'{path} looks like numbers of 32 bits or more, and nanoGPT writes tokens in 16 bits')
    return mapped(str(path), dtype), np.array([first]), np.array([last])


def _is_wide(halves: np.ndarray) -> bool:
    """Returns whether numbers of 16 bits look like the halves of wider ones, below 2**20."""
    low, high = halves[::2], halves[1::2]
    return bool(not high.any() or high.max() < 16 <= low.max())


def _documents(file: TokenFile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers of a file of Megatron-LM, and where each of its documents begins and ends.

    Raises:
      UserError: the index is none, or does not describe the file.
    """
    assert file.idx is not None
    path, index = file.file.path, file.idx.path
    size = index.stat().st_size
    with index.open('rb') as stored:
        head = stored.read(_HEAD)
    if len(head) < _HEAD or not head.startswith(_MAGIC):
        raise UserError(f'{index} is not an index of Megatron-LM, which begins with MMIDIDX')
    version, code, count, edges = struct.unpack_from('<QBQQ', head, len(_MAGIC))
    if version != 1 or code not in _DTYPES:
        raise UserError(f'{index} has version {version} and numbers of kind {code}: valid are 1 and whole numbers')
    need = _HEAD + 12 * count + 8 * edges
    if size not in (need, need + count):  # the second has a mode for each sequence
        raise UserError(f'{index} has {size:,} bytes, and {count:,} sequences take {need:,}: it is cut off')
    raw = np.memmap(index, np.uint8, 'r')
    places = np.cumsum([_HEAD, 4 * count, 8 * count, 8 * edges])
    lengths, pointers, ends = (
        raw[low:high].view(kind) for low, high, kind in zip(places, places[1:], ('<i4', '<i8', '<i8'), strict=False)
    )
    width = np.dtype(_DTYPES[code]).itemsize
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(pointers, offsets[:-1] * width):
        raise UserError(f'{index} does not point at one sequence after the other of {path.name}')
    if int(offsets[-1]) * width != file.state[0]:
        raise UserError(f'{index} describes {offsets[-1] * width:,} bytes of {path.name}, which has {file.state[0]:,}')
    if not edges or ends[0] != 0 or ends[-1] != count or (np.diff(ends) < 0).any():
        raise UserError(f'{index} does not divide its {count:,} sequences into documents')
    edge = offsets[ends]
    return mapped(str(path), _DTYPES[code]), edge[:-1], edge[1:]
