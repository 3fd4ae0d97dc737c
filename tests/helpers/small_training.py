"""A small config, batch and train step of each objective."""

import dataclasses

import numpy as np

from tformer import checks, config
from tformer.config import Config, Model, Train
from tformer.distributed import sharding
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training.state import logical_names, make_init
from tformer.training.step import make_train_step

V, T, S, ROWS = 17, 8, 6, 8

FAMILY = {
    'causal_lm': 'decoder',
    'masked_lm': 'encoder',
    'masked_lm_nsp': 'encoder',
    'replaced_token': 'encoder',
    'seq2seq': 'encoder_decoder',
    'classification': 'encoder',
    'regression': 'encoder',
    'token_classification': 'encoder',
    'question_answering': 'encoder',
}

BY_SEQUENCE = ('classification', 'regression', 'question_answering')  # a row is one example, and weighs 1

TINY = Model(vocab_size=V, emb_dim=16, mlp_dim=32, num_heads=2, max_len=16)

LAYERS = {
    'encoder': {'num_encoder_layers': 2, 'num_classes': 3, 'output_bias': True},
    'decoder': {'num_decoder_layers': 2},
    'encoder_decoder': {'num_encoder_layers': 2, 'num_decoder_layers': 2},
}


def make_config(objective, **sections):
    """A resolved config; a section is the fields that differ from the small default, or a dataclass."""
    family = FAMILY[objective]
    model = dataclasses.replace(TINY, family=family, **LAYERS[family], **sections.get('model', {}))
    train = Train(objective=objective, num_steps=20, batch_size=ROWS, **sections.get('train', {}))
    base = Config(model=model, train=train, optimizer=sections.get('optimizer', config.Optimizer()))
    base = dataclasses.replace(base, data=config.Data(length=T), decode=config.Decode(max_len=8))
    return checks.resolve(base, vocab_size=V)


def make_batch(objective, seed=0, rows=ROWS):
    """Rows of unequal length, so that parts of a batch weigh unequally; the last row is empty."""
    rng, batch = np.random.default_rng(seed), {}
    for prefix, length in {'encoder_': S, '': T}.items():
        if prefix and objective != 'seq2seq':
            continue
        lengths = rng.integers(1, length + 1, rows)
        lengths[0], lengths[-1] = length, 0
        real = np.arange(length)[None] < lengths[:, None]
        batch[f'{prefix}inputs'] = np.where(real, rng.integers(1, V, (rows, length)), 0).astype(np.int32)
        batch[f'{prefix}positions'] = np.where(real, np.arange(length)[None], -1).astype(np.int32)
    if objective in (*BY_SEQUENCE, 'masked_lm_nsp'):
        draw = {'regression': rng.random(rows, np.float32), 'masked_lm_nsp': rng.integers(0, 2, rows, np.int32)}
        draw['question_answering'] = np.stack([lengths // 2, np.maximum(lengths - 1, 0)], 1).astype(np.int32)
        labels = draw.get(objective, rng.integers(0, 3, rows, np.int32))
        batch |= {'labels': labels, 'label_weights': (lengths > 0).astype(np.float32)}
    weights, targets = real.astype(np.float32), rng.integers(1, V, (rows, T), np.int32)
    if objective in ('masked_lm_nsp', 'replaced_token'):
        weights = real * (rng.random((rows, T)) < 0.5).astype(np.float32)
    elif objective == 'token_classification':
        targets = targets % 3
    elif objective == 'question_answering':
        return batch | {'weights': weights}
    return batch if objective in BY_SEQUENCE else batch | {'targets': targets, 'weights': weights}


class Trainer:
    """A config's model, its initial state and its step, not yet jitted."""

    def __init__(self, cfg, optimizer=None):
        self.cfg, self.hyper = cfg, Hyperparameters.of(cfg)
        self.model, self.objective = build(cfg.model), OBJECTIVES[cfg.train.objective]
        if optimizer is None:
            optimizer = make_optimizer(cfg, logical_names(self.model, self.objective, make_batch(cfg.train.objective)))
        self.optimizer = optimizer
        self.step = make_train_step(self.model, self.objective, self.optimizer, cfg)
        self._init = make_init(self.model, self.objective, self.optimizer)

    def start(self, hyper=None):
        hyper = self.hyper if hyper is None else hyper
        return sharding.unboxed(self._init(hyper, make_batch(self.cfg.train.objective)))

    def decided(self, state):
        """The state with a generator that draws one token always: what is drawn differs from part to part."""
        if 'generator' in state.params:
            head = state.params['generator']['head']
            head = {**head, 'bias': head['bias'].at[3].set(30.0)}
            generator = {**state.params['generator'], 'head': head}
            return state.replace(params={**state.params, 'generator': generator})
        return state
