"""Whole models against a transformer in numpy, written from the papers: logits, and the map of every head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import plain_transformer
from tformer.checks import TABLES
from tformer.config import Model
from tformer.evaluation import activations
from tformer.layers.resolved import resolve_model
from tformer.model import build

B, T, S, V = 2, 6, 5, 9
SIZES = {'vocab_size': V, 'emb_dim': 8, 'mlp_dim': 6, 'num_heads': 4, 'max_len': 16}
LAYERS = {'num_encoder_layers': 2, 'num_decoder_layers': 3}
ALL = ('query', 'key', 'value', 'out')

CASES = {  # every entry of a table that acts on the function of a model stands in one of them
    'decoder, packed: part of a head rotates by llama3 frequencies, after a norm; windows, a trained sink': {
        'family': 'decoder',
        'position': 'rope',
        'head_dim': 8,
        'rope_fraction': 0.5,
        'rope_theta': 100.0,
        'rope_scaling': 'llama3',
        'rope_factor': 4.0,
        'rope_trained_len': 32,
        'qk_norm': 'rmsnorm',
        'num_kv_heads': 2,
        'attention_pattern': ('local', 'global'),
        'window': 2,
        'attention_sink': 'learned',
        'activation': 'swiglu',
        'norm': 'rmsnorm',
        'attention_softcap': 1.5,
        'tied_embeddings': 'inputs',
        'output_softcap': 3.0,
        'output_bias': True,
        'embedding_scale': None,
        'mlp_bias': False,
    },
    'encoder: other angles in local layers, no first norm, no biases; an activation before the vocabulary': {
        'family': 'encoder',
        'position': 'rope',
        'local_rope_theta': 20.0,
        'attention_pattern': ('global', 'local'),
        'window': 3,
        'embedding_norm': True,
        'first_norm': False,
        'norm_bias': False,
        'mlp_bias': False,
        'activation': 'geglu',
        'mlm_transform': True,
        'transform_activation': 'silu',
        'transform_bias': False,
    },
    'encoder: BERT with learned and relative positions, a factorised table and types of tokens': {
        'family': 'encoder',
        'position': 'learned_relative',
        'position_offset': 2,
        'relative_buckets': 6,
        'relative_max_distance': 5,
        'norm_placement': 'post',
        'norm_epsilon': 0.3,
        'norm_epsilon_in_root': False,
        'activation': 'gelu',
        'num_token_types': 2,
        'mlm_transform': True,
        'output_bias': True,
        'embedding_norm': True,
        'embedding_factor_dim': 4,
        'attention_bias': ALL,
    },
    'encoder-decoder: ALiBi, also across': {
        'family': 'encoder_decoder',
        'position': 'alibi',
        'cross_position': True,
        'norm': 'scalenorm',
        'norm_placement': 'sandwich',
        'activation': 'reglu',
        'tied_embeddings': 'inputs',
        'norm_epsilon': 0.3,
        'output_scale': 'rsqrt_dim',
        'attention_softcap': 1.0,
    },
    'encoder-decoder: rotary, linearly scaled, also across; DeepNorm': {
        'family': 'encoder_decoder',
        'position': 'rope',
        'rope_scaling': 'linear',
        'rope_factor': 3.0,
        'cross_position': True,
        'norm_placement': 'deepnorm',
        'activation': 'relu_squared',
        'qk_norm': 'layernorm',
        'attention_scale': 'unscaled',
        'tied_embeddings': None,
        'head_dim': 4,
        'norm_epsilon': 0.3,
    },
    'encoder-decoder, packed: relative positions of each side, not across; a table of the output': {
        'family': 'encoder_decoder',
        'position': 'relative',
        'relative_buckets': 4,
        'relative_max_distance': 4,
        'tied_embeddings': 'output',
        'output_scale': 'rsqrt_dim',
        'activation': 'gelu_tanh',
        'num_kv_heads': 1,
    },
    'encoder-decoder: rotary, not across, no projections; norms whose scale is 1 more': {
        'family': 'encoder_decoder',
        'position': 'rope',
        'attention_projections': False,
        'norm': 'rmsnorm_offset',
        'qk_norm': 'rmsnorm_offset',
        'num_encoder_layers': 1,
        'num_decoder_layers': 1,
    },
    'decoder: YaRN in every other layer, another base in the others; norms behind sub-layers, joint ones of heads': {
        'family': 'decoder',
        'position': 'rope',
        'head_dim': 12,
        'num_kv_heads': 2,
        'rope_theta': 200.0,
        'rope_scaling': 'yarn',
        'rope_factor': 3.0,
        'rope_trained_len': 64,
        'rope_fast_turns': 8.0,
        'rope_slow_turns': 2.0,
        'local_rope_theta': 20.0,
        'attention_pattern': ('local', 'global'),
        'window': 4,
        'norm': 'rmsnorm',
        'norm_placement': 'res_post',
        'qk_norm': 'rmsnorm_joint',
        'attention_scale': 'sqrt_scale_dim',
        'attention_scale_dim': 3.0,
    },
    'decoder: dynamic rotary scaling beyond the trained length': {
        'family': 'decoder',
        'position': 'rope',
        'head_dim': 6,
        'rope_theta': 100.0,
        'rope_scaling': 'dynamic',
        'rope_factor': 2.0,
        'rope_trained_len': 4,
        'norm_placement': 'parallel_norms',
    },
    'decoder: LongRoPE beyond the trained length': {
        'family': 'decoder',
        'position': 'rope',
        'head_dim': 4,
        'rope_scaling': 'longrope',
        'rope_short_factors': (1.0, 2.0),
        'rope_long_factors': (3.0, 5.0),
        'rope_trained_len': 4,
        'num_experts': 3,
        'router_bias': True,
        'activation': 'swiglu_clamped',
    },
    'encoder: the timing signal of the code of the paper': {
        'family': 'encoder',
        'position': 'timing_signal',
        'position_offset': 2,
    },
    'decoder: universal, with ReZero': {
        'family': 'decoder',
        'layer_sharing': 'universal',
        'norm_placement': 'rezero',
        'activation': 'geglu_tanh',
        'head_dim': 3,
        'value_dim': 5,
        'attention_scale': 'sqrt_emb_dim',
        'attention_sink': 'zero',
    },
    'decoder with a prefix: muP, learned positions behind an offset, parallel parts': {
        'family': 'decoder',
        'position': 'learned',
        'position_offset': 2,
        'norm_placement': 'parallel',
        'norm': 'dyt',
        'activation': 'glu',
        'parametrization': 'mup',
        'base_emb_dim': 4,
        'tied_embeddings': None,
        'output_scale': 'rsqrt_dim',
    },
    'decoder: experts, muP': {
        'family': 'decoder',
        'num_experts': 4,
        'experts_per_token': 2,
        'activation': 'silu',
        'position': None,
        'parametrization': 'mup',
        'base_emb_dim': 2,
        'attention_scale': 'sqrt_head_dim',
    },
    'encoder: one block for all layers, no projections': {
        'family': 'encoder',
        'layer_sharing': 'all',
        'attention_projections': False,
        'activation': 'geglu',
        'position': 'sinusoidal',
        'norm': None,
        'embedding_scale': None,
        'attention_softcap': 4.0,
    },
    'encoder: a table of relative positions in each layer, no residual': {
        'family': 'encoder',
        'norm_placement': 'no_residual',
        'position': 'relative',
        'relative_per_layer': True,
        'relative_buckets': 8,
        'relative_max_distance': 8,
        'activation': 'relu',
        'attention_scale': 'head_dim',
        'num_kv_heads': 2,
    },
}


def random_parameters(model, batch):
    """Every parameter is drawn, those that begin at 0 or 1 too."""
    rng = np.random.default_rng(0)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), batch))['params']
    return jax.tree.map(lambda x: jnp.asarray(0.6 * rng.standard_normal(x.shape), jnp.float32), shapes)


def make_batch(case, cfg):
    """Rows of unequal lengths, padded in front or behind, at positions that need not count from 0."""
    rng = np.random.default_rng(1)
    batch = {
        'inputs': rng.integers(0, V, (B, T)),
        'positions': np.array([[0, 1, 2, 3, 4, 5], [-1, 3, 4, 5, 6, 9]]),
    }
    if cfg.family == 'encoder_decoder':
        batch |= {'encoder_inputs': rng.integers(0, V, (B, S))}
        batch |= {'encoder_positions': np.array([[0, 1, 2, 3, 4], [0, 2, 3, -1, -1]])}
    if 'packed' in case:
        batch['positions'] = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, -1]])
        batch['segment_ids'] = np.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 2, 2, 0]])
        if 'encoder_inputs' in batch:
            batch['encoder_positions'] = np.array([[0, 1, 2, 0, 1], [0, 1, 0, -1, -1]])
            batch['encoder_segment_ids'] = np.array([[1, 1, 1, 2, 2], [1, 1, 2, 0, 0]])
    if 'prefix' in case:
        batch['prefix'] = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]], bool)
    if cfg.num_token_types:
        batch['token_types'] = rng.integers(0, 2, (B, T))
    return {name: jnp.asarray(x, bool if x.dtype == bool else jnp.int32) for name, x in batch.items()}


def test_the_cases_have_every_entry_of_every_table():
    fields = (
        *('position', 'rope_scaling', 'norm', 'norm_placement', 'qk_norm', 'activation', 'attention_scale'),
        *('attention_sink', 'layer_sharing', 'embedding_scale', 'output_scale', 'tied_embeddings', 'parametrization'),
    )
    for field in fields:
        found = {case.get(field, getattr(Model(), field)) for case in CASES.values()}
        assert found | {'batchnorm'} == set(TABLES[f'model.{field}']) | {'batchnorm'}, field


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_logits_and_attention_maps_are_those_of_the_papers_formulas(case):
    cfg = resolve_model(Model(**{**SIZES, **LAYERS, **CASES[case]}))
    model, batch = build(cfg), make_batch(case, cfg)
    params = random_parameters(model, batch)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected, maps = plain_transformer.transformer(cfg, wide, jax.tree.map(np.asarray, batch))
    paths = {'encoder': 'encoder.stack.layers.attention', 'decoder': 'decoder.stack.layers.attention'}
    paths['cross'] = 'decoder.stack.layers.cross_attention'
    names = {kind: f'{paths[kind]}.probabilities' for kind in maps}
    forward = activations.Forward(model, '__call__')
    found = activations.activations(forward, {'params': params}, batch, ['output', *names.values()])
    real = np.asarray(batch['positions']) >= 0
    logits, expected = np.asarray(found['output'])[real], expected[real]
    np.testing.assert_allclose(logits / expected.std(), expected / expected.std(), atol=1e-3)
    for kind, name in names.items():
        side = 'encoder_positions' if kind == 'encoder' and 'encoder_inputs' in batch else 'positions'
        queries = np.asarray(batch[side]) >= 0
        L, B, K, G, T, S = found[name].shape
        probs, wanted = np.asarray(found[name]).reshape(L, B, K * G, T, S), maps[kind]
        probs, wanted = (np.moveaxis(x, 3, 1).swapaxes(1, 2)[:, queries] for x in (probs, wanted))
        np.testing.assert_allclose(probs, wanted, atol=1e-4)
        assert np.ptp(wanted, axis=2).max() > 0.02  # heads differ
