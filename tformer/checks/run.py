"""Rules between the fields of a run: its objective, its steps, its decoding, its evaluation and its optimizer."""

import re

from tformer.checks.conditions import require, require_divisor
from tformer.checks.model import whole_batch
from tformer.config import Config, Decode, Model, Optimizer, own_layers
from tformer.config.tasks import TASKS
from tformer.data.batches.packing import BATCHING
from tformer.data.examples import example_formats
from tformer.data.tokenizers import biased_texts
from tformer.decode.constraints import CONSTRAINTS
from tformer.decode.generate import read_together
from tformer.decode.text import read_whole
from tformer.layers.norms import NORMS
from tformer.layers.parametrization import parametrization
from tformer.objectives import LOSSES, whole_batch_head
from tformer.optim.optimizers import OPTIMIZERS


def check_run(config: Config) -> None:
    model, train, decode, start = config.model, config.train, config.decode, config.data.start
    task = TASKS[train.objective]
    require(
        model.family in task.families,
        f'train.objective={train.objective} needs model.family={" or ".join(task.families)}, not {model.family}',
    )
    require(
        (train.num_steps is None) != (train.num_epochs is None),
        f'exactly one of train.num_steps={train.num_steps} and train.num_epochs={train.num_epochs} must be set, '
        'the other is None',
    )
    require(
        not task.teacher or train.teacher is not None or train.init_from is not None,
        f'train.objective={train.objective} needs train.teacher, a workdir or a hub directory',
    )
    require_divisor('train.microbatches', train.microbatches, 'train.batch_size', train.batch_size)
    words = whole_batch(model)
    if LOSSES[task.loss].whole_batch:
        words = f'train.objective={train.objective} compares each row with the whole batch'
    require(
        words is None or train.microbatches == 1,
        f'{words}: train.microbatches={train.microbatches} is not exact; use 1',
    )
    require(
        model.family != 'encoder_decoder' or not task.writes or len(start) - 1 + decode.max_len <= model.max_len,
        f'decode.max_len={decode.max_len} after data.start={start} is longer than model.max_len={model.max_len}',
    )
    example_formats.packs(config)  # or refuses to
    _check_decode(decode)
    _check_read_together(config)
    language = config.evaluate.language
    require(
        language is None or re.fullmatch('[a-z]{2}', language) is not None,
        f'evaluate.language={language} must be a code of two letters (ISO 639-1): en, de, zh',
    )
    lengths = config.evaluate.lengths
    require(
        all(3 <= length <= model.max_len for length in lengths),
        f'evaluate.lengths={lengths} must be from 3 to model.max_len={model.max_len}',
    )
    require(
        not isinstance(train.loss_chunk, int) or not whole_batch_head(model),
        f'train.loss_chunk={train.loss_chunk}: model.norm={model.norm}, here in the head (model.mlm_transform), '
        'needs the whole batch',
    )
    drops = model.dropout_rate, model.attention_dropout_rate, model.activation_dropout_rate
    require(
        train.objective != 'simcse' or any(drops),
        'train.objective=simcse compares two vectors of the same text, which only dropout tells apart: '
        f'model.dropout_rate={model.dropout_rate} must be above 0',
    )
    _check_in_order(config)


