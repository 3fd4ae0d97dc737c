"""Weights of the hub give the hub's own numbers: against committed references, and against torch where it is there."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import make_hf_reference as references
from hub_parity import TOLERANCE, check_exported, compare, detection, model_of, our_outputs, run_of
from places import ROOT
from tformer import checks, config, hf
from tformer.config import OUTSIDE_THE_FUNCTION, Model
from tformer.distributed.sharding import unboxed
from tformer.errors import UserError
from tformer.layers import outputs
from tformer.layers.resolved import resolve_model
from tformer.model import build

ARCHITECTURES = ROOT / 'configs' / 'architectures'
CASES = sorted(file.stem for file in references.FOLDER.glob('*.npz'))
TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))


def families() -> dict[str, str]:
    return {name: references.load(name).config['model_type'] for name in CASES}


HEAD_NAMES = {'class': 'class', 'tags': 'tag', 'spans': 'span'}


@pytest.mark.stack
# ------------------------------------------------------------------------------------------------ the same numbers
@pytest.mark.parametrize('name', CASES)
@pytest.mark.proof_cases('albert', 'bart', 'mt5', 'm2m_100', 'yarn', 'mpnet', 'gemma2', 'mistral')
def test_hub_weights_give_the_committed_logits(name: str) -> None:
    differences = compare(references.load(name))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('name', references.CASES)
def test_hub_weights_give_the_logits_of_torch(name: str) -> None:
    """And what is exported again has the same tensors, by the same names."""
    reference = references.make(name, width=32, seed=1)
    differences = compare(reference)
    assert max(differences.values()) < TOLERANCE, differences
    check_exported(reference)


@pytest.mark.parametrize('name', CASES)
def test_exported_tensors_are_those_that_were_imported(name: str) -> None:
    check_exported(references.load(name))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_imported_parameters_are_those_that_the_model_initialises(name: str) -> None:
    reference = references.load(name)
    cfg = model_of(reference)
    params = hf.import_params(reference.config['model_type'], reference.tensors, cfg)
    batch = {key: jnp.asarray(value) for key, value in reference.batch.items()}

    def shapes(method: Any) -> dict:
        made = jax.eval_shape(lambda: build(cfg).init(jax.random.key(0), batch, method=method))['params']
        return flat(unboxed(made))

    of_parts = {'pooler': 'pool', 'sentence_head': outputs.unmask_pairs, 'head': '__call__'}
    of_parts |= {'detection_head': detection}
    of_parts |= {f'{stem}_head': outputs.HEADS[name].method for name, stem in HEAD_NAMES.items()}
    if any(part.startswith('class_') for part in params):
        del of_parts['head']  # which it has the transform of
    methods = ['features', *(method for part, method in of_parts.items() if part in params)]
    expected = {path: shape for method in methods for path, shape in shapes(method).items()}
    assert flat(params) == expected


def flat(params: dict) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape for path, leaf in leaves}


def test_a_number_is_read_where_the_caller_says_so_and_written_as_it_was() -> None:
    """A regression of the hub has the tensors of a classification into one class."""
    reference = references.load('distilbert_class')
    one = {key: value[:1] if key.startswith('classifier') else value for key, value in reference.tensors.items()}
    cfg = hf.model_of(reference.config)
    assert 'class_head' in hf.import_params('distilbert', one, cfg)
    params = hf.import_params('distilbert', one, cfg, head='number')
    assert 'class_head' not in params and params['number_head']['classes']['kernel'].shape == (16, 1)
    found = hf.export_params('distilbert', params, cfg)
    assert found.keys() == one.keys() and all(np.array_equal(found[key], one[key]) for key in one)


def test_the_scores_of_choices_are_those_of_a_class_of_each() -> None:
    """DistilBertForMultipleChoice is DistilBertForSequenceClassification with one class, of all choices."""
    reference = references.load('distilbert_class')
    one = {key: value[:1] if key.startswith('classifier') else value for key, value in reference.tensors.items()}
    cfg = hf.model_of(reference.config)
    params = hf.import_params('distilbert', one, cfg, head='choice')
    rows, length = reference.batch['inputs'].shape
    batch = {name: jnp.asarray(value).reshape(1, -1) for name, value in reference.batch.items()}
    batch |= {'segment_ids': jnp.repeat(jnp.arange(1, rows + 1), length)[None] * (batch['positions'] >= 0)}
    batch |= {'segment_weights': jnp.ones((1, rows))}
    found = build(cfg).apply({'params': params}, batch, method=outputs.choose_text)
    np.testing.assert_allclose(found[0], reference.outputs['class'][:, 0], atol=1e-4)
    again = hf.export_params('distilbert', params, cfg)
    assert again.keys() == one.keys() and all(np.array_equal(again[key], one[key]) for key in one)


def test_a_head_that_pools_otherwise_is_not_exported() -> None:
    reference = references.load('distilbert_class')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('distilbert', reference.tensors, cfg)
    for name, value in (('pooler_activation', 'tanh'), ('class_bias', False), ('pooling', 'mean')):
        needed = f'model.{name}={getattr(cfg, name)}'
        said = f'the head of the hub reads {needed}: one trained with --config.{needed} can be written'
        with pytest.raises(UserError, match=f'^distilbert: {re.escape(said)}$'):
            hf.export_params('distilbert', params, dataclasses.replace(cfg, **{name: value}))


def test_a_head_that_reads_otherwise_is_not_exported() -> None:
    reference = references.load('roberta_tags')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('roberta', reference.tensors, cfg)
    with pytest.raises(UserError, match=r'^roberta: the head of the hub reads model\.task_transform=False: '):
        hf.export_params('roberta', params, dataclasses.replace(cfg, task_transform=True))


def test_the_next_sentence_head_comes_along() -> None:
    """Its logits are the product of the pooled vector of torch with the checkpoint's own kernel."""
    reference = references.load('bert')
    cfg, tensors = hf.model_of(reference.config), reference.tensors
    batch = {name: jnp.asarray(value) for name, value in reference.batch.items()}
    params = hf.import_params('bert', tensors, cfg)
    _, found = build(cfg).apply({'params': params}, batch, method=outputs.unmask_pairs)
    kernel, bias = tensors['cls.seq_relationship.weight'], tensors['cls.seq_relationship.bias']
    np.testing.assert_allclose(found, reference.outputs['pooled'] @ kernel.T + bias, atol=1e-5)


