"""Options of config.json that are seldom changed: the hub's own numbers, or a line that names the option."""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest

import make_hf_reference as references
from hub_parity import TOLERANCE, check_exported, compare
from tformer import hf
from tformer.errors import UserError

TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))
NEAR = {'rope_type': 'default', 'rope_theta': 50.0}
WIDE = {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 900.0}
LONG = {'rope_type': 'longrope', 'rope_theta': 100.0, 'short_factor': [1.5] * 4, 'long_factor': [2.5, 3.0, 4.0, 5.0]}
TURNS = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 4.0, 'original_max_position_embeddings': 64}
STRETCHED = {'rope_type': 'yarn', 'rope_theta': 300.0, 'factor': 4.0, 'original_max_position_embeddings': 6}
REWRITTEN = ('rope_parameters', 'head_dim')  # by the hub's library
FULL, SLIDING = 'full_attention', 'sliding_attention'

EQUAL: list[tuple[str, dict[str, Any]]] = [
    ('bert', {'hidden_act': 'relu', 'type_vocab_size': 5}),
    ('roberta', {'hidden_act': 'relu', 'type_vocab_size': 2}),  # the head's activation is gelu all the same
    ('roberta', {'pad_token_id': 3}),
    ('electra', {'hidden_act': 'silu', 'embedding_size': 8}),
    ('mpnet', {'hidden_act': 'silu', 'layer_norm_eps': 0.1}),
    ('modernbert', {'norm_bias': True, 'attention_bias': True, 'mlp_bias': True, 'classifier_bias': True}),
    ('modernbert', {'decoder_bias': False, 'tie_word_embeddings': False, 'classifier_activation': 'silu'}),
    ('modernbert', {'local_attention': 7, 'layer_types': [SLIDING, SLIDING, FULL, SLIDING]}),
    ('modernbert', {'layer_types': [FULL] * 4, 'hidden_activation': 'relu'}),
    ('modernbert', {'local_attention': 1}),
    ('modernbert', {'rope_parameters': {FULL: WIDE, SLIDING: NEAR}}),
    ('gpt2', {'n_inner': 5, 'activation_function': 'relu'}),
    ('gpt_neox', {'use_parallel_residual': False, 'attention_bias': False}),
    ('t5', {'num_decoder_layers': 1, 'relative_attention_num_buckets': 6, 'd_kv': 3}),
    ('m2m_100', {'scale_embedding': False, 'pad_token_id': 3}),
    ('llama', {'num_key_value_heads': 1, 'head_dim': None, 'hidden_act': 'gelu_new'}),
    ('llama', {'rope_parameters': {**LONG, 'original_max_position_embeddings': 6}}),
    ('mistral', {'sliding_window': 1}),
    ('gemma2', {'layer_types': [FULL] * 3}),
    ('qwen3', {'attention_bias': True, 'layer_types': [SLIDING, FULL, FULL], 'sliding_window': 3,
               'use_sliding_window': True}),
    ('olmo2', {'attention_bias': True, 'tie_word_embeddings': True}),
    ('phi3', {'sliding_window': None, 'original_max_position_embeddings': 16}),
    ('gemma2', {'attn_logit_softcapping': None, 'query_pre_attn_scalar': 3, 'layer_types': [SLIDING] * 3}),
    ('gemma3', {'layer_types': [FULL] * 3, 'attention_bias': True, 'tie_word_embeddings': False}),
    ('mixtral', {'num_experts_per_tok': 3, 'sliding_window': 3}),
    ('gpt_oss', {'num_experts_per_tok': 3, 'attention_bias': False, 'layer_types': [FULL] * 3}),
    ('deepseek_v2', {'q_lora_rank': 3, 'mlp_bias': True, 'tie_word_embeddings': True}),
    ('deepseek_v2', {'rope_parameters': {**STRETCHED, 'mscale': 0.707, 'mscale_all_dim': 0.707}}),
    ('deepseek_v3', {'q_lora_rank': None, 'rope_parameters': {**STRETCHED, 'mscale_all_dim': 1.0}}),
    ('deepseek_v3', {'rope_parameters': {**STRETCHED, 'mscale': 2.0}}),
    ('deepseek_v3', {'rope_parameters': {**STRETCHED, 'attention_factor': 1.3, 'mscale_all_dim': 0.5}}),
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize(('name', 'options'), EQUAL)
def test_an_option_has_the_hubs_numbers_and_is_written_back(name: str, options: dict[str, Any]) -> None:
    reference = references.make(name, width=16, seed=1, options=options)
    assert all(reference.config.get(key) == value for key, value in options.items() if key not in REWRITTEN)
    assert max(compare(reference).values()) < TOLERANCE
    check_exported(reference)
    np.testing.assert_allclose(of_the_written(name, reference), reference.outputs['logits'][real(reference)], atol=1e-5)


def real(reference: references.Reference) -> np.ndarray:
    return reference.batch['positions'] >= 0


def of_the_written(name: str, reference: references.Reference) -> np.ndarray:
    """Returns what the hub's library computes of the config.json and the tensors that are written here."""
    cfg, family = hf.model_of(reference.config, lambda line: None), reference.config['model_type']
    tensors = hf.export_params(family, hf.import_params(family, reference.tensors, cfg), cfg)
    ids = {key: value for key, value in reference.config.items() if key.endswith('_token_id')}
    return references.read(name, {**ids, **hf.config_of(family, cfg)}, tensors, seed=1)[real(reference)]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ('bert', {'tie_word_embeddings': False}),
    ('distilbert', {'sinusoidal_pos_embds': True}),
    ('albert', {'inner_group_num': 2}),
    ('gpt2', {'scale_attn_weights': False}),
    ('mt5', {'scale_decoder_outputs': True}),
    ('bart', {'encoder_ffn_dim': 5}),
    ('marian', {'share_encoder_decoder_embeddings': False}),
    ('llama', {'rope_parameters': {**TURNS, 'low_freq_factor': 1.0, 'high_freq_factor': 2.0}}),
    ('llama', {'attention_multiplier': 2.0}),  # Granite's
    ('llama', {'logits_scaling': 2.0}),
    ('mistral', {'layer_types': [SLIDING, FULL, FULL]}),
    ('qwen3', {'is_causal': False}),  # the library's masks see what follows
    ('bart', {'is_causal': False}),
    ('olmo2', {'clip_qkv': 0.5}),
    ('gemma', {'hidden_activation': 'relu'}),
    ('gemma2', {'use_bidirectional_attention': True}),
    ('mixtral', {'norm_topk_prob': True}),
    ('modernbert', {'rope_parameters': {FULL: NEAR, SLIDING: WIDE}}),
    ('modernbert', {'rope_scaling': WIDE}),
    ('gemma3', {'rope_parameters': {FULL: {**STRETCHED, 'truncate': False}, SLIDING: NEAR}}),
    ('gemma3', {'rope_parameters': {FULL: 5}}),
    ('phi3', {'rope_parameters': WIDE}),
    ('llama', {'rope_parameters': {**LONG, 'rope_type': 'su'}}),
    ('deepseek_v2', {'rms_norm_eps': 1e-5}),
    ('deepseek_v2', {'attention_bias': True}),
    ('deepseek_v3', {'rope_interleave': False}),
]


