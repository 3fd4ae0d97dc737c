"""For each field of the model, a config in which it applies and a value that changes the program."""

import dataclasses
import functools
import re

import jax
import numpy as np

from tformer.config import Config, Data, Model, Train
from tformer.distributed.sharding import unboxed
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.dummy_batch import random_batch
from tformer.training.state import initial_variables

TINY = {'vocab_size': 11, 'emb_dim': 16, 'mlp_dim': 24, 'max_len': 16}
DECODER = Model(family='decoder', num_decoder_layers=2, **TINY)
ENCODER = Model(family='encoder', num_encoder_layers=2, **TINY)
BOTH = Model(
    family='encoder_decoder',
    num_encoder_layers=2,
    num_decoder_layers=2,
    tied_embeddings='output',
    encoder_vocab_size=9,
    **TINY,
)


def decoder(**fields):
    return dataclasses.replace(DECODER, **fields)


LEARNED, ROPE, RELATIVE = decoder(position='learned'), decoder(position='rope'), decoder(position='relative')
SCALED, LLAMA3 = (decoder(position='rope', rope_scaling=key, rope_factor=2.0) for key in ('linear', 'llama3'))
YARN = decoder(position='rope', rope_scaling='yarn', rope_factor=2.0, rope_trained_len=4096, head_dim=64)
LONG = decoder(position='rope', rope_scaling='longrope', rope_short_factors=(1.0, 2.0), rope_long_factors=(2.0, 3.0))
NEAR = decoder(position='rope', attention_pattern=('local', 'global'), window=3)
LATENT = decoder(position='rope', kv_latent_dim=8)
EXPERTS = decoder(num_experts=4)
CAPACITY = decoder(num_experts=4, expert_dispatch='capacity')
LOCAL = decoder(attention_pattern=('local',), window=3)
MUP = decoder(parametrization='mup', base_emb_dim=8)
LORA = decoder(lora_rank=2)
TRANSFORM = dataclasses.replace(ENCODER, mlm_transform=True)
RECURRENT = Model(family='decoder', recurrence='gru', vocab_size=11, emb_dim=16, num_decoder_layers=2, max_len=16)
RECURRENT_BOTH = Model(
    family='encoder_decoder',
    recurrence='gru',
    recurrent_attention='dot',
    vocab_size=11,
    emb_dim=16,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_len=16,
)