# ------------------------------------------------------------------------------------------------ published sizes
LLAMA = {'hidden_size': 4096, 'num_hidden_layers': 32, 'num_attention_heads': 32, 'hidden_act': 'silu'}
LLAMA |= {'rms_norm_eps': 1e-5, 'tie_word_embeddings': False}
LLAMA3_ROPE = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'rope_type': 'llama3'}
LLAMA3_ROPE |= {'original_max_position_embeddings': 8192}
DEEPSEEK_ROPE = {'type': 'yarn', 'factor': 40, 'original_max_position_embeddings': 4096, 'mscale': 1.0}
DEEPSEEK_ROPE |= {'mscale_all_dim': 1.0, 'beta_fast': 32, 'beta_slow': 1}
BERT = {'hidden_size': 768, 'intermediate_size': 3072, 'num_hidden_layers': 12, 'num_attention_heads': 12}
BERT |= {'hidden_act': 'gelu', 'hidden_dropout_prob': 0.1, 'attention_probs_dropout_prob': 0.1}
T5 = {'model_type': 't5', 'vocab_size': 32_128, 'd_model': 768, 'd_kv': 64, 'num_layers': 12, 'num_heads': 12}
T5 |= {'relative_attention_num_buckets': 32, 'layer_norm_epsilon': 1e-6, 'dropout_rate': 0.1, 'n_positions': 512}

MODERNBERT = {'vocab_size': 50_368, 'hidden_size': 768, 'intermediate_size': 1152, 'num_hidden_layers': 22}
MODERNBERT |= {'num_attention_heads': 12, 'max_position_embeddings': 8192, 'hidden_activation': 'gelu'}
MODERNBERT |= {'global_attn_every_n_layers': 3, 'global_rope_theta': 160_000.0, 'local_rope_theta': 10_000.0}
MODERNBERT |= {'local_attention': 128, 'norm_eps': 1e-5, 'layer_norm_eps': 1e-5, 'position_embedding_type': 'absolute'}