@pytest.mark.parametrize(('name', 'options'), REFUSED)
def test_an_option_without_a_counterpart_is_refused_by_its_name(name: str, options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(UserError) as error:
        hf.model_of({**references.load(name).config, **options})
    inside = ('high_freq_factor', 'sliding_attention', 'truncate', 'full_attention', 'rope_type')
    names = inside if option == 'rope_parameters' else (option,)
    assert any(name in str(error.value) for name in names) and '\n' not in str(error.value)


def test_yarns_two_scales_of_the_scores_are_a_ratio():
    """DeepSeek's: a scale m is 0.1 m ln 4 + 1, of 1 and 0.5 at a stretch of 4 thus 1.138629 and 1.069315."""
    file = references.load('yarn').config
    for scales, factor in (((1.0, 0.5), 1.064822), ((0.707, 0.707), 1.0)):
        rope = {**file['rope_parameters'], **dict(zip(('mscale', 'mscale_all_dim'), scales, strict=True))}
        assert hf.model_of({**file, 'rope_parameters': rope}).rope_attention_factor == pytest.approx(factor, abs=1e-6)
    assert hf.model_of(file).rope_attention_factor is None


def test_a_model_without_latents_is_no_deepseek():
    cfg = hf.model_of(references.load('yarn').config)
    other = dataclasses.replace(cfg, attention_scale='sqrt_scale_dim', attention_scale_dim=5.0)
    for model in (cfg, other):
        with pytest.raises(UserError, match=r'^deepseek_v3: model\.kv_latent_dim=None has no counterpart$'):
            hf.config_of('deepseek_v3', model)


def test_a_stretch_of_longrope_that_differs_from_the_lengths_decides_the_scores():
    """sqrt(1 + ln s / ln 64), at a stretch s of 4 sqrt(4 / 3); one of 128 over 64 positions is what we take anyway."""
    file = {**references.load('llama').config, 'max_position_embeddings': 128}
    for stretch, factor in ((4.0, (4 / 3) ** 0.5), (0.5, 1.0), (2.0, None)):
        rope = {**LONG, 'original_max_position_embeddings': 64, 'factor': stretch}
        found = hf.model_of({**file, 'rope_parameters': rope}).rope_attention_factor
        assert found == (factor if factor is None else pytest.approx(factor, abs=1e-6))


def test_what_rotary_parameters_leave_out_is_as_in_the_hubs_library():
    """Yarn rounds the ends of its ramp; dynamic scaling goes on for as many times the length as its factor says."""
    yarn, dynamic = (references.load(name).config for name in ('yarn', 'dynamic'))
    rope = dict(yarn['rope_parameters'])
    assert (rope.pop('truncate'), rope.pop('beta_fast'), rope.pop('beta_slow')) == (False, 5.0, 0.5)
    found = hf.model_of({**yarn, 'rope_parameters': rope})
    assert (found.rope_round_ramp, found.rope_fast_turns, found.rope_slow_turns) == (True, 32.0, 1.0)
    rope = {**dynamic['rope_parameters'], 'factor': 2.5}
    found = hf.model_of({**dynamic, 'rope_parameters': rope, 'max_position_embeddings': 20})
    assert (found.rope_trained_len, found.max_len, found.rope_factor) == (20, 50, 2.5)


def test_earlier_files_have_their_stretch_beside_the_base_or_by_another_name():
    """Gemma 3's rope_scaling adds to what rope_parameters says of full layers; Phi-3 calls longrope su or yarn, and
    counts from 4,096 tokens where its file does not say from where."""
    file = references.load('gemma3').config
    rope = {FULL: {'rope_type': 'default', 'rope_theta': 900.0}, SLIDING: NEAR}
    found = hf.model_of({**file, 'rope_parameters': rope, 'rope_scaling': {'rope_type': 'linear', 'factor': 3.0}})
    assert (found.rope_theta, found.rope_scaling, found.rope_factor) == (900.0, 'linear', 3.0)
    file = references.load('phi3').config
    for name in ('longrope', 'su', 'yarn'):
        assert hf.model_of({**file, 'rope_parameters': {**file['rope_parameters'], 'rope_type': name}}) == hf.model_of(
            file
        )
    rope = {name: value for name, value in file['rope_parameters'].items() if not name.startswith('original')}
    silent = {name: value for name, value in file.items() if not name.startswith('original')}
    assert hf.model_of({**silent, 'rope_parameters': rope}).rope_trained_len == 4096


def test_a_share_of_a_head_may_stand_in_two_places_of_a_file_and_must_be_one():
    """The hub's library adds that of an earlier file to rope_parameters, and keeps it beside them when it writes."""
    for name, field in (('phi3', 'partial_rotary_factor'), ('gpt_neox', 'rotary_pct')):
        file = references.load(name).config
        assert file['rope_parameters']['partial_rotary_factor'] == 0.5
        assert hf.model_of({**file, field: 0.5}) == hf.model_of({**file, field: None}) == hf.model_of(file)
        with pytest.raises(UserError, match=rf'{field}=1\.0 is another in rope_parameters; valid: 0\.5$'):
            hf.model_of({**file, field: 1.0})


def test_empty_rotary_parameters_are_not_those_of_a_file_without_any():
    file = {**references.load('gpt_oss').config, 'rope_parameters': None}
    scalings = [hf.model_of({**file, **fields}).rope_scaling for fields in ({}, {'rope_parameters': {}})]
    assert scalings == ['yarn', None]


def test_a_null_that_rounds_no_ramp_is_no_default():
    """The hub's library reads `truncate` with a default where it is missing, and null as false."""
    file = references.load('yarn').config
    assert not hf.model_of({**file, 'rope_parameters': {**file['rope_parameters'], 'truncate': None}}).rope_round_ramp


def test_the_weight_of_the_routers_loss_is_of_a_layer_and_of_a_choice():
    """The hub adds up the 2 choices of a token and averages over the 3 layers: 0.09 there is 0.06 here, and back."""
    file = references.load('mixtral').config
    assert (file['num_experts_per_tok'], file['num_hidden_layers']) == (2, 3)
    model = hf.model_of({**file, 'router_aux_loss_coef': 0.09})
    assert model.balance_weight == pytest.approx(0.06)
    assert hf.config_of('mixtral', model)['router_aux_loss_coef'] == pytest.approx(0.09)
