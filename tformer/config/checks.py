"""What must hold between fields."""

import math
import os
import re
import string

from tformer.config.applies import check_applies
from tformer.config.convert import parts
from tformer.config.mesh import check_mesh
from tformer.config.model import Model, own_layers
from tformer.config.model_checks import check_model, nearest_divisor, require
from tformer.config.ranges import check_ranges
from tformer.config.run import Config, Data, Optimizer
from tformer.errors import UserError

GIVEN = ('seq2seq', 'span_corruption', 'denoising', 'ul2')  # a text is written where another is given
WRITING = (*GIVEN, 'prefix_lm', 'causal_lm')  # a text is written
_TOKENS = (*WRITING, 'masked_lm')  # every token is scored by its logits alone
_TWO_LOSSES = ('masked_lm_nsp', 'masked_lm_sop', 'replaced_token')
_EVERY = ('encoder', 'decoder', 'encoder_decoder')
FAMILY_OF = {
    'causal_lm': ('decoder',),
    'masked_lm': ('encoder',),
    'masked_lm_nsp': ('encoder',),
    'masked_lm_sop': ('encoder',),
    'replaced_token': ('encoder',),
    'classification': _EVERY,
    'regression': _EVERY,
    'token_classification': _EVERY,
    'question_answering': _EVERY,
    'prefix_lm': ('decoder', 'encoder_decoder'),
    **dict.fromkeys(GIVEN, ('encoder_decoder', 'decoder')),
}

MUP_OPTIMIZERS = ('adam', 'adamw', 'lion', 'adafactor', 'schedule_free')  # optimizers.rate_factors scales their rates


def check(config: Config) -> None:
    """Raises a `UserError` of one line where a field is out of range or fields do not fit together."""
    check_ranges(config)
    check_applies(config.model)
    check_model(config.model)
    _check_run(config)
    _check_data(config.data, config.model)
    _check_records(config)
    _check_optimizer(config.optimizer, config.model)


def _check_run(config: Config) -> None:
    model, train, decode = config.model, config.train, config.decode
    families = FAMILY_OF.get(train.objective, (model.family,))
    require(
        model.family in families,
        f'train.objective={train.objective} needs model.family={" or ".join(families)}, not {model.family}',
    )
    require(
        (train.num_steps is None) != (train.num_epochs is None),
        f'exactly one of train.num_steps={train.num_steps} and train.num_epochs={train.num_epochs} must be set',
    )
    require(
        train.batch_size % train.microbatches == 0,
        f'train.microbatches={train.microbatches} does not divide train.batch_size={train.batch_size}; '
        f'nearest that does: {nearest_divisor(train.batch_size, train.microbatches)}',
    )
    require(
        train.init_from is not None or not train.init_except,
        f'train.init_except={train.init_except} has no effect here: it applies where train.init_from is set',
    )
    if train.microbatches > 1:
        weights = model.balance_weight or model.router_z_weight
        inexact = {
            'model.norm=batchnorm': model.norm == 'batchnorm',
            'model.expert_dispatch=capacity': model.num_experts and model.expert_dispatch == 'capacity',
            'model.num_experts with a balance_weight or router_z_weight': model.num_experts and weights,
        }
        for name, holds in inexact.items():
            line = f'{name} depends on the whole batch: train.microbatches={train.microbatches} is not exact; use 1'
            require(not holds, line)
    require(
        model.family != 'encoder_decoder' or decode.max_len <= model.max_len,
        f'decode.max_len={decode.max_len} is longer than model.max_len={model.max_len}',
    )
    require(
        train.objective == 'seq2seq' or not (config.evaluate.metrics or config.evaluate.examples_while_training),
        'evaluate.metrics and evaluate.examples_while_training are of generated text: only for train.objective=seq2seq',
    )
    language = config.evaluate.language
    require(
        language is None or re.fullmatch('[a-z]{2}', language) is not None,
        f'evaluate.language={language} must be a code of two letters (ISO 639-1): en, de, zh',
    )
    require(decode.top_p is None or decode.top_p <= 1, f'decode.top_p={decode.top_p} must be at most 1')
    lengths = config.evaluate.lengths
    require(
        not lengths or train.objective == 'causal_lm',
        f'evaluate.lengths={lengths} are of windows of running text: only for train.objective=causal_lm',
    )
    require(
        all(3 <= length <= model.max_len for length in lengths),
        f'evaluate.lengths={lengths} must be from 3 to model.max_len={model.max_len}',
    )
    _check_losses(config)
    _check_in_order(config)
    check_mesh(config)


def _check_in_order(config: Config) -> None:
    """What a recurrent model, which reads a row in its order, cannot do."""
    model, objective = config.model, config.train.objective
    if model.recurrence is None:
        return
    line = f'model.recurrence={model.recurrence} '
    require(objective != 'replaced_token', line + 'has no generator: not for train.objective=replaced_token')
    ahead = model.family == 'decoder' and objective in (*GIVEN, 'prefix_lm') and config.data.bidirectional_prefix
    require(not ahead, line + 'sees no token before its turn: data.bidirectional_prefix must be False')
    require(
        model.family != 'encoder_decoder' or config.data.batching != 'pack',
        line + 'starts the decoder from one source a row: not for data.batching=pack; valid here: bucket, pad',
    )


