"""No dead knobs: every field of the model's configuration changes the program, or the parameters, where it applies.

Programs are compared as the text of their jaxpr, constants included: initialisation, and the gradient of the loss with
dropout. Nothing is compiled.
"""

import dataclasses
import functools
import re

import jax
import pytest

from tformer import choices
from tformer.benchmark import random_batch
from tformer.config import Config, Data, Model, Train, resolve_model
from tformer.hyper import Hyper
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optimizers import make_optimizer
from tformer.sharding import unboxed
from tformer.state import make_init

DECODER = Model(
    family='decoder', vocab_size=11, emb_dim=16, mlp_dim=24, num_encoder_layers=2, num_decoder_layers=2, max_len=16
)
ENCODER = dataclasses.replace(DECODER, family='encoder')
BOTH = dataclasses.replace(DECODER, family='encoder_decoder', tied_embeddings='output', encoder_vocab_size=9)
LEARNED = dataclasses.replace(DECODER, position='learned')
ROPE = dataclasses.replace(DECODER, position='rope')

# Field -> the objective and the model in which it applies, and another value.
KNOBS = {
    'family': ('causal_lm', DECODER, 'encoder'),
    'vocab_size': ('causal_lm', DECODER, 13),
    'encoder_vocab_size': ('seq2seq', BOTH, 13),
    'emb_dim': ('causal_lm', DECODER, 32),
    'mlp_dim': ('causal_lm', DECODER, 32),
    'num_encoder_layers': ('seq2seq', BOTH, 3),
    'num_decoder_layers': ('seq2seq', BOTH, 3),
    'num_heads': ('causal_lm', DECODER, 2),
    'num_kv_heads': ('causal_lm', DECODER, 2),
    'head_dim': ('causal_lm', DECODER, 8),
    'max_len': ('causal_lm', LEARNED, 12),
    'tied_embeddings': ('causal_lm', DECODER, None),
    'embedding_scale': ('causal_lm', DECODER, None),
    'position': ('causal_lm', DECODER, 'rope'),
    'rope_theta': ('causal_lm', ROPE, 500.0),
    'norm': ('causal_lm', DECODER, 'rmsnorm'),
    'norm_placement': ('causal_lm', DECODER, 'post'),
    'norm_epsilon': ('causal_lm', DECODER, 1e-5),
    'final_norm': ('causal_lm', DECODER, False),
    'activation': ('causal_lm', DECODER, 'gelu'),
    'attention_bias': ('causal_lm', DECODER, True),
    'mlp_bias': ('causal_lm', DECODER, False),
    'output_bias': ('causal_lm', DECODER, True),
    'mlm_transform': ('masked_lm', ENCODER, True),
    'num_classes': ('classification', ENCODER, 4),
    'pooling': ('classification', ENCODER, 'cls'),
    'dropout_rate': ('causal_lm', DECODER, 0.3),
    'attention_dropout_rate': ('causal_lm', DECODER, 0.3),
    'activation_dropout_rate': ('causal_lm', DECODER, 0.3),
    'initializer': ('causal_lm', DECODER, 'lecun'),
    'init_scale': ('causal_lm', DECODER, 0.5),
    'scan_layers': ('causal_lm', DECODER, False),
    'remat': ('causal_lm', DECODER, 'full'),
    'dtype': ('causal_lm', DECODER, 'bfloat16'),
    'param_dtype': ('causal_lm', DECODER, 'bfloat16'),
}

RMS = dataclasses.replace(DECODER, norm='rmsnorm')
FURTHER = [  # places where the same field is read by other code
    ('norm_epsilon', 'causal_lm', RMS, 1e-5),
    ('tied_embeddings', 'masked_lm', ENCODER, None),
    ('max_len', 'seq2seq', dataclasses.replace(BOTH, position='learned'), 12),
    ('final_norm', 'causal_lm', dataclasses.replace(DECODER, norm_placement='post'), True),
    ('dropout_rate', 'classification', ENCODER, 0.3),
    ('attention_dropout_rate', 'seq2seq', BOTH, 0.3),
]


@functools.cache
def trace(objective_name, cfg):
    """Returns (parameter shapes, the program of initialisation, that of the loss's gradient) of a model."""
    config = Config(
        model=resolve_model(dataclasses.replace(cfg, num_classes=cfg.num_classes or 3)),
        data=Data(length=8),
        train=Train(objective=objective_name, batch_size=2),
    )
    model, objective, hyper = build(config.model), OBJECTIVES[objective_name], Hyper.of(config)
    batch = random_batch(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=9)))
    init = make_init(model, objective, make_optimizer(config.optimizer))

    def start():
        return unboxed(init(hyper, batch).params)

    def loss(params):
        rngs = {'dropout': jax.random.key(0)}
        logits = model.apply({'params': params}, batch, hyper.rates, rngs=rngs, method=objective.method)
        return objective.scores(logits, batch, None)['loss'][0]

    params = jax.eval_shape(start)
    shapes = {jax.tree_util.keystr(path): str(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return shapes, text(start), text(jax.grad(loss), params)


def text(function, *args):
    """The program of a function; addresses of objects, which differ from one trace to the next, are taken out."""
    return re.sub(r'0x[0-9a-f]+', '0x', str(jax.make_jaxpr(function)(*args)))


def test_the_table_of_knobs_is_the_fields_of_the_model():
    assert list(KNOBS) == [field.name for field in dataclasses.fields(Model)]


@pytest.mark.parametrize('field', KNOBS)
def test_every_field_changes_the_program_or_the_parameters(field):
    objective, cfg, value = KNOBS[field]
    assert getattr(cfg, field) != value
    assert trace(objective, dataclasses.replace(cfg, **{field: value})) != trace(objective, cfg)


@pytest.mark.parametrize('field, objective, cfg, value', FURTHER)
def test_a_field_changes_the_program_wherever_it_applies(field, objective, cfg, value):
    assert trace(objective, dataclasses.replace(cfg, **{field: value})) != trace(objective, cfg)


@pytest.mark.parametrize('objective, cfg', dict.fromkeys(knob[:2] for knob in KNOBS.values()))
def test_the_same_configuration_gives_the_same_program(objective, cfg):
    assert trace.__wrapped__(objective, cfg) == trace(objective, cfg)


@pytest.mark.parametrize('field', [name for name in choices.TABLES if name.startswith('model.')])
def test_every_key_of_a_table_is_a_program_of_its_own(field):
    name = field.removeprefix('model.')
    objective, cfg, _ = KNOBS[name]
    if name == 'tied_embeddings':
        objective, cfg = 'seq2seq', dataclasses.replace(BOTH, encoder_vocab_size=11)
    if name == 'family':
        return
    traces = [trace(objective, dataclasses.replace(cfg, **{name: key})) for key in choices.TABLES[field]]
    assert all(a != b for i, a in enumerate(traces) for b in traces[:i])
