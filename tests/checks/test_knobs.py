"""No dead knobs: every field of the model's configuration changes the program, or the parameters, where it applies.

Programs are compared as the text of their jaxpr, constants included: initialisation, and the gradient of the loss with
dropout. Nothing is compiled.
"""

import dataclasses

import pytest

from knobs import (
    BOTH,
    DECODER,
    ENCODER,
    EXPERTS,
    FURTHER,
    KNOBS,
    LEARNED,
    LONG,
    RECURRENT,
    ROPE,
    SCALED,
    changed,
    decoder,
    trace,
)
from tformer import checks
from tformer.checks.model_fields import rules
from tformer.config import Config, Data, Decode, Model, Train
from tformer.errors import UserError
from tformer.layers.kernel_choice import KERNELS


def test_the_table_of_knobs_is_the_fields_of_the_model():
    assert list(KNOBS) == [field.name for field in dataclasses.fields(Model)]


@pytest.mark.slow
@pytest.mark.parametrize('field', KNOBS)
def test_every_field_changes_the_program_or_the_parameters(field):
    objective, cfg, value = KNOBS[field]
    assert getattr(cfg, field) != value
    assert trace(objective, changed(field, cfg, value)) != trace(objective, cfg)


@pytest.mark.slow
@pytest.mark.parametrize('field, objective, cfg, value', FURTHER)
def test_a_field_changes_the_program_wherever_it_applies(field, objective, cfg, value):
    checks.check_here(run_of(objective, changed(field, cfg, value)))
    assert trace(objective, changed(field, cfg, value)) != trace(objective, cfg)


@pytest.mark.slow
@pytest.mark.parametrize('objective, cfg', [('causal_lm', DECODER), ('masked_lm', ENCODER), ('seq2seq', BOTH)])
def test_the_same_configuration_gives_the_same_program(objective, cfg):
    assert trace.__wrapped__(objective, cfg) == trace(objective, cfg)


@pytest.mark.slow
@pytest.mark.parametrize('field', [name for name in checks.TABLES if name.startswith('model.')])
def test_every_key_of_a_table_is_a_program_of_its_own(field):
    name, keys = field.removeprefix('model.'), dict.fromkeys(checks.TABLES[field])
    objective, cfg, _ = KNOBS[name]
    if name == 'tied_embeddings':
        objective, cfg = 'seq2seq', dataclasses.replace(BOTH, encoder_vocab_size=11)
    if name == 'attention_kernel':  # flash and cudnn don't trace on every machine, and auto is one of the others
        keys = [key for key in keys if key in KERNELS and not KERNELS[key].platforms]
        keys.remove('blocked')  # in rows of one block it is the reference
    if name == 'rope_scaling':
        keys = [key for key in keys if key is not None]
        cfg = dataclasses.replace(LONG, rope_factor=2.0)
    if name in ('initializer', 'attention_scale', 'transform_activation'):  # None stands for another key
        keys.pop(None)
    if name in ('attention_bias', 'attention_pattern', 'lora_targets'):
        keys = [(key,) for key in keys]
    if name == 'family':
        return
    traces = [trace(objective, changed(name, cfg, key)) for key in keys]
    assert all(a != b for i, a in enumerate(traces) for b in traces[:i])


def run_of(objective, cfg):
    return Config(
        model=cfg, data=Data(length=8), train=Train(objective=objective, num_steps=1), decode=Decode(max_len=8)
    )


@pytest.mark.parametrize('field', KNOBS)
def test_a_field_is_taken_where_it_applies(field):
    objective, cfg, value = KNOBS[field]
    if field != 'family':
        checks.check_here(run_of(objective, changed(field, cfg, value)))