# What the published config.json hold, of the fields that make the model.
PUBLISHED = {
    'bert': {**BERT, 'model_type': 'bert', 'vocab_size': 30_522, 'max_position_embeddings': 512,
             'type_vocab_size': 2, 'layer_norm_eps': 1e-12},
    'roberta': {**BERT, 'model_type': 'roberta', 'vocab_size': 50_265, 'max_position_embeddings': 514,
                'type_vocab_size': 1, 'layer_norm_eps': 1e-5, 'pad_token_id': 1},
    'gpt2': {'model_type': 'gpt2', 'vocab_size': 50_257, 'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'n_ctx': 1024,
             'n_positions': 1024, 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5, 'resid_pdrop': 0.1,
             'attn_pdrop': 0.1},
    't5': {**T5, 'd_ff': 3072},
    't5:v1_1_base': {**T5, 'd_ff': 2048, 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
                     'num_decoder_layers': 12},
    'bart:large': {'model_type': 'bart', 'vocab_size': 50_265, 'd_model': 1024, 'encoder_layers': 12,
                   'decoder_layers': 12, 'encoder_attention_heads': 16, 'decoder_attention_heads': 16,
                   'encoder_ffn_dim': 4096, 'decoder_ffn_dim': 4096, 'max_position_embeddings': 1024,
                   'activation_function': 'gelu', 'scale_embedding': False, 'dropout': 0.1, 'attention_dropout': 0.1},
    'llama': {**LLAMA, 'model_type': 'llama', 'vocab_size': 32_000, 'intermediate_size': 11_008,
              'max_position_embeddings': 4096, 'num_key_value_heads': 32, 'rope_scaling': None},
    'llama:llama3_1_8b': {**LLAMA, 'model_type': 'llama', 'vocab_size': 128_256, 'intermediate_size': 14_336,
                          'num_key_value_heads': 8, 'max_position_embeddings': 131_072, 'rope_theta': 500_000.0,
                          'rope_scaling': LLAMA3_ROPE},
    'mixtral': {**LLAMA, 'model_type': 'mixtral', 'vocab_size': 32_000, 'intermediate_size': 14_336,
                'num_key_value_heads': 8, 'max_position_embeddings': 32_768, 'rope_theta': 1e6, 'sliding_window': None,
                'num_local_experts': 8, 'num_experts_per_tok': 2, 'router_aux_loss_coef': 0.02},
    'gemma': {'model_type': 'gemma2', 'vocab_size': 256_000, 'hidden_size': 2304, 'intermediate_size': 9216,
              'num_hidden_layers': 26, 'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 256,
              'max_position_embeddings': 8192, 'hidden_activation': 'gelu_pytorch_tanh', 'query_pre_attn_scalar': 256,
              'rms_norm_eps': 1e-6, 'rope_theta': 10_000.0, 'sliding_window': 4096, 'attn_logit_softcapping': 50.0,
              'final_logit_softcapping': 30.0},
}  # fmt: skip


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_published_config_is_the_architecture_of_our_recipe(name: str) -> None:
    """But for dropout and pooling, which the hub's files have as of fine-tuning."""
    file, _, argument = name.partition(':')
    recipe = config.load(f'{ARCHITECTURES}/{file}.py:{argument}').model
    rates = [field.name for field in dataclasses.fields(Model) if field.name.endswith('dropout_rate')]
    rates += ['pooling', 'pooler', 'class_bias']  # of heads that these recipes do not train
    found = dataclasses.replace(hf.model_of(PUBLISHED[name]), **{rate: getattr(recipe, rate) for rate in rates})
    assert resolve_model(found) == resolve_model(recipe)


# Families of which configs/architectures has no recipe.
FILES: dict[str, dict[str, Any]] = {
    **PUBLISHED,
    'xlm-roberta': PUBLISHED['roberta'],
    'camembert': PUBLISHED['roberta'],
    'distilbert': {'vocab_size': 30_522, 'dim': 768, 'hidden_dim': 3072, 'n_layers': 6, 'n_heads': 12, 'dropout': 0.1,
                   'attention_dropout': 0.1, 'max_position_embeddings': 512, 'tie_weights_': True, 'qa_dropout': 0.1},
    'electra': {**PUBLISHED['bert'], 'embedding_size': 128, 'hidden_size': 256, 'num_attention_heads': 4},
    'albert': {**PUBLISHED['bert'], 'embedding_size': 128, 'down_scale_factor': 1, 'inner_group_num': 1},
    'modernbert': {**MODERNBERT, 'model_type': 'modernbert'},
    'mpnet': {**BERT, 'vocab_size': 30_527, 'max_position_embeddings': 514, 'pad_token_id': 1,
              'layer_norm_eps': 1e-5, 'relative_attention_num_buckets': 32},
    'mt5': PUBLISHED['t5'],
    'bart': PUBLISHED['bart:large'],
    'marian': PUBLISHED['bart:large'],
    'mbart': {**PUBLISHED['bart:large'], 'normalize_before': True, 'add_final_layer_norm': True},
    'mistral': {**PUBLISHED['llama'], 'sliding_window': 4096},
    'qwen2': {**PUBLISHED['llama'], 'use_sliding_window': False, 'max_window_layers': 28},
    'gemma': {**PUBLISHED['llama'], 'hidden_act': 'gelu'},
    'gemma2': PUBLISHED['gemma'],
    'qwen3': {**PUBLISHED['llama'], 'use_sliding_window': False, 'max_window_layers': 28},
    'olmo2': PUBLISHED['llama'],
    'phi3': {**PUBLISHED['llama'], 'embd_pdrop': 0.0, 'resid_pdrop': 0.0, 'original_max_position_embeddings': 4096},
    'gpt_neox': {'vocab_size': 50_304, 'hidden_size': 512, 'num_hidden_layers': 6, 'num_attention_heads': 8,
                 'intermediate_size': 2048, 'hidden_act': 'gelu', 'max_position_embeddings': 2048,
                 'classifier_dropout': 0.1},
    'gemma3_text': {key: value for key, value in PUBLISHED['gemma'].items() if key != 'attn_logit_softcapping'},
    'gpt_oss': {**PUBLISHED['mixtral'], 'head_dim': 64, 'sliding_window': 128, 'rope_scaling': None,
                'initial_context_length': 4096},
    'deepseek_v2': {**PUBLISHED['llama'], 'rms_norm_eps': 1e-6, 'first_k_dense_replace': 32, 'topk_method': 'greedy'},
    'deepseek_v3': {**PUBLISHED['llama'], 'rms_norm_eps': 1e-6, 'first_k_dense_replace': 32, 'n_group': 8,
                    'rope_scaling': DEEPSEEK_ROPE},
    'm2m_100': {**PUBLISHED['bart:large'], 'activation_function': 'relu', 'scale_embedding': True,
                'attention_dropout': 0.1, 'pad_token_id': 1},
}  # fmt: skip