def _check_decode(decode: Decode) -> None:
    """Refuses fields of generation that do not fit each other."""
    require(
        decode.min_len <= decode.max_len, f'decode.min_len={decode.min_len} is above decode.max_len={decode.max_len}'
    )
    for strategy, field in (('beam', 'beam_size'), ('mbr', 'candidates')):
        most = getattr(decode, field)
        require(
            decode.strategy != strategy or decode.num_outputs <= most,
            f'decode.num_outputs={decode.num_outputs} is above decode.{field}={most}',
        )
    require_divisor('decode.beam_groups', decode.beam_groups, 'decode.beam_size', decode.beam_size)
    require(
        decode.strategy != 'beam' or min(decode.presence_penalty, decode.frequency_penalty) >= 0,
        f'decode.presence_penalty={decode.presence_penalty} or decode.frequency_penalty={decode.frequency_penalty} is '
        'negative: decode.strategy=beam needs scores that only fall',
    )
    forms = [
        kind for kind in CONSTRAINTS if kind not in ('banned', 'begin') and getattr(decode, kind) not in (None, ())
    ]
    named = ' and '.join(f'decode.{kind}' for kind in forms)
    require(len(forms) < 2, f'{named} are set: a text has one form')
    for field in ('choices', 'banned'):
        require(all(getattr(decode, field)), f'decode.{field} has an empty text')
    require(decode.begin != '', 'decode.begin is an empty text: None asks for no beginning')
    for text, value in biased_texts.parse(decode.bias).items():
        require(
            decode.strategy != 'beam' or value <= 0,
            f"decode.bias='{text}={value:g}' is positive: decode.strategy=beam needs scores that only fall",
        )


def _check_read_together(config: Config) -> None:
    """Refuses other numbers of tokens at once where what becomes of a token depends on those that are read with it."""
    whole, together = read_whole(config), read_together(config.model)
    chunk, draft = config.decode.prefill_chunk, config.decode.draft
    require(
        chunk is None or whole is None,
        f'decode.prefill_chunk={chunk} reads prompts in parts, but {whole} needs all of their tokens at once: use None',
    )
    require(
        draft is None or together is None,
        f'decode.draft={draft} reads several tokens in a step, but {together} needs them by themselves: use None',
    )


def _check_in_order(config: Config) -> None:
    """Refuses fields that do not fit a recurrent model, which reads a row in its order."""
    model, task = config.model, TASKS[config.train.objective]
    if model.recurrence is None:
        return
    line = f'model.recurrence={model.recurrence} '
    require(task.head != 'detection', line + f'has no generator: not for train.objective={config.train.objective}')
    batching = config.data.batching
    ahead = model.family == 'decoder' and task.prefix and config.data.bidirectional_prefix
    require(config.decode.draft is None, line + 'cannot forget a token that was drafted: decode.draft must be None')
    for field in ('quantization', 'cache_quantization'):
        kind = getattr(config.decode, field)
        require(kind is None, line + f'computes with no integers: decode.{field}={kind} must be None')
    require(not ahead, line + 'sees no token before its turn: data.bidirectional_prefix must be False')
    require(
        model.family != 'encoder_decoder' or not BATCHING[batching].packs,
        line + f'starts the decoder from one source a row: not for data.batching={batching}; valid here: bucket, pad',
    )


def check_optimizer(optimizer: Optimizer, model: Model) -> None:
    method, name = OPTIMIZERS[optimizer.name], f'optimizer.name={optimizer.name}'
    require(
        not method.averages or (optimizer.beta1 > 0 and optimizer.ema_decay is None),
        f'{name} averages by itself: it needs optimizer.beta1={optimizer.beta1} '
        f'above 0 and optimizer.ema_decay={optimizer.ema_decay} None',
    )
    require(
        not NORMS[model.norm].whole_batch or (not method.averages and optimizer.ema_decay is None),
        f'model.norm={model.norm} has statistics of the parameters that were trained, not of their averages: '
        'optimizer.ema_decay must be None and optimizer.name not schedule_free',
    )
    for stack, layers in own_layers(model).items():
        require(
            optimizer.frozen_layers <= layers,
            f'optimizer.frozen_layers={optimizer.frozen_layers} is more than the {stack} has: {layers}'
            + (f', shared (model.layer_sharing={model.layer_sharing})' if model.layer_sharing else ''),
        )
    require(
        method.mup is not None or not parametrization(model).from_base,
        f'model.parametrization={model.parametrization} has no rates for optimizer.name={optimizer.name}; '
        f'valid: {", ".join(key for key, row in OPTIMIZERS.items() if row.mup)}',
    )
