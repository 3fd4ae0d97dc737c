"""Small hub directories, of the committed references of tests/reference: tensors, config.json, a vocabulary."""

import json
import pathlib
from typing import Any

import numpy as np

import make_hf_reference as references
from tformer.hf import safetensors

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
PLAIN = ('<s>', '<pad>', '</s>', '<unk>', '<mask>')
BERT = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
T5 = ('<pad>', '</s>', '<unk>')
LLAMA = ('<unk>', '<s>', '</s>')
GEMMA = ('<pad>', '<eos>', '<bos>', '<unk>')
SPECIALS = {  # the first ids, as the families' config.json have them
    **dict.fromkeys(('bert', 'distilbert', 'electra'), BERT),
    'albert': ('<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]'),
    'gpt2': ('<|endoftext|>',),
    **dict.fromkeys(('t5', 'mt5'), T5),
    **dict.fromkeys(('llama', 'mistral', 'mixtral'), LLAMA),
    **dict.fromkeys(('gemma', 'gemma2', 'gemma3_text'), GEMMA),
}
ENCODERS = ('roberta', 'xlm-roberta', 'camembert', 'mpnet', 'modernbert')  # of those with '<s>'
ROLES = {'bos': ('<s>', '<bos>', '[CLS]', '<|endoftext|>'), 'eos': ('</s>', '<eos>', '[SEP]', '<|endoftext|>')}


def ids(family: str) -> dict[str, int]:
    """Returns the ids in place of the library's defaults, which are of larger vocabularies."""
    names = SPECIALS.get(family, PLAIN)
    found = {f'{role}_token_id': next((names.index(x) for x in of if x in names), -1) for role, of in ROLES.items()}
    forced = {'forced_eos_token_id': found['eos_token_id']} if family in ('bart', 'marian') else {}
    start = {'decoder_start_token_id': 1} if family == 'marian' else {}
    return {name: index for name, index in {**found, **forced, **start}.items() if index >= 0}


def tokenizer(family: str) -> str:
    """Returns a tokenizer.json of words of one letter or two."""
    import tokenizers as library

    names = SPECIALS.get(family, PLAIN)
    words = [*LETTERS, *(letter + letter for letter in LETTERS)][: references.VOCAB - len(names)]
    vocabulary = {word: index for index, word in enumerate([*names, *words])}
    unknown = next((name for name in names if 'unk' in name.lower()), names[0])
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unknown))
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(names))
    if '<s>' in names:  # as these families' own do
        parts = '<s> $A </s>' if family in ENCODERS else '<s> $A'
        used = [(name, vocabulary[name]) for name in ('<s>', '</s>')]
        made.post_processor = library.processors.TemplateProcessing(parts, special_tokens=used)
    return str(made.to_str())


def write(
    place: pathlib.Path,
    name: str,
    shard_bytes: int = 1 << 40,
    dtype: Any = None,
    tensors: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> references.Reference:
    """Writes the directory of a committed reference; `fields` go into its config.json."""
    reference = references.load(name)
    family = reference.config['model_type']
    place.mkdir(parents=True, exist_ok=True)
    chosen = reference.tensors if tensors is None else tensors
    chosen = {key: value if dtype is None else value.astype(dtype) for key, value in chosen.items()}
    shapes = {key: (value.dtype, value.shape) for key, value in chosen.items()}
    safetensors.write_directory(place, shapes, chosen.__getitem__, shard_bytes)
    given = {name: index for name, index in ids(family).items() if reference.config.get(name) is not None}
    config = {**reference.config, **given, **fields}
    (place / 'config.json').write_text(json.dumps(config))
    (place / 'tokenizer.json').write_text(tokenizer(family))
    return reference._replace(config=config, tensors=chosen)