# What the configuration classes of the hub's library set where a file says nothing.
OF_BERT = {'hidden_act': 'gelu', 'layer_norm_eps': 1e-12}
OF_BART = {'activation_function': 'gelu', 'scale_embedding': False, 'attention_dropout': 0.0, 'activation_dropout': 0.0}
OF_LLAMA = {'head_dim': None, 'num_key_value_heads': None, 'tie_word_embeddings': False, 'rope_theta': 10_000.0,
            'attention_dropout': 0.0, 'hidden_act': 'silu'}  # fmt: skip
OF_T5 = {'num_decoder_layers': None, 'n_positions': 512, 'tie_word_embeddings': True, 'feed_forward_proj': 'relu',
         'relative_attention_max_distance': 128}  # fmt: skip
OF_GEMMA = {**OF_LLAMA, 'head_dim': 256, 'attention_bias': False, 'tie_word_embeddings': True}
OF_GEMMA2 = {**OF_GEMMA, 'num_key_value_heads': 4, 'hidden_activation': 'gelu_pytorch_tanh',
             'layer_types': 13 * ['sliding_attention', 'full_attention']}  # fmt: skip
del OF_GEMMA2['hidden_act']
OF_QWEN = {'num_key_value_heads': 32, 'layer_types': None, 'use_sliding_window': False, 'sliding_window': 4096,
           'max_window_layers': 28}  # fmt: skip
OF_DEEPSEEK = {name: value for name, value in OF_LLAMA.items() if name != 'head_dim'}
OF_DEEPSEEK |= {'kv_lora_rank': 512, 'q_lora_rank': 1536, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64,
                'v_head_dim': 128}  # fmt: skip
DEFAULTS = {
    'bert': OF_BERT,
    'roberta': {**OF_BERT, 'pad_token_id': 1},
    'mpnet': OF_BERT,
    'modernbert': {'global_rope_theta': 160_000.0, 'local_rope_theta': 10_000.0, 'global_attn_every_n_layers': 3,
                   'layer_types': [*(7 * ['full_attention', 'sliding_attention', 'sliding_attention']),
                                   'full_attention'],
                   'local_attention': 128, 'hidden_activation': 'gelu', 'norm_eps': 1e-5, 'norm_bias': False,
                   'attention_bias': False, 'mlp_bias': False, 'decoder_bias': True, 'attention_dropout': 0.0,
                   'mlp_dropout': 0.0, 'classifier_pooling': 'cls', 'classifier_bias': False,
                   'classifier_activation': 'gelu', 'tie_word_embeddings': True},
    'gpt2': {'n_inner': None, 'activation_function': 'gelu_new'},
    't5': OF_T5,
    'mt5': {**OF_T5, 'feed_forward_proj': 'gated-gelu'},
    'xlm-roberta': {**OF_BERT, 'pad_token_id': 1},
    'camembert': {**OF_BERT, 'pad_token_id': 1},
    'distilbert': {'activation': 'gelu'},
    'electra': OF_BERT,
    'albert': {**OF_BERT, 'hidden_act': 'gelu_new', 'embedding_size': 128},
    'bart': OF_BART,
    'mbart': OF_BART,
    'marian': {**OF_BART, 'decoder_vocab_size': None},
    'llama': {**OF_LLAMA, 'attention_bias': False, 'mlp_bias': False},
    'mistral': {**OF_LLAMA, 'num_key_value_heads': 8, 'sliding_window': 4096},
    'qwen2': {**OF_LLAMA, **OF_QWEN},
    'gemma': {**OF_GEMMA, 'num_key_value_heads': 16, 'hidden_act': 'gelu_pytorch_tanh'},
    'gemma2': OF_GEMMA2,
    'qwen3': {**OF_LLAMA, **OF_QWEN, 'head_dim': 128, 'attention_bias': False},
    'olmo2': {**OF_LLAMA, 'attention_bias': False},
    'phi3': {**OF_LLAMA, 'sliding_window': None, 'partial_rotary_factor': 1.0,
             'original_max_position_embeddings': 4096},
    'gpt_neox': {'hidden_act': 'gelu', 'hidden_dropout': 0.0, 'attention_dropout': 0.0, 'layer_norm_eps': 1e-5,
                 'use_parallel_residual': True, 'attention_bias': True, 'tie_word_embeddings': False,
                 'rotary_emb_base': 10_000, 'rotary_pct': 0.25},
    'gemma3_text': {**OF_GEMMA2, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'sliding_window': 4096,
                    'sliding_window_pattern': 6, 'query_pre_attn_scalar': 256, 'final_logit_softcapping': None,
                    'layer_types': [*(4 * [*(5 * ['sliding_attention']), 'full_attention']), 'sliding_attention',
                                    'sliding_attention']},
    'gpt_oss': {**{key: value for key, value in OF_LLAMA.items() if key != 'hidden_act'}, 'num_key_value_heads': 8,
                'head_dim': 64, 'rope_theta': 150_000.0, 'sliding_window': 128, 'attention_bias': True,
                'layer_types': 16 * ['sliding_attention', 'full_attention'], 'router_aux_loss_coef': 0.001},
    'm2m_100': {**OF_BART, 'activation_function': 'relu', 'scale_embedding': True, 'attention_dropout': 0.1,
                'pad_token_id': 1},
    'deepseek_v2': {**OF_DEEPSEEK, 'mlp_bias': False},
    'deepseek_v3': {**OF_DEEPSEEK, 'num_key_value_heads': 128},
    'mixtral': {**OF_LLAMA, 'num_key_value_heads': 8, 'rope_theta': 1e6, 'sliding_window': None,
                'router_aux_loss_coef': 0.001},
}  # fmt: skip


