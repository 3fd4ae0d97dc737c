"""The tokenizers of a run: how they are trained, stored and cached; one row of `TOKENIZERS` for each kind."""

import copy
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from tformer import atomic
from tformer.config.run import Config
from tformer.config.tasks import TASKS
from tformer.data import cache
from tformer.data.sources.fields import are_plain, is_bio, tags_of
from tformer.data.sources.records import Record, texts
from tformer.data.tokenizers.bytes_and_characters import Byte, Char, Symbol
from tformer.data.tokenizers.chat import ChatTemplate, variables_of
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.vocabulary import NORMALIZATIONS, Tokenizer
from tformer.errors import UserError, choose, nearest

_SETTINGS = (
    'tokenizer source_tokenizer tokenizer_vocab_size tokenizer_model byte_fallback normalization sentinels'.split()
)
_MOST_SENTINELS = 1 << 24  # each takes memory when tokenizers are loaded


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a run."""

    source: Tokenizer | None  # of the encoder's text; `target` itself if both sides share it; None with a single stack
    target: Tokenizer  # of the decoder's, or the only, text
    labels: tuple[str, ...] = ()  # the classes or tags in the order of their ids
    own_chat: ChatTemplate | None = None  # how chats are written, where the hub or data.chat_template says so

    @property
    def chat(self) -> ChatTemplate:
        """How chats are written."""
        return self.own_chat or ChatTemplate.plain(self.target)

    def talk(self, config: Config) -> bool:
        """Returns whether a run replies to chats: it has been trained on some, or its tokenizer has a template."""
        trained = TASKS[config.train.objective].records == 'chat'
        return config.model.family == 'decoder' and (trained or self.own_chat is not None)

    def ends(self, config: Config) -> tuple[int, ...]:
        """Returns the ids that end a text that a run generates, of which EOS is the first.

        Raises:
          UserError: decode.ends names a token that there is not.
        """
        turn_end = self.chat.turn_end(self.target) if self.talk(config) else None
        ids = [self.target.specials.eos, *([] if turn_end is None else [turn_end])]
        for name in config.decode.ends:
            if (index := self.target.id_of(name)) is None:
                raise UserError(f'decode.ends={name!r} is not a token{nearest(name, self.target.special_names)}')
            ids.append(index)
        return tuple(dict.fromkeys(ids))

    def padded(self, pad: int) -> 'Tokenizers':
        """Returns the tokenizers with another padding."""

        def other(side: Tokenizer) -> Tokenizer:
            made = copy.copy(side)
            made.specials = dataclasses.replace(side.specials, pad=pad)
            return made

        target = other(self.target)
        source = target if self.shared else self.source and other(self.source)
        return dataclasses.replace(self, source=source, target=target)

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def fingerprint(self) -> str:
        parts = [self.source.fingerprint if self.source else '', self.target.fingerprint, *self.labels]
        parts += [self.own_chat.text, repr(self.own_chat.tokens)] if self.own_chat else []
        return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` (all but the vocabularies) and a vocabulary `tokenizer.SIDE.NAME` for each side."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        sides = {'target': self.target} | ({'source': self.source} if self.source and not self.shared else {})
        kinds = {kind: name for name, kind in TOKENIZERS.items()}
        names = {side: kinds[type(tokenizer)] for side, tokenizer in sides.items()}
        for side, tokenizer in sides.items():
            atomic.write(Path(directory, f'tokenizer.{side}.{names[side]}'), tokenizer.dump())
        manifest: dict[str, Any] = {'source': 'target' if self.shared else None, **names, 'labels': self.labels}
        manifest |= {'normalization': self.target.normalization, 'sentinels': self.target.num_sentinels}
        if declared := {side: tokenizer.declared for side, tokenizer in sides.items() if tokenizer.declared}:
            manifest['declared'] = declared
        if self.own_chat:
            manifest['chat'] = {'template': self.own_chat.text, 'tokens': dict(self.own_chat.tokens)}
        atomic.write(Path(directory, 'tokenizer.json'), json.dumps(manifest, ensure_ascii=False, indent=1))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> 'Tokenizers':
        """Loads what `save` wrote; raises a `UserError` if it is missing or damaged."""
        path = Path(directory, 'tokenizer.json')
        if not os.path.isfile(path):  # a name that is too long is none either
            raise UserError(f'{path} does not exist: is {directory} the workdir of a run?')
        try:
            return cls._load(path)
        except UserError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as error:
            reason = ' '.join(str(error).split())
            raise UserError(f'{path} or a vocabulary beside it is damaged: {reason}') from error

    @classmethod
    def _load(cls, path: Path) -> 'Tokenizers':
        manifest = json.loads(path.read_bytes())
        normalization = manifest.get('normalization')  # older runs have none
        choose(NORMALIZATIONS, normalization, f'{path}: normalization')
        sentinels, labels = manifest.get('sentinels', 0), tuple(manifest['labels'])
        if type(sentinels) is not int or not 0 <= sentinels <= _MOST_SENTINELS:
            raise UserError(f'{path}: sentinels={sentinels!r} is not from 0 to {_MOST_SENTINELS:,}')
        if not all(isinstance(label, str) for label in labels):
            raise UserError(f'{path}: labels={manifest["labels"]!r} are not texts')

        def read(side: str) -> Tokenizer:
            kind = choose(TOKENIZERS, manifest[side], f'{path}: {side}')
            stored = path.with_name(f'tokenizer.{side}.{manifest[side]}').read_bytes()
            declared = manifest.get('declared', {}).get(side)  # of hub tokenizers; older runs have none
            made = HubTokenizer(stored, str(path), declared) if declared else kind.load(stored)
            return made.normalized(normalization).extended(sentinels)

        target, chat = read('target'), None
        if 'chat' in manifest:
            chat = ChatTemplate(manifest['chat']['template'], tuple(manifest['chat']['tokens'].items())).checked(path)
        if manifest['source'] in (None, 'target'):
            return cls(manifest['source'] and target, target, labels, chat)
        return cls(read('source'), target, labels, chat)


def train_tokenizers(config: Config, records: Sequence[Record], pretrained: Tokenizers | None = None) -> Tokenizers:
    """Returns tokenizers trained on the records of the training split by `config.data`, or the `pretrained` ones.

    A pretrained tokenizer of a run with one stack serves both sides of two stacks. The labels are data.labels, else
    those of the whole training split, of which `records` may be a sample.
    """
    data, seed, objective = config.data, config.train.seed, config.train.objective
    labels = _labels(config, records)
    pairs, two_stacks = TASKS[objective].in_pairs, config.model.family == 'encoder_decoder'
    if pretrained is not None:
        lent = (pretrained.source or pretrained.target) if pairs else pretrained.target if two_stacks else None
        return Tokenizers(lent, pretrained.target, labels, pretrained.own_chat)
    target = choose(TOKENIZERS, data.tokenizer, 'data.tokenizer')
    if pairs and data.source_tokenizer is not None:
        source = choose(TOKENIZERS, data.source_tokenizer, 'data.source_tokenizer')
        return Tokenizers(
            source.train((record['source'] for record in records), data, seed),
            target.train((record['target'] for record in records), data, seed),
        )
    made = target.train((text for record in records for text in texts(record, objective)), data, seed)
    return Tokenizers(made if pairs or two_stacks else None, made, labels)


def with_chat(config: Config, tokenizers: Tokenizers) -> Tokenizers:
    """Returns tokenizers with the chat template of data.chat_template, if there is one.

    Raises:
      UserError: it is not a template.
    """
    if config.data.chat_template is None:
        return tokenizers
    variables = tokenizers.own_chat.tokens if tokenizers.own_chat else variables_of(tokenizers.target)
    read = ChatTemplate.read(config.data.chat_template, variables)
    return dataclasses.replace(tokenizers, own_chat=read)


def _labels(config: Config, records: Sequence[Record]) -> tuple[str, ...]:
    """Returns the classes or the tags in the order of their ids."""
    classes = TASKS[config.train.objective].classes
    given, whole = config.data.labels, getattr(records, 'whole', records)
    if classes == 'label':
        found = {record['label'] for record in whole}
        if given and (others := sorted(found - set(given))):
            raise UserError(f'data.labels={given} lacks the label {others[0]!r} of the training split')
        return given or tuple(sorted(found))
    if classes == 'tags':
        found = {tag for record in whole for tag in record['tags']}
        if are_plain(found):
            return given or tuple(sorted(found))
        return tags_of(given or tuple(sorted({tag[2:] for tag in found if is_bio(tag)} - {''})))
    assert isinstance(classes, tuple)
    return classes


def cached_tokenizers(config: Config, records: Sequence[Record], fingerprints: Sequence[str]) -> Tokenizers:
    """Returns `train_tokenizers` of records with these fingerprints, kept in the cache."""

    def write(writer: cache.Writer) -> None:
        with tempfile.TemporaryDirectory() as place:
            train_tokenizers(config, records).save(place)
            for file in sorted(Path(place).iterdir()):
                writer.append(file.name, np.frombuffer(file.read_bytes(), np.uint8))

    depends_on = {
        'tokenizers of': list(fingerprints),
        'settings': {name: getattr(config.data, name) for name in _SETTINGS},
        'labels': config.data.labels,
        'objective': config.train.objective,
        'stacks': 2 if config.model.family == 'encoder_decoder' else 1,
        'seed': config.train.seed,
        'sentencepiece': sentencepiece.__version__,
    }
    return Tokenizers.load(cache.entry(cache.directory(config.data), depends_on, write))


TOKENIZERS: dict[str, type[Tokenizer]] = {
    'char': Char,
    'byte': Byte,
    'symbol': Symbol,
    'sentencepiece': SentencePiece,
    'huggingface': HubTokenizer,
}
