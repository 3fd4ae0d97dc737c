"""Subwords by SentencePiece, set up to be lossless."""

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
import sentencepiece

from tformer.config.run import Data
from tformer.data.tokenizers.vocabulary import BOS, EOS, FIRST, MASK, PAD, SPECIALS, UNK, Tokenizer
from tformer.errors import UserError, choose


class SentencePiece(Tokenizer):
    """Subwords (Kudo 2018; Sennrich et al. 2016), lossless if bytes encode unknown characters.

    A newline is its own piece. SentencePiece writes a space as U+2581, so a U+2581 in a text is encoded as its bytes.
    """

    fields = ('tokenizer_vocab_size', 'tokenizer_model', 'byte_fallback')
    threads = -1  # that tokenise several texts together; -1: as many as there are cores
    _SPACE = '\u2581'

    def __init__(self, stored: bytes) -> None:
        super().__init__(stored)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=stored)
        self.vocab_size = self._processor.vocab_size()
        self.fallback = list(filter(self._processor.is_byte, range(self.vocab_size)))
        self.exact, self._bytes = bool(self.fallback), frozenset(self.fallback)
        space = [f'<0x{byte:02X}>' for byte in self._SPACE.encode()]
        self._space_ids = self._processor.piece_to_id(space) if self.exact else [UNK]
        pieces = self._processor.id_to_piece(list(range(self.vocab_size)))
        self.byte_lengths = np.array([len(piece.replace(self._SPACE, ' ').encode()) for piece in pieces], np.int64)
        self.byte_lengths[list(map(self._processor.is_byte, range(self.vocab_size)))] = 1
        self.byte_lengths[:FIRST] = 0

    @classmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self:
        """Trains on lines of at most about `_MOST_CHARACTERS` characters together, sampled with `seed`."""
        choose(dict.fromkeys(('unigram', 'bpe')), data.tokenizer_model, 'data.tokenizer_model')
        trained, lines = io.BytesIO(), sample_lines(texts, seed)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=trained,
                model_type=data.tokenizer_model,
                vocab_size=data.tokenizer_vocab_size,
                hard_vocab_limit=False,
                normalization_rule_name='identity',
                byte_fallback=data.byte_fallback,
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                user_defined_symbols=['\n'],
                pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
                pad_piece=SPECIALS[PAD], bos_piece=SPECIALS[BOS],
                eos_piece=SPECIALS[EOS], unk_piece=SPECIALS[UNK],
                control_symbols=list(SPECIALS[MASK:]),
                max_sentence_length=4 * _LINE,
                num_threads=4,  # fixed, because the sums of the EM steps depend on it
                minloglevel=2,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            size, reason = data.tokenizer_vocab_size, ' '.join(str(error).split())
            raise UserError(f'sentencepiece cannot train data.tokenizer_vocab_size={size}: {reason}') from error
        return cls(trained.getvalue())

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encode = self._processor.encode
        several = len(texts) > 1  # one text needs no threads
        encoded = encode(list(texts), num_threads=self.threads) if several else list(map(encode, texts))
        for row, text in enumerate(texts):
            if self._SPACE in text:
                first, *rest = map(encode, text.split(self._SPACE))
                encoded[row] = first + list(itertools.chain(*(self._space_ids + part for part in rest)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(self._ordinary(ids))

    def _spell(self, index: int) -> bytes:
        piece = self._processor.id_to_piece(index)
        return bytes([int(piece[3:5], 16)]) if index in self._bytes else piece.replace(self._SPACE, ' ').encode()


_LINE = 4000  # characters of a training line; longer ones are cut
_LONGEST = 100_000  # characters of a line that are used, so that a huge line does not dominate the sample
_MOST_CHARACTERS = 20_000_000  # of the training sample


def sample_lines(texts: Iterable[str], seed: int, most_characters: int = _MOST_CHARACTERS) -> list[str]:
    """Returns the lines of `texts`, or an even sample with half to all of `most_characters`, in one pass."""
    rng = np.random.default_rng(seed)
    lines: list[str] = []
    size, rate = 0, 1.0
    for text in texts:
        for line in _lines(text):
            if rate < 1 and rng.random() >= rate:
                continue
            lines.append(line)
            size += len(line)
            if size > most_characters:
                lines = [line for line in lines if rng.random() < 0.5]
                size, rate = sum(map(len, lines)), rate / 2
    return lines


def _lines(text: str) -> Iterator[str]:
    for line in text.split('\n'):
        for start in range(0, min(len(line), _LONGEST), _LINE):
            yield line[start : start + _LINE]