@pytest.mark.parametrize('family', hf.FAMILIES)
def test_a_field_that_a_file_leaves_out_has_the_value_of_the_hubs_library(family: str) -> None:
    published = {**FILES[family], 'model_type': family}
    assert DEFAULTS[family].keys() == hf.FAMILIES[family].defaults.keys()
    for field, value in DEFAULTS[family].items():
        without = {name: given for name, given in published.items() if name != field}
        assert hf.model_of(without) == hf.model_of({**without, field: value}), field


# ------------------------------------------------------------------------------------------------ names
def test_checkpoints_without_the_prefix_and_with_early_names_are_read() -> None:
    for name, old in (
        ('gpt2', {}),
        ('bert', {'LayerNorm.weight': 'LayerNorm.gamma', 'LayerNorm.bias': 'LayerNorm.beta'}),
    ):
        reference = references.load(name)
        cfg, prefix = hf.model_of(reference.config), hf.FAMILIES[name].prefix
        base = {key: value for key, value in reference.tensors.items() if key.startswith(prefix)}
        expected = flat(hf.import_params(name, base, cfg))
        early = {}
        for key, value in base.items():
            for new, former in old.items():
                key = key.replace(new, former)
            early[key.removeprefix(prefix)] = value
        params = hf.import_params(name, early, cfg)
        assert flat(params) == expected and ('head' in params) is False
        table = reference.tensors[f'{prefix}{"wte" if name == "gpt2" else "embeddings.word_embeddings"}.weight']
        assert np.array_equal(params['embed']['table'], table)


def test_tensors_without_a_part_in_the_model_are_left_out() -> None:
    for name in CASES:
        reference = references.load(name)
        family = reference.config['model_type']
        cfg, table = hf.model_of(reference.config), hf.FAMILIES[family]
        expected = flat(hf.import_params(family, reference.tensors, cfg))
        more = {pattern.replace('*', '1'): np.ones(3) for pattern in table.ignored}
        more |= {
            copy: reference.tensors[source] for copy, source in table.copies.items() if source in reference.tensors
        }
        assert flat(hf.import_params(family, {**more, **reference.tensors}, cfg)) == expected


