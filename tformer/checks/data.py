"""Rules between the fields of `data`, and between them and the model or the objective."""

import math
import os
import string

from tformer.checks.conditions import require
from tformer.config import Config, Data, Model, parts
from tformer.config.mixtures import stages
from tformer.config.tasks import TASKS
from tformer.data import stores
from tformer.errors import UserError


def check_data(data: Data, model: Model) -> None:
    lengths = {'data.length': data.length, 'data.encoder_length': data.encoder_length}
    for name, length in lengths.items():
        require(
            length is None or 3 <= length <= model.max_len,
            f'{name}={length} must be from 3 to model.max_len={model.max_len}',
        )
    require(
        (data.tokenizer_path is not None) == ('huggingface' in (data.tokenizer, data.source_tokenizer)),
        f'data.tokenizer_path={data.tokenizer_path} is the file of a huggingface tokenizer, but '
        f'data.tokenizer={data.tokenizer} and data.source_tokenizer={data.source_tokenizer}: set both or neither',
    )
    require(
        data.weight is None,
        f'data.weight={data.weight} belongs to a part of a mixture: data.mixture="path=... weight={data.weight}"',
    )
    require(
        data.mask_keep + data.mask_random <= 1,
        f'data.mask_keep={data.mask_keep} and data.mask_random={data.mask_random} are shares of the hidden tokens: '
        'their sum must be at most 1',
    )
    require(
        not data.cleaning and data.deduplicate is None,
        f'data.cleaning={data.cleaning} and data.deduplicate={data.deduplicate} are of `tformer prepare --output`: '
        'set data.path to what it has written',
    )
    require(bool(data.denoisers), 'data.denoisers is empty: it must name one or more')
    least, most = {'encoder': (1, 1), 'decoder': (0, 1)}.get(model.family, (1, math.inf))
    require(
        least <= len(data.start) <= most and (model.family != 'encoder' or data.start == Data.start),
        f'data.start={data.start} stands before the text of a decoder: one token or none with model.family=decoder, '
        'one or more with encoder_decoder',
    )


def check_records(config: Config) -> None:
    data, objective = config.data, config.train.objective
    task = TASKS[objective]
    for part in parts(data):
        require(len(part.tfds_splits) == 3, f'data.tfds_splits={part.tfds_splits} must name three: train, valid, test')
        for name in ('train_lengths', 'test_lengths'):
            ends = getattr(part, name)
            require(
                len(ends) == 2 and 1 <= ends[0] <= ends[1],
                f'data.{name}={ends} must be two numbers, the fewest and the most, from 1',
            )
        templates = {'source_template': part.source_template, 'target_template': part.target_template}
        require(
            len([text for text in templates.values() if text is not None]) != 1,
            'data.source_template and data.target_template go together: set both or neither',
        )
        for name, text in templates.items():
            _check_template(f'data.{name}', text)
    require(
        data.train_examples is None or not data.mixture,
        f'data.train_examples={data.train_examples} is the size of one training split, not of a mixture',
    )
    require(len(set(data.labels)) == len(data.labels), f'data.labels={data.labels} names a label twice')
    tags = [label for label in data.labels if label == 'O' or label[:2] in ('B-', 'I-')]
    require(
        task.classes != 'tags' or not tags,
        f'data.labels names types of tags, e.g. PER for B-PER and I-PER, and not O: {", ".join(tags)}',
    )
    stages(data)
    require(bool(config.decode.gap), 'decode.gap is empty: it must be a text that stands where another is missing')
    low_high = data.label_range
    require(
        not low_high or (len(low_high) == 2 and -math.inf < low_high[0] < low_high[1] < math.inf),
        f'data.label_range={low_high} must be two numbers, the smallest label and the largest',
    )
    lender, start = data.tokenizer_from, config.train.init_from
    here = {'tokenizer_from': lender, 'tokenizer_path': data.tokenizer_path, 'cache_dir': data.cache_dir}
    for name, path in {**{f'data.{x}': y for x, y in here.items()}, 'train.teacher': config.train.teacher}.items():
        stores.require_local(path or '', name)
    stores.require_local(start or '', 'train.init_from')
    require(
        lender is None or start is None or os.path.normpath(lender) == os.path.normpath(start),
        f'data.tokenizer_from={lender} differs from train.init_from={start}, whose parameters know its own tokens only',
    )


def _check_template(field: str, text: str | None) -> None:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text or '') if name is not None]
    except ValueError as error:
        raise UserError(f'{field}={text!r}: {error}') from None
    for name in names:
        require(
            name.partition('[')[0] != '' and not name[0].isdecimal() and '.' not in name,
            f'{field}: {{{name}}} must name a column or key of the data, e.g. {{label}} or {{answers[text][0]}}',
        )
    require(text is None or bool(names), f'{field}={text!r} names no column or key of the data, e.g. {{label}}')
