"""The ranges of single fields. None, where a field takes it, is always in range."""

import math
from collections.abc import Callable

from tformer.config import Config, parts
from tformer.errors import UserError

POSITIVE = (
    'model.vocab_size model.encoder_vocab_size model.emb_dim model.mlp_dim model.num_encoder_layers '
    'model.num_decoder_layers model.num_heads model.num_kv_heads model.head_dim model.value_dim model.max_len '
    'model.embedding_factor_dim model.num_token_types model.rope_theta model.rope_fraction model.rope_factor '
    'model.rope_trained_len model.relative_buckets model.relative_max_distance model.norm_epsilon model.window '
    'model.attention_softcap model.output_softcap model.num_experts model.experts_per_token '
    'model.expert_capacity model.base_emb_dim model.lora_rank model.lora_alpha model.num_classes '
    'model.init_scale model.generator_fraction '
    'data.tokenizer_vocab_size data.num_buckets data.batch_tokens data.prefetch data.num_threads data.mask_rate '
    'data.delete_rate data.infill_rate data.weight data.mixture_temperature data.row_multiple '
    'data.question_length data.stride data.mask_copies data.train_examples data.train_share '
    'optimizer.learning_rate optimizer.epsilon optimizer.clip_norm optimizer.clip_value optimizer.layer_decay '
    'train.num_steps train.num_epochs train.batch_size train.microbatches train.log_every train.eval_every '
    'train.eval_batches train.checkpoint_every train.keep_last train.keep_every train.patience '
    'train.max_skipped train.skip_spikes train.max_minutes train.loss_chunk '
    'mesh.microbatches mesh.pipeline_repeats '
    'decode.max_len decode.beam_size decode.temperature decode.top_k decode.top_p decode.batch_size '
    'evaluate.answer_length evaluate.max_examples'
).split()
NOT_NEGATIVE = (
    'model.position_offset model.balance_weight model.router_z_weight '
    'data.num_workers data.sentinels data.mask_keep data.mask_random '
    'optimizer.warmup_steps optimizer.frozen_layers optimizer.final_fraction optimizer.weight_decay '
    'train.z_loss train.second_loss_weight train.seed '
    'decode.length_penalty '
    'evaluate.examples_while_training evaluate.samples'
).split()
BELOW_ONE = (  # and not negative
    'model.dropout_rate model.attention_dropout_rate model.activation_dropout_rate model.head_dropout_rate '
    'data.mask_rate data.delete_rate data.infill_rate data.train_share '
    'optimizer.beta1 optimizer.beta2 optimizer.momentum optimizer.decay_fraction optimizer.ema_decay '
    'train.label_smoothing'
).split()
COUNTED = 'train.seed train.num_steps optimizer.warmup_steps'.split()  # programs count in 32 bits
AT_MOST_ONE = 'decode.top_p optimizer.layer_decay'.split()


def check_ranges(config: Config) -> None:
    """Raises a `UserError` of one line where a field is out of range, in a part of a mixture too."""

    def check_each(names: list[str], in_range: Callable[[float], bool], words: str) -> None:
        for name in names:
            section, field = name.split('.')
            values = {name: getattr(getattr(config, section), field)}
            if section == 'data' and config.data.mixture:
                values |= {f'data.mixture[{i}]: {field}': getattr(part, field) for i, part in enumerate(mixed)}
            for where, value in values.items():
                if value is not None and not in_range(value):
                    raise UserError(f'{where}={value} must {words}')

    mixed = parts(config.data)

    check_each(POSITIVE, lambda value: 0 < value < math.inf, 'be positive')
    check_each(NOT_NEGATIVE, lambda value: 0 <= value < math.inf, 'not be negative')
    check_each(BELOW_ONE, lambda value: 0 <= value < 1, 'be in [0, 1)')
    check_each(AT_MOST_ONE, lambda value: value <= 1, 'be at most 1')
    check_each(['data.mean_span_length'], lambda value: value >= 1, 'be at least 1')
    check_each(['data.modulus'], lambda value: value >= 2, 'be at least 2')
    check_each(COUNTED, lambda value: value < 2**31, f'be below {2**31:,}')