# ------------------------------------------------------------------------------------------------ errors
def broken(name: str, change: Callable[[dict], object]) -> str:
    """Returns the one line about a checkpoint after `change`."""
    reference = references.load(name)
    tensors = dict(reference.tensors)
    change(tensors)
    with pytest.raises(UserError) as error:
        hf.import_params(reference.config['model_type'], tensors, hf.model_of(reference.config))
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_a_tensor_that_is_missing_unmapped_or_of_the_wrong_shape_is_named(name: str) -> None:
    tensors = references.load(name).tensors
    table = hf.FAMILIES[families()[name]]
    for key in [key for key in tensors if not key.startswith((*table.zeros, 'score.', 'decoder.bias'))][
        :: max(1, len(tensors) // 8)
    ]:
        ours = key.removeprefix(next(iter(table.headed.values()), ''))
        assert f'no tensor {ours}' in broken(name, lambda tensors, key=key: tensors.pop(key))
        shape = (*tensors[key].shape[:-1], tensors[key].shape[-1] + 1)
        line = broken(name, lambda tensors, key=key, shape=shape: tensors.update({key: np.zeros(shape)}))
        assert f'tensor {key} has shape {shape}' in line and str(tensors[key].shape) in line
    assert 'no rule reads the tensor adapter.weight' in broken(name, lambda t: t.update({'adapter.weight': np.ones(1)}))
    layer = next((key for key in tensors if '.2.' in key), 'albert_layers.0.ffn.bias')
    deeper = layer.replace('.2.', '.7.').replace('.0.', '.1.')
    assert f'no rule reads the tensor {deeper}' in broken(name, lambda t: t.update({deeper: np.ones(1)}))


def test_a_copy_that_differs_and_a_bias_that_is_not_zero_are_refused() -> None:
    line = broken('gpt2', lambda tensors: tensors.update({'lm_head.weight': tensors['transformer.wte.weight'] + 1}))
    assert 'lm_head.weight is not the copy of transformer.wte.weight' in line
    line = broken('bart', lambda tensors: tensors.update({'final_logits_bias': np.ones((1, references.VOCAB))}))
    assert 'final_logits_bias is not 0' in line


@pytest.mark.parametrize(
    ('name', 'fields', 'words'),
    [
        ('gpt2', {'model_type': 'gpt3'}, "did you mean 'gpt2'"),
        ('gpt2', {'activation_function': 'gelu_fast'}, 'activation_function'),
        ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
        ('bert', {'position_embedding_type': 'relative_key'}, "valid: 'absolute'"),
        ('bart', {'decoder_attention_heads': 2}, 'encoder_attention_heads and decoder_attention_heads differ'),
        ('gemma2', {'query_pre_attn_scalar': -3}, 'query_pre_attn_scalar'),
        ('llama', {'rope_parameters': {'rope_type': 'yarns', 'rope_theta': 1.0}}, "did you mean 'yarn'"),
        ('yarn', {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1.0, 'beta_extra': 1}}, 'beta_extra'),
        ('phi3', {'original_max_position_embeddings': 7}, 'is given twice'),
        ('phi3', {'rope_parameters': {'rope_theta': 1.0, 'partial_rotary_factor': 0.45}}, 'is not a whole number'),
        ('gpt_oss', {'swiglu_limit': 5.0}, 'swiglu_limit=5.0 has no counterpart'),
        ('gemma3', {'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping=50.0 has no counterpart'),
        ('marian', {'decoder_vocab_size': 7}, 'decoder_vocab_size'),
        ('deepseek_v2', {'first_k_dense_replace': 1}, 'first_k_dense_replace=1 leaves layers of shared and routed exp'),
        ('deepseek_v2', {'rope_parameters': {'rope_type': 'linear', 'factor': 2.0, 'mscale_all_dim': 1}}, 'mscale_all'),
    ],
)
def test_a_config_that_has_no_counterpart_is_refused_in_one_line(name: str, fields: dict, words: str) -> None:
    with pytest.raises(UserError) as error:
        hf.model_of({**references.load(name).config, **fields})
    assert words in str(error.value) and '\n' not in str(error.value)


def test_a_config_without_a_size_names_the_field() -> None:
    with pytest.raises(UserError, match='has no field n_layer'):
        hf.model_of({'model_type': 'gpt2', 'vocab_size': 7, 'n_embd': 8})


def test_rotary_fields_of_earlier_files_are_those_of_later_ones() -> None:
    later = references.load('llama3').config
    rope = dict(later['rope_parameters'])
    earlier = {key: value for key, value in later.items() if key != 'rope_parameters'}
    earlier |= {'rope_theta': rope.pop('rope_theta'), 'rope_scaling': rope}
    assert hf.model_of(earlier) == hf.model_of(later)
    assert math.isclose(hf.model_of(later).rope_factor, 4)


@pytest.mark.parametrize('name', ['qwen2', 'gemma2', 'gpt_oss', 'modernbert'])
def test_kinds_of_layers_that_a_file_does_not_list_are_those_of_the_hubs_library(name: str) -> None:
    found = references.load(name).config
    assert hf.model_of({key: value for key, value in found.items() if key != 'layer_types'}) == hf.model_of(found)


# ------------------------------------------------------------------------------------------------ both ways
@pytest.mark.parametrize('name', CASES)
def test_the_config_of_a_model_gives_the_model_back(name: str) -> None:
    cfg = hf.model_of(references.load(name).config)
    written = hf.config_of(families()[name], cfg)
    assert resolve_model(hf.model_of(written)) == resolve_model(cfg)
    json.dumps(written)


def others(cfg: Model, field: str) -> list:
    """Returns other values of a field of `Model`: of its table, or near the value it has."""
    value, table = getattr(cfg, field), checks.TABLES.get(f'model.{field}')
    if table is not None:
        options = (
            [None, *table]
            if not isinstance(value, tuple)
            else [(), *((key,) for key in table)][field == 'attention_pattern' :]
        )
    elif isinstance(value, bool):
        options = [not value]
    else:
        options = [(value or 1) * 2, (value or 1) * 1.5, None] if isinstance(value, float) else [(value or 1) * 2, None]
    return [option for option in options if option != value and is_of_type(field, option)]


def is_of_type(field: str, value: object) -> bool:
    try:
        config.coerce(config.field_types(Model)[field], value, field)
    except UserError:
        return False
    return True


COMPARED = [field.name for field in dataclasses.fields(Model) if field.name not in OUTSIDE_THE_FUNCTION]


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
@pytest.mark.filterwarnings('error')
def test_a_model_is_exported_as_itself_or_refused_by_a_field(name: str) -> None:
    """Whatever field is changed to whatever value: either config.json gives the changed model back, or one line."""
    cfg, family, refused = hf.model_of(references.load(name).config), families()[name], set()
    for field in COMPARED:
        for value in others(cfg, field):
            changed = dataclasses.replace(cfg, **{field: value})
            try:
                expected = resolve_model(changed)
            except UserError:
                continue
            try:
                written = hf.config_of(family, changed)
            except UserError as error:
                assert '\n' not in str(error) and str(error).startswith(f'{family}: ')
                refused.add(field)
            else:
                found = resolve_model(hf.model_of(written))
                assert all(getattr(found, key) == getattr(expected, key) for key in COMPARED), (field, value)
    never = {'position', 'norm', 'norm_placement', 'norm_epsilon_in_root', 'qk_norm', 'attention_sink', 'output_scale'}
    never |= {'parametrization', 'recurrence', 'layer_sharing', 'rope_fraction', 'lora_rank', 'relative_per_layer'}
    assert never - ({'rope_fraction'} if family in ('gpt_neox', 'phi3') else set()) <= refused


@pytest.mark.parametrize('change', [{'attention_softcap': 5.0}, {'norm_placement': 'parallel'},
                                    {'embedding_scale': 'sqrt_dim'}, {'window': 4, 'attention_pattern': ('local',)},
                                    {'activation': 'reglu', 'qk_norm': 'rmsnorm'}])  # fmt: skip
def test_parameters_of_a_model_that_the_family_lacks_are_not_exported(change: dict) -> None:
    reference = references.load('llama')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('llama', reference.tensors, cfg)
    with pytest.raises(UserError) as error:
        hf.export_params('llama', params, dataclasses.replace(cfg, **change))
    assert re.match(rf'llama: model\.({"|".join(change)})=', str(error.value))


def test_a_parameter_that_is_missing_or_that_no_rule_reads_is_not_exported() -> None:
    reference = references.load('llama')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('llama', reference.tensors, cfg)
    with pytest.raises(UserError, match=r'^llama: no rule reads the parameter adapter/kernel$'):
        hf.export_params('llama', {**params, 'adapter': {'kernel': np.ones(1)}}, cfg)
    embed = {name: value for name, value in params['embed'].items() if name != 'table'}
    with pytest.raises(UserError, match=r'^llama: there is no parameter embed/table'):
        hf.export_params('llama', {**params, 'embed': embed}, cfg)


@pytest.mark.slow
def test_fields_outside_the_function_leave_the_logits_as_they_are() -> None:
    reference = references.load('mixtral')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('mixtral', reference.tensors, cfg)
    expected = our_outputs(cfg, params, reference.batch, ('logits',))['logits']
    for field in OUTSIDE_THE_FUNCTION:
        for value in others(cfg, field)[:1]:
            if field in ('dtype', 'param_dtype', 'attention_kernel', 'lora_targets') or value is None:
                continue  # rounding; where kernels are not here
            found = our_outputs(dataclasses.replace(cfg, **{field: value}), params, reference.batch, ('logits',))
            np.testing.assert_allclose(found['logits'], expected, atol=1e-5, err_msg=f'{field}={value}')


def test_a_sentence_head_is_exported_where_the_hub_pools_alike() -> None:
    reference = references.load('bert')
    cfg = hf.model_of(reference.config)
    params = hf.import_params('bert', reference.tensors, cfg)
    assert 'sentence_head' in params and hf.export_params('bert', params, cfg)
    for change, said in (({'pooling': 'mean'}, 'pooling=cls'), ({'pooler': False}, 'pooler=True')):
        with pytest.raises(UserError, match=f'reads model.{said}: one trained with --config.model.{said} can be'):
            hf.export_params('bert', params, dataclasses.replace(cfg, **change))


# ------------------------------------------------------------------------------------------------ odd files
ODD = [None, -1, 0, 1, 2.5, True, 'abc', [], ['abc'], {}, {'abc': 1}, math.inf]


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_a_field_with_an_odd_value_is_refused_in_one_line_or_makes_a_model(name: str) -> None:
    """Every field of config.json with every value; what makes a model is checked with the run it is put in."""
    found = references.load(name).config
    models = set()
    for field, value in itertools.product(found, ODD):
        try:
            models.add(hf.model_of({**found, field: value}, lambda line: None))
        except UserError as error:
            assert '\n' not in str(error)
    for model in models:
        try:
            checks.check(run_of(model))
        except UserError as error:
            assert '\n' not in str(error)


@pytest.mark.parametrize(
    ('name', 'fields', 'words'),
    [
        ('mixtral', {'num_experts_per_tok': 1}, 'num_experts_per_tok=1 has no counterpart'),
        ('gemma2', {'layer_types': ['chunked_attention'] * 3}, "layer_types='chunked_attention' is unknown"),
        ('t5', {'is_encoder_decoder': False}, 'is_encoder_decoder=False has no counterpart'),
        ('roberta', {'pad_token_id': None}, 'pad_token_id is null'),
        ('marian', {'d_model': None}, 'd_model is null'),
        ('llama', {'quantization_config': {'bits': 4}}, 'quantization_config='),
        ('llama', {'hidden_size': '16'}, "emb_dim='16' is not int"),
        ('llama', {'rope_parameters': ['yarn']}, 'rope_parameters='),
        ('bert', {'is_decoder': True}, 'is_decoder=True has no counterpart'),
        ('bert', {'num_hidden_layers': 0}, 'must be positive'),
        ('t5', {'dense_act_fn': 'gelu'}, "dense_act_fn='gelu' is not that of feed_forward_proj: 'relu'"),
        ('t5', {'feed_forward_proj': 'silu', 'dense_act_fn': 'relu'}, "is not that of feed_forward_proj: 'silu'"),
        ('llama', {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}, 'are both given'),
        ('llama', {'a_field_of_tomorrow': 'on'}, "a_field_of_tomorrow='on' is not known here"),
        ('llama', {'rope_interleaved': True}, 'rope_interleaved=True is not known here'),
        ('gemma', {'hidden_activation': 'gelu'}, "hidden_activation='gelu' with hidden_act='gelu_pytorch_tanh' has no"),
        ('gemma', {'hidden_act': 'silu', 'hidden_activation': 'gelu_pytorch_tanh'}, "with hidden_act='silu' has no"),
        ('mixtral', {'attention_bias': True}, 'attention_bias=True is not known here'),
        ('gemma2', {'layer_types': ['full_attention']}, 'is not a list of num_hidden_layers=3 kinds'),
        ('qwen2', {'use_sliding_window': False}, 'sliding_window does not say how far'),
        ('albert', {'num_hidden_groups': 2}, 'num_hidden_groups=2 has no counterpart'),
        ('gemma3', {'num_hidden_layers': 10**9, 'layer_types': None}, 'num_hidden_layers=1000000000 must be at most'),
        ('mpnet', {'relative_attention_num_buckets': 64}, 'relative_attention_num_buckets=64 has no counterpart'),
        ('mpnet', {'pad_token_id': 0}, 'pad_token_id=0 has no counterpart'),
        ('modernbert', {'classifier_activation': 'tanh'}, "classifier_activation='tanh' is unknown"),
        ('mbart', {'normalize_before': False}, 'normalize_before=False has no counterpart'),
        ('llama', {'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}}, 'partial_rotary_factor'),
        ('llama3', {'original_max_position_embeddings': 7}, 'original_max_position_embeddings is given twice; valid: '),
        (
            'llama',
            {'rope_parameters': {**LLAMA3_ROPE, 'rope_theta': 5e5, 'low_freq_factor': 2.0}},
            'low_freq_factor and high_freq_factor other than 1 and 4 have no counterpart',
        ),
    ],
)
def test_an_option_that_would_change_the_numbers_is_refused(name: str, fields: dict, words: str) -> None:
    with pytest.raises(UserError) as error:
        hf.model_of({**references.load(name).config, **fields})
    assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('name', 'fields'),
    [
        ('llama', {'is_llama_config': True, 'transformers.js_config': {'dtype': 'q4'}, 'unsloth_fixed': True}),
        ('llama', {'max_sequence_length': 2048}),
        ('roberta', {'name': 'Roberta', 'language': 'english'}),
        ('bert', {'sbert_ce_default_activation_function': 'x', 'sentence_transformers': {'version': '4.1.0'}}),
        ('gpt_neox', {'custom_pipelines': {'text-generation': {'impl': 'x'}}}),
        ('gemma', {'hidden_act': 'gelu', 'hidden_activation': 'gelu_pytorch_tanh'}),
        ('gemma', {'hidden_activation': None}),
    ],
)
def test_fields_of_published_files_that_the_hubs_library_does_not_read_change_nothing(name: str, fields: dict) -> None:
    said: list[str] = []
    found = references.load(name).config
    assert hf.model_of({**found, **fields}, said.append) == hf.model_of(found) and said == []


@pytest.mark.parametrize(
    ('name', 'fields'),
    [
        ('gpt2', {'embd_pdrop': 0.3}),
        ('bart', {'encoder_layerdrop': 0.1}),
        ('mixtral', {'router_jitter_noise': 0.1}),
        ('t5', {'classifier_dropout': 0.1}),
        ('llama', {'a_switch_of_tomorrow': False}),
    ],
)
def test_an_option_that_is_not_read_is_named(name: str, fields: dict) -> None:
    said: list[str] = []
    hf.model_of({**references.load(name).config, **fields}, said.append)
    ((field, value),) = fields.items()
    assert said == [f'config.json ({families()[name]}): not read: {field}={value!r}']
    said.clear()
    hf.model_of(references.load(name).config, said.append)
    assert said == []