# Field -> the objective and the model in which it applies, and another value.
KNOBS = {
    'family': ('causal_lm', DECODER, 'encoder'),
    'recurrence': ('causal_lm', RECURRENT, 'lstm'),
    'bidirectional': ('seq2seq', RECURRENT_BOTH, True),
    'recurrent_attention': ('seq2seq', RECURRENT_BOTH, 'additive'),
    'vocab_size': ('causal_lm', DECODER, 13),
    'encoder_vocab_size': ('seq2seq', BOTH, 13),
    'emb_dim': ('causal_lm', DECODER, 32),
    'mlp_dim': ('causal_lm', DECODER, 32),
    'num_encoder_layers': ('seq2seq', BOTH, 3),
    'num_decoder_layers': ('seq2seq', BOTH, 3),
    'num_heads': ('causal_lm', DECODER, 2),
    'num_kv_heads': ('causal_lm', DECODER, 2),
    'head_dim': ('causal_lm', DECODER, 8),
    'value_dim': ('causal_lm', DECODER, 6),
    'kv_latent_dim': ('causal_lm', ROPE, 6),
    'query_latent_dim': ('causal_lm', LATENT, 6),
    'rotary_dim': ('causal_lm', LATENT, 4),
    'max_len': ('causal_lm', LEARNED, 12),
    'tied_embeddings': ('causal_lm', DECODER, None),
    'embedding_scale': ('causal_lm', DECODER, None),
    'embedding_factor_dim': ('causal_lm', DECODER, 8),
    'embedding_norm': ('causal_lm', DECODER, True),
    'num_token_types': ('masked_lm', ENCODER, 2),
    'position': ('causal_lm', DECODER, 'rope'),
    'position_offset': ('causal_lm', LEARNED, 2),
    'rope_theta': ('causal_lm', ROPE, 500.0),
    'rope_fraction': ('causal_lm', ROPE, 0.5),
    'rope_scaling': ('causal_lm', SCALED, 'llama3'),
    'rope_factor': ('causal_lm', SCALED, 4.0),
    'rope_trained_len': ('causal_lm', LLAMA3, 16),
    'rope_fast_turns': ('causal_lm', YARN, 8.0),
    'rope_slow_turns': ('causal_lm', YARN, 4.0),
    'rope_round_ramp': ('causal_lm', YARN, False),
    'rope_attention_factor': ('causal_lm', YARN, 1.5),
    'rope_short_factors': ('causal_lm', LONG, (1.0, 1.0)),
    'rope_long_factors': ('causal_lm', LONG, (1.0, 1.0)),
    'local_rope_theta': ('causal_lm', NEAR, 100.0),
    'relative_buckets': ('causal_lm', RELATIVE, 8),
    'relative_max_distance': ('causal_lm', RELATIVE, 64),
    'relative_per_layer': ('causal_lm', RELATIVE, True),
    'cross_position': ('seq2seq', dataclasses.replace(BOTH, position='rope'), True),
    'norm': ('causal_lm', DECODER, 'rmsnorm'),
    'norm_placement': ('causal_lm', DECODER, 'post'),
    'norm_epsilon': ('causal_lm', DECODER, 1e-5),
    'norm_epsilon_in_root': ('causal_lm', DECODER, False),
    'first_norm': ('causal_lm', DECODER, False),
    'norm_bias': ('causal_lm', DECODER, False),
    'final_norm': ('causal_lm', DECODER, False),
    'attention_bias': ('causal_lm', DECODER, ('query',)),
    'mlp_bias': ('causal_lm', DECODER, False),
    'layer_sharing': ('causal_lm', DECODER, 'all'),
    'attention_projections': ('causal_lm', DECODER, False),
    'attention_scale': ('causal_lm', decoder(head_dim=6), 'unscaled'),
    'attention_scale_dim': ('causal_lm', decoder(attention_scale='sqrt_scale_dim'), 8.0),
    'attention_pattern': ('causal_lm', LOCAL, ('local', 'global')),
    'window': ('causal_lm', LOCAL, 4),
    'attention_softcap': ('causal_lm', DECODER, 5.0),
    'attention_sink': ('causal_lm', DECODER, 'learned'),
    'qk_norm': ('causal_lm', DECODER, 'rmsnorm'),
    'activation': ('causal_lm', DECODER, 'gelu'),
    'num_experts': ('causal_lm', DECODER, 4),
    'experts_per_token': ('causal_lm', EXPERTS, 1),
    'router_bias': ('causal_lm', EXPERTS, True),
    'expert_dispatch': ('causal_lm', EXPERTS, 'capacity'),
    'expert_capacity': ('causal_lm', CAPACITY, 0.5),
    'balance_weight': ('causal_lm', EXPERTS, 0.1),
    'router_z_weight': ('causal_lm', EXPERTS, 0.1),
    'output_bias': ('causal_lm', DECODER, True),
    'output_scale': ('causal_lm', DECODER, 'rsqrt_dim'),
    'output_softcap': ('causal_lm', DECODER, 5.0),
    'mlm_transform': ('masked_lm', ENCODER, True),
    'task_transform': ('classification', ENCODER, True),
    'transform_activation': ('masked_lm', TRANSFORM, 'gelu'),
    'transform_bias': ('masked_lm', TRANSFORM, False),
    'num_classes': ('classification', ENCODER, 4),
    'pooling': ('classification', ENCODER, 'cls'),
    'pooler': ('classification', ENCODER, True),
    'pooler_activation': ('classification', dataclasses.replace(ENCODER, pooler=True), 'relu'),
    'class_bias': ('classification', ENCODER, False),
    'similarity_temperature': ('contrastive', ENCODER, 0.1),
    'generator_fraction': ('replaced_token', ENCODER, 0.5),
    'lora_rank': ('causal_lm', DECODER, 2),
    'lora_alpha': ('causal_lm', LORA, 8.0),
    'lora_targets': ('causal_lm', LORA, ('key', 'mlp_out')),
    'dropout_rate': ('causal_lm', DECODER, 0.3),
    'attention_dropout_rate': ('causal_lm', DECODER, 0.3),
    'activation_dropout_rate': ('causal_lm', DECODER, 0.3),
    'head_dropout_rate': ('classification', ENCODER, 0.3),
    'initializer': ('causal_lm', DECODER, 'lecun'),
    'init_scale': ('causal_lm', DECODER, 0.5),
    'parametrization': ('causal_lm', DECODER, 'mup'),
    'base_emb_dim': ('causal_lm', MUP, 4),
    'scan_layers': ('causal_lm', DECODER, False),
    'remat': ('causal_lm', DECODER, 'full'),
    'attention_kernel': ('causal_lm', DECODER, 'chunked'),
    'dtype': ('causal_lm', DECODER, 'bfloat16'),
    'param_dtype': ('causal_lm', DECODER, 'bfloat16'),
}
WITH = {'parametrization': {'base_emb_dim': 8}}  # what a value needs besides
FURTHER = [  # places where the same field is read by other code
    ('norm_epsilon', 'causal_lm', decoder(norm='rmsnorm'), 1e-5),
    ('norm_epsilon_in_root', 'causal_lm', decoder(norm='scalenorm'), False),
    ('norm_epsilon', 'causal_lm', decoder(norm='dyt', qk_norm='rmsnorm'), 1e-5),
    ('norm_epsilon', 'causal_lm', dataclasses.replace(LATENT, norm='dyt'), 1e-5),
    ('norm_epsilon_in_root', 'causal_lm', dataclasses.replace(LATENT, norm=None), False),
    ('tied_embeddings', 'masked_lm', ENCODER, None),
    ('position_offset', 'causal_lm', decoder(position='timing_signal'), 2),
    ('rope_trained_len', 'causal_lm', LONG, 6),
    ('rope_attention_factor', 'causal_lm', LONG, 1.5),
    ('max_len', 'causal_lm', dataclasses.replace(LONG, max_len=16_384), 32_768),
    ('max_len', 'seq2seq', dataclasses.replace(BOTH, position='learned'), 12),
    ('final_norm', 'causal_lm', decoder(norm_placement='post'), True),
    ('dropout_rate', 'classification', ENCODER, 0.3),
    ('attention_dropout_rate', 'seq2seq', BOTH, 0.3),
    ('relative_per_layer', 'seq2seq', dataclasses.replace(BOTH, position='relative', cross_position=True), True),
    ('attention_sink', 'causal_lm', DECODER, 'zero'),
    ('layer_sharing', 'causal_lm', DECODER, 'universal'),
    ('lora_rank', 'seq2seq', BOTH, 3),
    ('lora_rank', 'classification', ENCODER, 3),
    ('num_classes', 'token_classification', BOTH, 4),
    ('num_classes', 'classification', DECODER, 4),
    ('pooling', 'regression', DECODER, 'last'),
    ('pooling', 'contrastive', ENCODER, 'cls'),
    ('pooler', 'classification', BOTH, True),
    ('class_bias', 'regression', DECODER, False),
    ('pooler', 'masked_lm_sop', ENCODER, True),
    ('head_dropout_rate', 'regression', DECODER, 0.3),
    ('head_dropout_rate', 'token_classification', ENCODER, 0.3),
    ('head_dropout_rate', 'question_answering', BOTH, 0.3),
    ('task_transform', 'token_classification', DECODER, True),
    ('task_transform', 'question_answering', BOTH, True),
    ('task_transform', 'regression', ENCODER, True),
    ('transform_bias', 'classification', dataclasses.replace(ENCODER, task_transform=True), False),
    ('first_norm', 'causal_lm', decoder(norm_placement='parallel'), False),
    ('norm_bias', 'causal_lm', decoder(norm='dyt'), False),
    ('num_kv_heads', 'replaced_token', ENCODER, 2),
    ('activation', 'replaced_token', ENCODER, 'gelu'),
]


