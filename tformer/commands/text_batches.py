"""Texts as the model of a run reads them."""

from collections.abc import Sequence

import numpy as np

from tformer.commands import texts as texts_lib
from tformer.config import Config
from tformer.config.tasks import HEADS, TASKS
from tformer.data.examples import special_tokens
from tformer.data.examples.special_tokens import Fields
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError
from tformer.objectives import LOSSES


def batch_of(
    config: Config, tokenizers: Tokenizers, texts: Sequence[str], targets: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Returns what `Run.batch` does."""
    family, target, objective = config.model.family, tokenizers.target, config.train.objective
    task, paired = TASKS[objective], family == 'encoder_decoder'
    texts, targets = texts_lib.several(texts), None if targets is None else texts_lib.several(targets)
    judged = not HEADS[task.head].vocabulary
    if not texts:
        raise UserError('no texts make no batch')
    if targets is not None and len(targets) != len(texts):
        raise UserError(f'{len(targets)} targets do not go with {len(texts)} texts')
    if LOSSES[task.loss].whole_batch or task.head == 'detection':
        raise UserError(f'train.objective={objective} reads more than a text, so has no batch of texts')
    if targets is not None and not paired:
        raise UserError(f'targets are for model.family=encoder_decoder, not {family}')
    if targets is not None and judged:
        raise UserError(f'targets are for runs that write, not for train.objective={objective}')

    template = special_tokens.template_of(config, tokenizers)
    tokens = (tokenizers.source or target).encode_batch(texts)
    rows: list[Fields]
    if judged:
        rows = [template.read(np.array(each, np.int32)) for each in tokens]
    elif paired:
        written = target.encode_batch([''] * len(texts) if targets is None else targets)
        both = zip(tokens, written, strict=True)
        rows = [{'encoder_inputs': template.given(x), 'inputs': template.prompt(y)} for x, y in both]
    else:
        rows = [{'inputs': (template.given if task.given else template.prompt)(each)} for each in tokens]
    batch = _padded(rows, config.model.max_len)
    return {**batch, 'prefix': batch['positions'] >= 0} if special_tokens.marks_prefix(config) else batch


def _padded(rows: Sequence[Fields], longest: int) -> dict[str, np.ndarray]:
    """Returns rows padded to the longest of each stack, and their positions; none may be above `longest`."""
    batch: dict[str, np.ndarray] = {}
    for name in rows[0]:
        sizes = np.array([len(row[name]) for row in rows])
        if sizes.max() > longest:
            raise UserError(f'a text of {sizes.max()} tokens is longer than model.max_len={longest}')
        batch[name], places = np.zeros((len(rows), sizes.max()), np.int32), np.arange(sizes.max(), dtype=np.int32)
        for index, row in enumerate(rows):
            batch[name][index, : sizes[index]] = row[name]
        positions = np.where(places[None] < sizes[:, None], places[None], np.int32(-1))
        batch[name.replace('inputs', 'positions')] = positions
    return batch
