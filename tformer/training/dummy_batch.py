"""A config and a batch without data: assumed sizes where the data would decide them, and random tokens."""

import os
from collections.abc import Callable

import numpy as np

from tformer.checks import resolve
from tformer.config import Config, override
from tformer.config.tasks import TASKS
from tformer.data.examples.example_formats import format_of
from tformer.data.examples.special_tokens import marks_prefix
from tformer.data.tokenizers.tokenizers import TOKENIZERS
from tformer.data.tokenizers.vocabulary import FIRST
from tformer.training import workdir


def assumed(config: Config) -> Config:
    """Returns `config` resolved without its data.

    Where the model does not state them: a vocabulary of data.tokenizer_vocab_size (byte and hub tokenizers have their
    own, and so has a directory that lends its tokenizers), and 10 classes.
    """
    data, size = config.data, config.data.tokenizer_vocab_size
    lender = workdir.tokenizer_lender(config, None)
    if lender and any(os.path.isfile(os.path.join(lender, name)) for name in ('tokenizer.json', 'config.json')):
        size = workdir.lent_tokenizers(lender).target.vocab_size
    elif data.tokenizer in ('byte', 'huggingface') and not config.model.vocab_size:
        size = TOKENIZERS[data.tokenizer].train((), data).vocab_size
    return resolve(config, vocab_size=config.model.vocab_size or size, num_classes=config.model.num_classes or 10)


def vocabulary_is_alphabet(config: Config) -> bool:
    """Returns whether the data alone tell the vocabulary: it is their alphabet, and the model states no other."""
    return config.model.vocab_size is None and not {'char', 'symbol'}.isdisjoint(
        {config.data.tokenizer, config.data.source_tokenizer}
    )


def one_row(config: Config) -> dict[str, np.ndarray]:
    """Returns a `random_batch` of one row, for all that reads shapes of rows only."""
    return random_batch(override(config, {'train.batch_size': 1, 'train.microbatches': 1}))


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a full batch of random tokens [train.batch_size, data.length] for the config's objective.

    The second half of each row follows its first, as the second of two texts or behind a prefix, where there are such.
    """
    rng = np.random.default_rng(seed)
    model, data, rows = config.model, config.data, config.train.batch_size
    assert model.vocab_size

    def side(prefix: str, vocab_size: int, length: int) -> dict[str, np.ndarray]:
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        tokens = rng.integers(FIRST, vocab_size, (rows, length), np.int32)
        return {f'{prefix}inputs': tokens, f'{prefix}positions': positions}

    batch = side('', model.vocab_size, data.length)
    if model.family == 'encoder_decoder':
        batch |= side('encoder_', model.encoder_vocab_size or model.vocab_size, data.encoder_length or data.length)
    task, classes = TASKS[config.train.objective], model.num_classes or 2
    first, stop = (0, classes) if task.head == 'tags' else (FIRST, model.vocab_size)
    targets = rng.integers(first, stop, (rows, data.length), np.int32)
    labels: dict[str, Callable[[], np.ndarray]] = {
        'class': lambda: rng.integers(0, classes, rows, np.int32),
        'number': lambda: rng.random(rows, np.float32),
        'spans': lambda: rng.integers(0, data.length, (rows, 2), np.int32),
        'sentences': lambda: rng.integers(0, 2, rows, np.int32),
        'choice': lambda: rng.integers(0, 2, rows, np.int32),
        'vectors': lambda: rng.random(rows, np.float32),
        'comparison': lambda: np.zeros(rows, np.int32),
    }
    if task.head in labels:
        batch |= {'labels': labels[task.head](), 'label_weights': np.ones(rows, np.float32)}
    second_BT = batch['positions'] >= data.length // 2
    if marks_prefix(config):
        batch['prefix'] = ~second_BT
    if model.family == 'encoder' and format_of(config).pairs:
        batch['token_types'] = second_BT.astype(np.int32)
    if format_of(config).several:
        batch |= _two_texts(batch['positions'])
    return batch | {'targets': targets, 'weights': np.ones((rows, data.length), np.float32)}


def _two_texts(positions_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays that make each row two texts of half its length."""
    rows, length = positions_BT.shape
    second_BT = positions_BT >= length // 2
    return {
        'positions': positions_BT - second_BT * np.int32(length // 2),
        'segment_ids': 1 + second_BT.astype(np.int32),
        'segment_weights': np.ones((rows, 2), np.float32),
        'label_weights': np.ones(rows, np.float32),
        'segment_keys': np.arange(4 * rows, dtype=np.int32).reshape(rows, 2, 2),
    }