def classes(cfg):
    return dataclasses.replace(cfg, num_classes=cfg.num_classes or 3)


def changed(field, cfg, value):
    return dataclasses.replace(cfg, **{field: value}, **WITH.get(field, {}) if value is not None else {})


class Trace:
    """What a model compiles to for an objective; each part is traced when it is first compared."""

    def __init__(self, objective_name, cfg):
        config = Config(
            model=resolve_model(classes(cfg)), data=Data(length=8), train=Train(objective=objective_name, batch_size=2)
        )
        self._model, self._objective = build(config.model), OBJECTIVES[objective_name]
        self._hyper = Hyperparameters.of(config)
        self._batch = random_batch(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=9)))

    def _start(self):
        return unboxed(initial_variables(self._model, self._objective, self._hyper, self._batch)['params'])

    def _loss(self, params):
        weighed = self._objective.weigh(self._batch, 1.0)
        logits, aside = self._model.apply(
            {'params': params},
            weighed,
            self._hyper.dropout_rates,
            rngs={'dropout': jax.random.key(0), 'sample': jax.random.key(0)},
            method=self._objective.method,
            mutable=['losses', 'statistics'],
        )
        return self._objective.scores(logits, weighed, None)['loss'][0] + sum(x.sum() for x in jax.tree.leaves(aside))

    @functools.cached_property
    def initialisation(self):
        return text(self._start)

    @functools.cached_property
    def gradient(self):
        return text(jax.grad(self._loss), jax.eval_shape(self._start))

    def __eq__(self, other):
        """Initialisation, which names and shapes the parameters, tells most designs apart; the gradient takes long."""
        return self.initialisation == other.initialisation and self.gradient == other.gradient


@functools.cache
def trace(objective_name, cfg):
    return Trace(objective_name, cfg)


def text(function, *args):
    """Returns (the program of a function, the arrays it holds, its outputs' names and shapes).

    Addresses of objects, which differ from one trace to the next, are taken out.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    named = [(jax.tree_util.keystr(path), str(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)]
    held = [(x.shape, np.asarray(x).tobytes()) for x in program.consts]
    return re.sub(r'0x[0-9a-f]+', '0x', str(program)), held, named
