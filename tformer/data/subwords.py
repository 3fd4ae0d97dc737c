"""SentencePiece, set up to lose nothing."""

import io
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np
import sentencepiece

from tformer.data.vocabulary import BOS, EOS, FIRST, MASK, PAD, SPECIALS, UNK, Tokenizer
from tformer.errors import UserError, choose


class SentencePiece(Tokenizer):
    """Subwords (Kudo 2018; Sennrich et al. 2016), lossless: no normalisation, bytes for unknown characters.

    A newline is a piece of its own. SentencePiece writes a space as U+2581; a U+2581 of the text becomes its bytes.
    """

    _SPACE = '\u2581'

    lossless = True

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self._space_bytes = [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in self._SPACE.encode()]
        self.byte_lengths = np.array([self._byte_length(i) for i in range(self.vocab_size)], np.int64)

    def _byte_length(self, index: int) -> int:
        if index < FIRST:
            return 0
        if self._processor.is_byte(index):
            return 1
        return len(self._processor.id_to_piece(index).replace(self._SPACE, ' ').encode())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, model: str, seed: int) -> Self:
        """Trains on lines, at most about `_MOST_CHARACTERS` of them, sampled with `seed`.

        Raises:
          UserError: what SentencePiece objects to, e.g. a vocab_size below the number of characters.
        """
        choose(dict.fromkeys(('unigram', 'bpe')), model, 'data.tokenizer_model')
        trained = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample_lines(texts, seed)),
                model_writer=trained,
                model_type=model,
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                normalization_rule_name='identity',
                byte_fallback=True,
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
                num_threads=4,  # fixed: the sums of the EM steps depend on it
                minloglevel=2,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            reason = ' '.join(str(error).split())
            raise UserError(f'sentencepiece cannot train data.tokenizer_vocab_size={vocab_size}: {reason}') from error
        return cls(trained.getvalue())

    @classmethod
    def load(cls, data: bytes) -> Self:
        return cls(data)

    def dump(self) -> bytes:
        return self._model

    def encode(self, text: str) -> list[int]:
        first, *rest = text.split(self._SPACE)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._space_bytes
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(self._ordinary(ids))


_LINE = 4000  # characters of a training line; longer ones are cut
_MOST_CHARACTERS = 20_000_000  # of a sample to train on


def sample_lines(texts: Iterable[str], seed: int, most_characters: int = _MOST_CHARACTERS) -> list[str]:
    """The lines of `texts`, or an even sample of them of half to all of `most_characters`, in one pass."""
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
        for start in range(0, len(line), _LINE):
            yield line[start : start + _LINE]
