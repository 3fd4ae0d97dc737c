"""The ranges of single fields. None, where a field takes it, is always in range."""

import math
from collections.abc import Callable

from tformer.config import AXES, Config, parts
from tformer.errors import UserError

POSITIVE = (
    'model.vocab_size model.encoder_vocab_size model.emb_dim model.mlp_dim model.num_encoder_layers '
    'model.num_decoder_layers model.num_heads model.num_kv_heads model.head_dim model.value_dim model.max_len '
    'model.kv_latent_dim model.query_latent_dim model.rotary_dim '
    'model.embedding_factor_dim model.num_token_types model.rope_theta model.rope_fraction '
    'model.rope_fast_turns model.rope_slow_turns model.rope_attention_factor model.local_rope_theta '
    'model.attention_scale_dim '
    'model.rope_trained_len model.relative_buckets model.relative_max_distance model.norm_epsilon model.window '
    'model.attention_softcap model.output_softcap model.num_experts model.experts_per_token '
    'model.expert_capacity model.base_emb_dim model.lora_rank model.lora_alpha model.num_classes '
    'model.init_scale model.generator_fraction model.similarity_temperature '
    'data.tokenizer_vocab_size data.num_buckets data.batch_tokens data.prefetch data.num_threads data.mask_rate '
    'data.delete_rate data.infill_rate data.weight data.mixture_temperature data.row_multiple '
    'data.question_length data.stride data.mask_copies data.train_examples data.train_share '
    'optimizer.learning_rate optimizer.epsilon optimizer.clip_norm optimizer.clip_value optimizer.layer_decay '
    'optimizer.decay_fraction '
    'train.num_steps train.num_epochs train.batch_size train.microbatches train.log_every train.eval_every '
    'train.eval_batches train.checkpoint_every train.keep_last train.keep_every train.patience '
    'train.max_skipped train.skip_spikes train.max_minutes train.loss_chunk train.distillation_temperature '
    'train.preference_beta '
    'mesh.microbatches mesh.pipeline_repeats '
    'decode.max_len decode.num_outputs decode.candidates decode.beam_size decode.beam_groups decode.draft_len '
    'decode.batch_size decode.prefill_chunk decode.temperature decode.top_k decode.top_p decode.min_p decode.typical_p '
    'decode.epsilon_cutoff decode.eta_cutoff '
    'decode.repetition_penalty decode.no_repeat_ngram '
    'evaluate.answer_length evaluate.max_examples'
).split()
NOT_NEGATIVE = (
    'model.position_offset model.balance_weight model.router_z_weight '
    'data.num_workers data.sentinels data.mask_keep data.mask_random data.fim_rate data.spm_rate '
    'optimizer.warmup_steps optimizer.frozen_layers optimizer.final_fraction optimizer.weight_decay '
    'train.z_loss train.second_loss_weight train.distillation_weight train.seed '
    'decode.length_penalty decode.length_offset decode.diversity_penalty decode.coverage_penalty '
    'decode.guidance decode.min_len '
    'evaluate.examples_while_training evaluate.samples'
).split()
BELOW_ONE = (  # and not negative
    'model.dropout_rate model.attention_dropout_rate model.activation_dropout_rate model.head_dropout_rate '
    'data.mask_rate data.delete_rate data.infill_rate data.train_share '
    'optimizer.beta1 optimizer.beta2 optimizer.momentum optimizer.decay_fraction optimizer.ema_decay '
    'train.label_smoothing'
).split()

# The largest values. Sizes have limits beyond any model, corpus or machine, so that a slip is refused at once.
AT_MOST: dict[int, list[str]] = {
    1: (
        'decode.top_p decode.min_p decode.typical_p decode.epsilon_cutoff decode.eta_cutoff '
        'optimizer.layer_decay optimizer.final_fraction model.rope_fraction train.distillation_weight '
        'data.fim_rate data.spm_rate'
    ).split(),
    2**8: 'data.num_threads data.num_workers decode.draft_len'.split(),
    2**10: (
        'model.num_encoder_layers model.num_decoder_layers data.prefetch decode.num_outputs decode.beam_size '
        'decode.candidates'
    ).split(),
    2**11: 'data.modulus data.train_lengths data.test_lengths'.split(),
    2**16: [f'mesh.{axis}' for axis in AXES],
    2**20: (
        'model.emb_dim model.mlp_dim model.num_heads model.num_kv_heads model.head_dim model.value_dim '
        'model.kv_latent_dim model.query_latent_dim model.rotary_dim '
        'model.embedding_factor_dim model.num_token_types model.relative_buckets model.num_experts '
        'model.base_emb_dim model.lora_rank model.num_classes '
        'data.sentinels data.tokenizer_vocab_size data.num_buckets data.row_multiple '
        'train.batch_size mesh.microbatches mesh.pipeline_repeats decode.batch_size'
    ).split(),
    2**24: (
        'model.vocab_size model.encoder_vocab_size model.max_len model.position_offset '
        'data.length data.encoder_length data.question_length data.stride decode.max_len decode.min_len '
        'decode.no_repeat_ngram decode.prefill_chunk evaluate.answer_length'
    ).split(),
    2**31 - 1: 'train.num_epochs data.mean_span_length'.split(),  # and every whole number: programs count in 32 bits
}

RULES: list[tuple[list[str], Callable[[float], bool], str]] = [
    (POSITIVE, lambda value: value > 0, 'be positive'),
    (NOT_NEGATIVE, lambda value: value >= 0, 'not be negative'),
    (BELOW_ONE, lambda value: 0 <= value < 1, 'be in [0, 1)'),
    (['data.mean_span_length'], lambda value: value >= 1, 'be at least 1'),
    (
        ['optimizer.warmup_steps', 'train.eval_every'],
        lambda value: isinstance(value, int) or value < 1,
        'be a whole number of steps, or a share of the run below 1',
    ),
    (['data.modulus'], lambda value: value >= 2, 'be at least 2'),
]
LIMITS = {name: limit for limit, names in AT_MOST.items() for name in names}


def check_ranges(config: Config) -> None:
    """Raises a `UserError` of one line where a field is out of range, in a part of a mixture too."""
    sections = [(name, f'{name}.', vars(section)) for name, section in vars(config).items() if name != 'extensions']
    if config.data.mixture:
        sections += [('data', f'data.mixture[{i}]: ', vars(part)) for i, part in enumerate(parts(config.data))]
    for section, place, values in sections:
        for field, value in values.items():
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) in (int, float):
                    _check(f'{section}.{field}', f'{place}{field}={value}', number)


def _check(name: str, where: str, number: float) -> None:
    for names, in_range, words in RULES:
        if name in names and not in_range(number):
            raise UserError(f'{where} must {words}')
    if not math.isfinite(number):
        raise UserError(f'{where} must be finite')
    limit = LIMITS.get(name, 2**31 - 1 if isinstance(number, int) else math.inf)
    if number > limit:
        raise UserError(f'{where} must be at most {limit:,}')