# Where each field does not apply, and what the line must name.
ELSEWHERE = {
    'bidirectional': (RECURRENT, 'model.family is encoder or encoder_decoder'),
    'recurrent_attention': (RECURRENT, 'model.family is encoder_decoder'),
    'encoder_vocab_size': (DECODER, 'encoder_decoder'),
    'num_encoder_layers': (DECODER, 'encoder or encoder_decoder'),
    'num_decoder_layers': (ENCODER, 'decoder or encoder_decoder'),
    'num_kv_heads': (decoder(attention_projections=False), 'model.attention_projections is True'),
    'head_dim': (decoder(attention_projections=False), 'model.attention_projections is True'),
    'value_dim': (decoder(attention_projections=False), 'model.attention_projections is True'),
    'query_latent_dim': (ROPE, 'model.kv_latent_dim is set'),
    'rotary_dim': (ROPE, 'model.kv_latent_dim is set'),
    'attention_bias': (decoder(attention_projections=False), 'model.attention_projections is True'),
    'embedding_norm': (decoder(norm=None), 'model.norm is not None'),
    'num_token_types': (DECODER, 'model.family is encoder'),
    'position_offset': (ROPE, 'model.position is learned'),
    'rope_theta': (DECODER, 'model.position is rope'),
    'rope_fraction': (LEARNED, 'model.position is rope'),
    'rope_scaling': (DECODER, 'model.position is rope'),
    'rope_factor': (ROPE, 'linear or llama3 or yarn or dynamic'),
    'rope_trained_len': (SCALED, 'llama3 or yarn or dynamic or longrope'),
    'rope_fast_turns': (SCALED, 'model.rope_scaling is yarn'),
    'rope_slow_turns': (SCALED, 'model.rope_scaling is yarn'),
    'rope_round_ramp': (SCALED, 'model.rope_scaling is yarn'),
    'rope_attention_factor': (SCALED, 'yarn or longrope'),
    'rope_short_factors': (SCALED, 'model.rope_scaling is longrope'),
    'rope_long_factors': (SCALED, 'model.rope_scaling is longrope'),
    'local_rope_theta': (ROPE, 'has a local layer'),
    'attention_scale_dim': (DECODER, 'model.attention_scale is sqrt_scale_dim'),
    'router_bias': (DECODER, 'model.num_experts is set'),
    'relative_buckets': (DECODER, 'model.position is relative'),
    'relative_max_distance': (ROPE, 'model.position is relative'),
    'relative_per_layer': (LEARNED, 'model.position is relative'),
    'cross_position': (ROPE, 'encoder_decoder'),
    'norm': (decoder(norm_placement='rezero'), 'model.norm_placement has norms: not rezero'),
    'norm_epsilon': (decoder(norm='dyt'), 'layernorm or rmsnorm or rmsnorm_offset or scalenorm'),
    'norm_epsilon_in_root': (decoder(norm=None), 'layernorm or rmsnorm or rmsnorm_offset or scalenorm'),
    'first_norm': (decoder(norm_placement='post'), 'model.norm_placement is pre or sandwich or parallel'),
    'norm_bias': (decoder(norm='rmsnorm'), 'model.norm is layernorm or batchnorm or dyt'),
    'task_transform': (dataclasses.replace(ENCODER, norm='batchnorm'), 'model.norm is not batchnorm'),
    'transform_activation': (ENCODER, 'model.mlm_transform or model.task_transform is True'),
    'transform_bias': (ENCODER, 'model.mlm_transform or model.task_transform is True'),
    'final_norm': (decoder(norm=None), 'model.norm is not None'),
    'window': (DECODER, 'has a local layer'),
    'experts_per_token': (DECODER, 'model.num_experts is set'),
    'expert_dispatch': (DECODER, 'model.num_experts is set'),
    'expert_capacity': (EXPERTS, 'model.expert_dispatch is capacity'),
    'balance_weight': (DECODER, 'model.num_experts is set'),
    'router_z_weight': (DECODER, 'model.num_experts is set'),
    'generator_fraction': (BOTH, 'model.family is encoder'),
    'lora_alpha': (DECODER, 'model.lora_rank is set'),
    'lora_targets': (DECODER, 'model.lora_rank is set'),
    'base_emb_dim': (DECODER, 'model.parametrization is mup'),
}


def test_the_fields_that_do_not_apply_everywhere_are_those_below():
    assert set(ELSEWHERE) == set(rules())


@pytest.mark.parametrize('field', ELSEWHERE)
def test_a_field_that_does_not_apply_is_refused_in_a_line_that_says_where_it_does(field):
    cfg, words = ELSEWHERE[field]
    value = True if field == 'final_norm' else KNOBS[field][2]
    objective = {'decoder': 'causal_lm', 'encoder': 'masked_lm', 'encoder_decoder': 'seq2seq'}[cfg.family]
    checks.check_here(run_of(objective, cfg))
    with pytest.raises(UserError) as error:
        checks.check_here(run_of(objective, dataclasses.replace(cfg, **{field: value})))
    line = str(error.value)
    assert '\n' not in line and f'model.{field}=' in line and words in line
