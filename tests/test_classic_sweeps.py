"""Sweeps of what papers print: the sizes in their tables, and that every arm makes a training step."""

import functools
import pathlib

import jax
import numpy as np
import pytest
import recipes

from tformer import benchmark, choices, config
from tformer.data import corrupt
from tformer.lab import matching, trials
from tformer.layers.dropout import Rates
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.sharding import unboxed

ROOT = pathlib.Path(__file__).parent.parent
FINDINGS = ('batchnorm', 'grokking', 'heads', 'label_smoothing', 'positions', 'warmup')
CLASSIC = ('attention_is_all_you_need', 'bert_tasks', 't5_architectures', 't5_denoising', 'gqa')


@functools.cache
def load(sweep: str) -> list[trials.Trial]:
    name, colon, size = sweep.partition(':')
    return trials.load(f'{recipes.FOLDER}/sweeps/{name}.py{colon}{size}')[1]


# ------------------------------------------------------------------------------------------------------- the arms


@pytest.mark.parametrize('sweep', [*CLASSIC, 'grokking', 'mutransfer'])
def test_every_arm_makes_a_training_step(sweep: str) -> None:
    """Traced, not compiled, at the size `smoke`."""
    for trial in load(f'{sweep}:smoke'):
        resolved = benchmark.assumed(trial.config)
        choices.validate(resolved)
        model, objective = build(resolved.model), OBJECTIVES[resolved.train.objective]
        batch = benchmark.random_batch(resolved)
        params = jax.eval_shape(functools.partial(model.init, method=objective.method), jax.random.key(0), batch)
        grads = jax.eval_shape(jax.grad(functools.partial(loss, model, objective)), unboxed(params), batch)
        assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, unboxed(params)), trial.name


def loss(model, objective, variables, batch):
    weighed = objective.weigh(batch, objective.second_weight)
    return objective.scores(model.apply(variables, weighed, Rates(), method=objective.method), weighed)['loss'][0]


@pytest.mark.parametrize('sweep', FINDINGS)
def test_a_finding_needs_no_files_and_has_seeds(sweep: str) -> None:
    made = load(sweep)
    arms = {trial.name for trial in made}
    seeds = {name: {trial.seed for trial in made if trial.name == name} for name in arms}
    assert len(arms) >= 2 and all(each >= {0, 1, 2} for each in seeds.values())
    assert {trial.config.data.source for trial in made} <= {'cmudict', 'stdlib', 'algorithmic'}


@pytest.mark.parametrize('sweep', [f'{name}:small' for name in CLASSIC])
def test_what_a_laptop_runs_is_small(sweep: str) -> None:
    for trial in load(sweep):
        assert matching.num_parameters(trial.config) < 4e6 and trial.config.train.num_steps <= 1000
        assert sweep == 'attention_is_all_you_need:small' or trial.config.data.source == 'stdlib'


# ------------------------------------------------------------------------------------------ what the papers print


def test_the_parameters_of_table_3() -> None:
    """Vaswani et al. 2017: with the 41,100 tokens that base's 65 million imply, B and C follow; `big` has fewer."""
    *rows, big = load('attention_is_all_you_need')
    tokens = {'model.vocab_size': 41_100, 'model.encoder_vocab_size': 41_100}
    counts = [matching.num_parameters(config.override(trial.config, tokens)) for trial in rows]
    base, A, B, C, D, E = counts[0], counts[1:5], counts[5:7], counts[7:14], counts[14:18], counts[18]
    millions = [round(number / 1e6) for number in (base, *B, *C)]
    assert millions == [65, 58, 60, 36, 50, 80, 28, 168, 53, 90]
    assert {*A, *D} == {base} and base + 2 * 512 * 512 == E  # a learned vector for each position of each side
    assert 213e6 < matching.num_parameters(big.config) < 215e6
    assert big.config.train.num_steps == 300_000 and big.config.model.dropout_rate == 0.3
    assert {trial.config.train.num_steps for trial in rows} == {100_000}


def test_t5s_architectures_have_the_parameters_that_table_2_says() -> None:
    """Encoder-decoder 2P, half of it and one stack P (Raffel et al. 2020)."""
    counts = [matching.num_parameters(trial.config) for trial in load('t5_architectures')]
    two, half, alone, prefix = counts[:4]
    assert counts[4:] == counts[:4] and alone == prefix
    assert two / alone == pytest.approx(2, rel=0.15) and half / alone == pytest.approx(1.13, rel=0.1)


@pytest.mark.parametrize('sweep, given', [('t5_denoising', 512), ('t5_denoising:small', 128)])
def test_a_corrupted_text_fills_its_row(sweep: str, given: int) -> None:
    """And with what was hidden in it the other row, as far as whole tokens go."""
    spans = [trial.config.data for trial in load(sweep) if trial.config.train.objective == 'span_corruption']
    assert len(spans) == 8 and {data.encoder_length for data in spans} == {given}
    sizes = np.arange(2, 2 * given)
    for data in spans:
        hidden, number = corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)
        fits = (sizes - hidden + number + 1 <= given) & (hidden + number + 1 <= data.length)
        most = np.flatnonzero(fits)[-1]
        assert sizes[most] - hidden[most] + number[most] + 1 >= given - 1
        assert hidden[most] + number[most] + 1 >= data.length - 4
        assert number[most] < (data.sentinels or 100)
    rates = [data.mask_rate for data in spans]
    assert rates == [0.15, 0.1, 0.25, 0.5, 0.15, 0.15, 0.15, 0.15]
    assert [data.mean_span_length for data in spans[4:]] == [2, 3, 5, 10]


def test_arms_of_the_same_flops_have_them() -> None:
    flops = np.array([matching.num_flops(trial.config) for trial in load('scaling:isoflop')]).reshape(3, 5)
    np.testing.assert_allclose(flops, flops[:, :1] * np.ones(5), rtol=0.03)
    sizes = {matching.num_parameters(trial.config) for trial in load('scaling:isoflop')}
    assert len(sizes) == 7
    grid = [(matching.num_parameters(t.config), matching.num_tokens(t.config)) for t in load('scaling')]
    assert len(set(grid)) == 16 and len({size for size, _ in grid}) == len({tokens for _, tokens in grid}) == 4


def test_muTransfer_widens_from_its_base_and_heads_stay_as_they_are() -> None:
    for sweep, base in (('mutransfer', 32), ('mutransfer:paper', 128)):
        made = [trial.config for trial in load(sweep)]
        assert {one.model.base_emb_dim for one in made} == {None, base} and min(o.model.emb_dim for o in made) == base
        assert len({one.model.emb_dim // one.model.num_heads for one in made}) == 1
        assert len({one.model.mlp_dim / one.model.emb_dim for one in made}) == 1
