"""The recipes to add a part, carried out as docs/how-to/extend.md prints them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tformer
from places import ROOT
from tformer import checks, config
from tformer.config import Config, Model
from tformer.config.tasks import TASKS
from tformer.distributed.sharding import unboxed
from tformer.errors import UserError
from tformer.layers import mlp, norms, positions, rope_scalings
from tformer.model import build
from tformer.objectives import LOSSES, Loss, loss_chunk, token_scores
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import SCHEDULES

PAGE = (ROOT / 'docs' / 'how-to' / 'extend.md').read_text()
BLOCKS = re.findall(r'in `tformer/layers/(\w+)\.py`:\n\n```python\n(.*?)```', PAGE, re.DOTALL)
MODULES = {'mlp': (mlp, mlp.ACTIVATIONS), 'norms': (norms, norms.NORMS), 'positions': (positions, positions.POSITIONS)}
FIELDS = {'mlp': {'activation': 'mish'}, 'norms': {'norm': 'prmsnorm'}, 'positions': {'position': 'kerple'}}
ROTARY = re.findall(r'```python\n(def halved_angles.*?)```', PAGE, re.DOTALL)
RECIPES = [*((name, code, FIELDS[name]) for name, code in BLOCKS), ('positions', *ROTARY, {'position': 'halved_rope'})]
FILES = dict(re.findall(r'`(my_\w+\.py)`:\n\n```python\n(.*?)```', PAGE, re.DOTALL))

SMALL = {'model.vocab_size': '64', 'model.dropout_rate': '0'}


def test_there_are_three():
    assert [name for name, _ in BLOCKS] == list(MODULES)


def test_the_readme_shows_the_first():
    assert f'```python\n{BLOCKS[0][1]}```' in (ROOT / 'README.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('name, code, choice', RECIPES)
def test_a_recipe_makes_a_key_that_is_valid_causal_and_trained(name, code, choice):
    module, table = MODULES[name]
    fields = {'vocab_size': 17, 'emb_dim': 16, 'mlp_dim': 24, 'num_decoder_layers': 2, 'max_len': 16, **choice}
    cfg = Config(model=Model(**fields), train=config.Train(num_steps=1), data=config.Data(length=8))
    with pytest.raises(UserError, match='is unknown'):
        checks.check_here(cfg)
    before = dict(table), set(vars(module))
    try:
        exec(code, vars(module))
        checks.check_here(cfg)
        check(cfg.model)
    finally:
        for key in set(table) - set(before[0]):
            del table[key]
        for key in set(vars(module)) - before[1]:
            delattr(module, key)


def defined(monkeypatch, file, **rows):
    """What a file of the page defines; the rows that it adds to tables leave them after the test."""
    for key, table in rows.items():
        monkeypatch.setitem(table, key, None)
    names = {}
    exec(FILES[file], names)
    return names


def test_the_optimizer_and_the_schedule_are_what_they_say(monkeypatch):
    names = defined(monkeypatch, 'my_training.py', signum=OPTIMIZERS, triangle=SCHEDULES)
    steps = jnp.asarray([0, 5, 10, 15, 20])
    rates = names['triangle'](steps, 2.0, 3, num_steps=20, final=0.1, decay=0.2, emb_dim=8)
    np.testing.assert_allclose(rates, [0, 1, 2, 1.1, 0.2], atol=1e-6)
    direction = names['signum'](config.Optimizer(momentum=0.5), None)
    state = direction.init(jnp.zeros(3))
    for grads, signs in (([4.0, -4.0, 0.0], [1, -1, 0]), ([-1.0, 3.0, 2.0], [1, 1, 1])):
        step, state = direction.update(jnp.asarray(grads), state)
        assert step.tolist() == signs


def test_the_loss_is_that_of_the_paper(monkeypatch):
    names = defined(monkeypatch, 'my_objective.py', focal=LOSSES, focal_classification=TASKS)
    p = np.asarray([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]], np.float32)
    batch = {'labels': jnp.asarray([0, 0, 1]), 'label_weights': jnp.asarray([1.0, 1.0, 0.0])}
    total, weight = names['focal_scores'](jnp.log(p), batch)['loss']
    np.testing.assert_allclose(total, -0.01 * np.log(0.9) - 0.49 * np.log(0.3), rtol=1e-5)
    assert weight == 2 and TASKS['focal_classification'].loss == 'focal'


def test_a_loss_that_needs_whole_logits_gets_them(monkeypatch):
    """Such as one with the entropy of each token's distribution; of the tokens' own losses statistics are enough."""

    def flat_scores(logits_BTV, batch, *_):
        log_p_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
        entropies_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, -1)
        found = token_scores(logits_BTV, batch)
        total, weight = found['loss']
        return {**found, 'loss': (total - 0.1 * jnp.sum(entropies_BT * batch['weights']), weight)}

    monkeypatch.setitem(LOSSES, 'flat', Loss(flat_scores))
    monkeypatch.setitem(TASKS, 'flat_lm', TASKS['causal_lm']._replace(loss='flat'))
    cfg = tformer.load_config(f'{ROOT}/configs/lm_stdlib.py:smoke', {'train.objective': 'flat_lm'})
    wide = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=2**20))
    assert loss_chunk(wide) is None
    own = dataclasses.replace(wide, train=dataclasses.replace(cfg.train, objective='causal_lm'))
    assert loss_chunk(own) == 'auto'
    fields = {**SMALL, 'train.objective': 'flat_lm'}
    with pytest.raises(UserError, match=r'train\.loss_chunk=2 has no effect here'):
        tformer.load_config(f'{ROOT}/configs/lm_stdlib.py:smoke', {**fields, 'train.loss_chunk': '2'})
    cfg = tformer.load_config(f'{ROOT}/configs/lm_stdlib.py:smoke', fields)
    batch = tformer.random_batch(cfg)
    state = tformer.new_state(cfg, batch)
    logits = build(cfg.model).apply({'params': state.params}, batch)
    total, weight = flat_scores(logits, batch)['loss']
    _, metrics = tformer.train_step(cfg)(state, batch)
    np.testing.assert_allclose(metrics['loss'], total / weight, rtol=1e-5)


def test_a_rotary_scaling_that_reads_no_factor_needs_none(monkeypatch):
    halved = rope_scalings.RopeScaling(lambda frequencies: frequencies / 2)
    monkeypatch.setitem(rope_scalings.ROPE_SCALINGS, 'halved', halved)
    fields = {'vocab_size': 17, 'emb_dim': 16, 'mlp_dim': 24, 'num_decoder_layers': 2, 'max_len': 16}
    model = Model(**fields, position='rope', rope_scaling='halved')
    checks.check_here(Config(model=model, train=config.Train(num_steps=1), data=config.Data(length=8)))


def check(cfg):
    model = build(cfg)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 17, (1, 8)))
    params = unboxed(model.init(jax.random.key(0), {'inputs': tokens}))

    @jax.jit
    def logits_and_gradient(params, tokens):
        def loss(params):
            logits = model.apply(params, {'inputs': tokens})
            return jnp.sum(jax.nn.log_softmax(logits)[..., 3]), logits

        grads, logits = jax.grad(loss, has_aux=True)(params)
        return logits, grads

    logits, grads = logits_and_gradient(params, tokens)
    assert all(np.abs(grad).max() > 0 for grad in jax.tree.leaves(grads))
    moved = np.any(logits_and_gradient(params, tokens.at[0, 4].set(0))[0] != logits, -1)[0]
    assert moved.tolist() == [False] * 4 + [True] * 4