def _check_losses(config: Config) -> None:
    train = config.train
    nowhere = {
        'label_smoothing': train.label_smoothing and train.objective in ('regression', 'question_answering'),
        'z_loss': train.z_loss and train.objective == 'regression',
        'loss_chunk': train.loss_chunk is not None and train.objective not in _TOKENS,
        'second_loss_weight': train.second_loss_weight is not None and train.objective not in _TWO_LOSSES,
    }
    for name, holds in nowhere.items():
        require(
            not holds,
            f'train.{name}={getattr(train, name)} has no effect here: it does not apply where '
            f'train.objective={train.objective}',
        )
    require(
        train.loss_chunk is None or not (config.model.mlm_transform and config.model.norm == 'batchnorm'),
        f'train.loss_chunk={train.loss_chunk}: model.norm=batchnorm, here in the head (model.mlm_transform), needs the '
        'whole batch',
    )


def _check_data(data: Data, model: Model) -> None:
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
        f'data.weight={data.weight} is of a part of a mixture: data.mixture="path=... weight={data.weight}"',
    )
    require(
        data.row_multiple is None or data.batch_tokens is not None,
        f'data.row_multiple={data.row_multiple} rounds the rows of data.batch_tokens, which is None',
    )
    require(data.modulus >= 2, f'data.modulus={data.modulus} must be at least 2')
    require(
        data.mean_span_length >= 1,
        f'data.mean_span_length={data.mean_span_length} must be at least 1',
    )
    require(
        data.mask_keep + data.mask_random <= 1,
        f'data.mask_keep={data.mask_keep} and data.mask_random={data.mask_random} are shares of the hidden tokens: '
        'their sum must be at most 1',
    )
    require(bool(data.denoisers), 'data.denoisers is empty: it must name one or more')
    require(len(data.tfds_splits) == 3, f'data.tfds_splits={data.tfds_splits} must name three: train, valid, test')


def _check_records(config: Config) -> None:
    data, objective = config.data, config.train.objective
    for part in parts(data):
        for name in ('train_lengths', 'test_lengths'):
            ends = getattr(part, name)
            require(
                len(ends) == 2 and 1 <= ends[0] <= ends[1],
                f'data.{name}={ends} must be two numbers, the fewest and the most, from 1',
            )
        templates = {'source_template': part.source_template, 'target_template': part.target_template}
        require(
            objective == 'seq2seq' or not any(templates.values()),
            f'data.source_template and data.target_template make text of text: not for train.objective={objective}',
        )
        require(
            len([text for text in templates.values() if text is not None]) != 1,
            'data.source_template and data.target_template go together: set both or neither',
        )
        for name, text in templates.items():
            _check_template(f'data.{name}', text)
    require(
        data.train_examples is None or not data.mixture,
        f'data.train_examples={data.train_examples} is of one training split, not of a mixture',
    )
    require(
        not data.labels or objective in ('classification', 'token_classification'),
        f'data.labels are those of classification or token_classification, not of train.objective={objective}',
    )
    require(len(set(data.labels)) == len(data.labels), f'data.labels={data.labels} names one twice')
    tags = [label for label in data.labels if label == 'O' or label[:2] in ('B-', 'I-')]
    require(
        objective != 'token_classification' or not tags,
        f'data.labels names types of tags, e.g. PER for B-PER and I-PER, and not O: {", ".join(tags)}',
    )
    low_high = data.label_range
    require(not low_high or objective == 'regression', f'data.label_range={low_high} is only for regression')
    require(
        not low_high or (len(low_high) == 2 and -math.inf < low_high[0] < low_high[1] < math.inf),
        f'data.label_range={low_high} must be two numbers, the smallest label and the largest',
    )
    lender, start = data.tokenizer_from, config.train.init_from
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


def _check_optimizer(optimizer: Optimizer, model: Model) -> None:
    require(
        optimizer.name != 'adam' or optimizer.weight_decay == 0,
        f'optimizer.name=adam has no weight decay, but optimizer.weight_decay={optimizer.weight_decay}; valid: adamw',
    )
    require(
        optimizer.name != 'schedule_free' or (optimizer.beta1 > 0 and optimizer.ema_decay is None),
        f'optimizer.name=schedule_free averages by itself: it needs optimizer.beta1={optimizer.beta1} '
        f'above 0 and optimizer.ema_decay={optimizer.ema_decay} None',
    )
    require(
        model.norm != 'batchnorm' or (optimizer.name != 'schedule_free' and optimizer.ema_decay is None),
        'model.norm=batchnorm has statistics of the parameters that were trained, not of their averages: '
        'optimizer.ema_decay must be None and optimizer.name not schedule_free',
    )
    require(
        optimizer.master_dtype is None or model.param_dtype == 'bfloat16',
        f'optimizer.master_dtype={optimizer.master_dtype} has no effect here: it applies where model.param_dtype is '
        'bfloat16',
    )
    require(
        optimizer.layer_decay is None or optimizer.layer_decay <= 1,
        f'optimizer.layer_decay={optimizer.layer_decay} must be at most 1',
    )
    for stack, layers in own_layers(model).items():
        require(
            optimizer.frozen_layers <= layers,
            f'optimizer.frozen_layers={optimizer.frozen_layers} is more than the {stack} has: {layers}'
            + (f', shared (model.layer_sharing={model.layer_sharing})' if model.layer_sharing else ''),
        )
    require(
        model.parametrization != 'mup' or optimizer.name in MUP_OPTIMIZERS,
        f'model.parametrization=mup has no rates for optimizer.name={optimizer.name}; '
        f'valid: {", ".join(MUP_OPTIMIZERS)}',
    )
