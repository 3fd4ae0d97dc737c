"""The older vocabularies of the hub as the text of a tokenizer.json, which the `tokenizers` library reads.

WordPiece lists (BERT: vocab.txt), byte-level BPE (GPT-2, RoBERTa, BART: vocab.json and merges.txt), and SentencePiece
models (T5, Llama, XLM-R, Marian, mBART, M2M100, NLLB), whose format is that of the package `sentencepiece`.
"""

import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tformer.config import json_files
from tformer.data.tokenizers.hub_tokenizer import NAMES
from tformer.errors import UserError

Json = dict[str, Any]
Piece = tuple[str, float]  # its text and its log-probability

_SPACE = '\u2581'
_KNOWN = {name for names in NAMES.values() for name in names}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # the types of SentencePiece's pieces


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("the vocabulary needs the package tokenizers: pip install 'tformer[hub]'") from error
    return tokenizers


def _text(library: Any, model: Any, specials: Sequence[str], **parts: Any) -> str:
    """Returns the tokenizer.json of a model of the library with its normalizer, pre_tokenizer and decoder."""
    made = library.Tokenizer(model)
    for name, part in parts.items():
        if part is not None:
            setattr(made, name, part)
    made.add_special_tokens(list(specials))
    return str(made.to_str())


def word_pieces(directory: pathlib.Path, settings: Json) -> str:
    """BERT's vocab.txt, one piece a line (Devlin et al. 2019)."""
    lines = _read(directory / 'vocab.txt').split('\n')
    vocabulary = {line.rstrip('\r'): index for index, line in enumerate(lines[:-1] if lines[-1] == '' else lines)}
    library = _library()
    return _text(
        library,
        library.models.WordPiece(vocabulary, unk_token='[UNK]'),
        [name for name in vocabulary if name in _KNOWN],
        normalizer=library.normalizers.BertNormalizer(
            handle_chinese_chars=settings.get('tokenize_chinese_chars', True),
            strip_accents=settings.get('strip_accents'),
            lowercase=settings.get('do_lower_case', True),
        ),
        pre_tokenizer=library.pre_tokenizers.BertPreTokenizer(),
        decoder=library.decoders.WordPiece(),
    )


def byte_pairs(directory: pathlib.Path, settings: Json) -> str:
    """GPT-2's vocab.json and merges.txt (Radford et al. 2019)."""
    vocabulary, library = ids_of(directory / 'vocab.json'), _library()
    lines = _read(directory / 'merges.txt').split('\n')
    pairs = [tuple(line.split(' ')) for line in lines if line and not line.startswith('#version')]
    if wrong := next((pair for pair in pairs if len(pair) != 2 or ''.join(pair) not in vocabulary), None):
        raise UserError(
            f'{directory / "merges.txt"}: {" ".join(wrong)[:80]!r} does not merge into a piece of vocab.json'
        )
    return _text(
        library,
        library.models.BPE(vocabulary, pairs),
        [name for name in vocabulary if name in _KNOWN],
        pre_tokenizer=library.pre_tokenizers.ByteLevel(add_prefix_space=settings.get('add_prefix_space', False)),
        decoder=library.decoders.ByteLevel(),
    )


def bytes_alone(sentinels: int) -> str:
    """ByT5: the bytes follow three special tokens, and sentinels follow them (Xue et al. 2022)."""
    library = _library()
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level vocabularies write as they are
    hidden = iter(range(256, 512))
    letters = [chr(byte if byte in seen else next(hidden)) for byte in range(256)]
    specials = ['<pad>', '</s>', '<unk>'], [f'<extra_id_{number}>' for number in range(sentinels)]
    pieces = [*specials[0], *letters, *specials[1]]
    return _text(
        library,
        library.models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token='<unk>'),
        [*specials[0], *specials[1]],
        pre_tokenizer=library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=library.decoders.ByteLevel(),
    )


def sentence_pieces(
    stored: bytes, file: object, arrange: Callable[[list[Piece]], list[Piece]] = lambda pieces: pieces
) -> str:
    """A SentencePiece model, unigram or BPE (Kudo & Richardson 2018); `arrange` puts its pieces into the hub's order.

    Raises:
      UserError: `file` does not hold a SentencePiece model.
    """
    library, model = _library(), importlib.import_module('sentencepiece.sentencepiece_model_pb2').ModelProto()
    try:
        model.ParseFromString(stored)
    except Exception as error:  # the package protobuf has several of its own
        raise UserError(f'{file} is not a SentencePiece model: {" ".join(str(error).split())[:120]}') from error
    if not model.pieces or model.trainer_spec.model_type not in (1, 2):
        raise UserError(f'{file} is not a SentencePiece model of type unigram or BPE')
    pieces = arrange([(piece.piece, piece.score) for piece in model.pieces])
    kinds = {piece.piece: piece.type for piece in model.pieces}
    unknown = next((piece for piece, kind in kinds.items() if kind == _UNKNOWN), '<unk>')
    index = {piece: number for number, (piece, _) in enumerate(pieces)}
    if unknown not in index:
        raise UserError(f'{file} has no unknown piece')
    bytes_ = any(kind == _BYTE for kind in kinds.values())
    special = {piece for piece, kind in kinds.items() if kind in (_CONTROL, _UNKNOWN)} | _KNOWN
    special |= {piece for piece, _ in pieces if piece not in kinds}
    if model.trainer_spec.model_type == 1:
        made = library.models.Unigram(pieces, index[unknown], bytes_)
    else:
        ordinary = [piece for piece, _ in pieces if kinds.get(piece) in (_NORMAL, _USER)]
        merges = _merges(ordinary, index)
        made = library.models.BPE(index, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_)
    text = _text(library, made, [piece for piece, _ in pieces if piece in special], **_spaces(library, model, bytes_))
    users = [piece for piece, _ in pieces if kinds.get(piece) == _USER and piece not in special]
    return _with_words(text, users)


def _merges(pieces: Sequence[str], index: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE vocabulary in their order: of each piece, its parts that are pieces themselves."""
    known = set(pieces)
    return [
        pair
        for piece in pieces
        for pair in sorted(
            ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if {piece[:cut], piece[cut:]} <= known),
            key=lambda pair: (index[pair[0]], index[pair[1]]),
        )
    ]


def _spaces(library: Any, model: Any, bytes_: bool) -> Json:
    """Returns the normalizer, pre_tokenizer and decoder of a SentencePiece model."""
    spec, normalizers, decoders = model.normalizer_spec, library.normalizers, library.decoders
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        edges, several = library.Regex(r'\A +| +\z'), library.Regex(' {2,}')
        steps += [normalizers.Replace(edges, ''), normalizers.Replace(several, ' ')]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(' ', _SPACE))
    back = [decoders.Replace(_SPACE, ' '), *([decoders.ByteFallback()] if bytes_ else []), decoders.Fuse()]
    back += [decoders.Strip(' ', 1, 0)] if spec.add_dummy_prefix else []
    return {'normalizer': normalizers.Sequence(steps), 'decoder': decoders.Sequence(back)}


def framed(
    text: str, before: Sequence[str], after: Sequence[str], between: Sequence[str] | None = None, typed: bool = False
) -> str:
    """Returns a tokenizer.json that puts special tokens around a text, and around two with those `between` them; with
    `typed` the second text, and what follows it, is of type 1."""
    made = _library().Tokenizer.from_str(text)
    known = [(name, made.token_to_id(name)) for name in sorted({*before, *after, *(between or ())})]
    whole: Json = {'single': ' '.join([*before, '$A', *after])}
    if between is not None:
        second = [f'{part}:{int(typed)}' for part in ('$B', *after)]
        whole['pair'] = ' '.join([*before, '$A', *between, *second])
    made.post_processor = _library().processors.TemplateProcessing(**whole, special_tokens=known)
    return str(made.to_str())


class Added(NamedTuple):
    """A token that a file adds to a vocabulary."""

    content: str
    number: int
    file: object  # that adds it, for messages
    flags: Mapping[str, bool]  # of the library's `AddedToken`


def with_added(text: str, tokens: Sequence[Added]) -> str:
    """Returns a tokenizer.json with those of the tokens that its vocabulary lacks.

    Raises:
      UserError: a token has another id than the vocabulary gives it, or than the next one.
    """
    if not tokens:
        return text
    made = _library().Tokenizer.from_str(text)
    size_before = made.get_vocab_size()
    for token in tokens:
        known = made.token_to_id(token.content)
        size = made.get_vocab_size(with_added_tokens=True)
        if token.number != (expected := size if known is None else known):
            said = f'{token.content!r} has the id {token.number}, and the vocabulary gives it {expected}'
            raise UserError(f'{token.file}: {said}')
        if known is None:
            add = made.add_special_tokens if token.flags['special'] else made.add_tokens
            add([_library().AddedToken(token.content, **token.flags)])
    return str(made.to_str()) if made.get_vocab_size() > size_before else text


def _with_words(text: str, words: Sequence[str]) -> str:
    """Returns a tokenizer.json with `words` of its vocabulary that are never split, nor merged with others."""
    if not words:
        return text
    made = _library().Tokenizer.from_str(text)
    made.add_tokens([_library().AddedToken(word, normalized=False) for word in words])
    return str(made.to_str())


# -------------------------------------------------------------------------------------------- the hub's orders
def with_sentinels(count: int) -> Callable[[list[Piece]], list[Piece]]:
    """T5: its sentinels follow the pieces, the last one first (Raffel et al. 2020, 3.1.4)."""
    return lambda pieces: [*pieces, *((f'<extra_id_{number}>', 0.0) for number in reversed(range(count)))]


def as_xlm_roberta(pieces: list[Piece]) -> list[Piece]:
    """XLM-R: special tokens of its own in front, and the mask behind."""
    front = ('<s>', '<pad>', '</s>', '<unk>')
    return [*((name, 0.0) for name in front), *pieces[3:], ('<mask>', 0.0)]


def as_mbart(codes: Sequence[str]) -> Callable[[list[Piece]], list[Piece]]:
    """mBART and NLLB: as XLM-R, with the languages before the mask."""

    def arrange(pieces: list[Piece]) -> list[Piece]:
        *rest, mask = as_xlm_roberta(pieces)
        return [*rest, *((code, 0.0) for code in codes), mask]

    return arrange


def in_order_of(ids: Mapping[str, int]) -> Callable[[list[Piece]], list[Piece]]:
    """Marian: two models share the ids of a vocab.json. What a model lacks is never chosen but for unknown text."""

    def arrange(pieces: list[Piece]) -> list[Piece]:
        scores = dict(pieces)
        least = min(scores.values()) - 100.0
        return [(piece, scores.get(piece, least)) for piece in sorted(ids, key=ids.__getitem__)]

    return arrange


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: {error}') from error


def ids_of(file: pathlib.Path) -> dict[str, int]:
    """Returns the ids of a vocab.json. Raises a `UserError` if they are not 0, 1, 2 ... in some order."""
    ids = json_files.read(file)
    if not all(type(index) is int for index in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f'{file}: the ids are not 0 to {len(ids) - 1}')
    return ids
