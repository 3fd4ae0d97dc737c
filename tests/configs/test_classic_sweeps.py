"""Sweeps of what papers print: the sizes in their tables, and that every arm makes a training step."""

import functools

import jax
import numpy as np
import pytest

import recipes
from small_sweeps import loaded
from tformer import checks, config
from tformer.data.examples import corrupt
from tformer.distributed.sharding import unboxed
from tformer.errors import UserError
from tformer.lab.sweep import matching, trials
from tformer.layers.dropout import DropoutRates
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import dummy_batch

FINDINGS = ('batchnorm', 'grokking', 'heads', 'label_smoothing', 'positions', 'warmup')
SLOW = {'recurrent': pytest.mark.proof}  # many sizes are traced until they match
CLASSIC = ('attention_is_all_you_need', 'bert_tasks', 't5_architectures', 't5_denoising', 'gqa')


@functools.cache
def load(sweep: str) -> list[trials.Trial]:
    name, colon, size = sweep.partition(':')
    return loaded(f'{recipes.FOLDER}/sweeps/{name}.py{colon}{size}')[1]


# ------------------------------------------------------------------------------------------------------- the arms


@pytest.mark.proof
@pytest.mark.parametrize('sweep', [*CLASSIC, 'grokking', 'mutransfer'])
def test_every_arm_makes_a_training_step(sweep: str) -> None:
    """Traced, not compiled, at the size `smoke`."""
    for trial in load(f'{sweep}:smoke'):
        resolved = dummy_batch.assumed(trial.config)
        checks.check_here(resolved)
        model, objective = build(resolved.model), OBJECTIVES[resolved.train.objective]
        batch = dummy_batch.random_batch(resolved)
        params = jax.eval_shape(functools.partial(model.init, method=objective.method), jax.random.key(0), batch)
        grads = jax.eval_shape(jax.grad(functools.partial(loss, model, objective)), unboxed(params), batch)
        assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, unboxed(params)), trial.name


def loss(model, objective, variables, batch):
    weighed = objective.weigh(batch, objective.second_weight)
    return objective.scores(model.apply(variables, weighed, DropoutRates(), method=objective.method), weighed)['loss'][
        0
    ]


@pytest.mark.parametrize('sweep', FINDINGS)
def test_a_finding_needs_no_files_and_has_seeds(sweep: str) -> None:
    made = load(sweep)
    arms = {trial.name for trial in made}
    first, *others = [{trial.seed for trial in made if trial.name == name} for name in sorted(arms)]
    assert others and len(first) >= 3 and all(seeds == first for seeds in others)
    assert {trial.config.data.source for trial in made} <= {'cmudict', 'stdlib', 'algorithmic'}


@pytest.mark.slow
@pytest.mark.parametrize('sweep', [f'{name}:small' for name in CLASSIC])
def test_what_a_laptop_runs_is_small(sweep: str) -> None:
    for trial in load(sweep):
        assert matching.num_parameters(trial.config) < 4e6 and trial.config.train.num_steps <= 1000
        assert sweep == 'attention_is_all_you_need:small' or trial.config.data.source == 'stdlib'


# ------------------------------------------------------------------------------------------ what the papers print


TABLE_3 = [  # Vaswani et al. 2017: N, d_model, d_ff, h, d_k, d_v, P_drop, epsilon_ls, positions, steps
    (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),  # base
    (6, 512, 2048, 1, 512, 512, 0.1, 0.1, 'sinusoidal', 100_000),  # A
    (6, 512, 2048, 4, 128, 128, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 2048, 16, 32, 32, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 2048, 32, 16, 16, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 2048, 8, 16, 64, 0.1, 0.1, 'sinusoidal', 100_000),  # B
    (6, 512, 2048, 8, 32, 64, 0.1, 0.1, 'sinusoidal', 100_000),
    (2, 512, 2048, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),  # C
    (4, 512, 2048, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),
    (8, 512, 2048, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 256, 2048, 8, 32, 32, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 1024, 2048, 8, 128, 128, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 1024, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 4096, 8, 64, 64, 0.1, 0.1, 'sinusoidal', 100_000),
    (6, 512, 2048, 8, 64, 64, 0.0, 0.1, 'sinusoidal', 100_000),  # D
    (6, 512, 2048, 8, 64, 64, 0.2, 0.1, 'sinusoidal', 100_000),
    (6, 512, 2048, 8, 64, 64, 0.1, 0.0, 'sinusoidal', 100_000),
    (6, 512, 2048, 8, 64, 64, 0.1, 0.2, 'sinusoidal', 100_000),
    (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 'learned', 100_000),  # E
    (6, 1024, 4096, 16, 64, 64, 0.3, 0.1, 'sinusoidal', 300_000),  # big
]


def test_the_rows_of_table_3() -> None:
    rows = []
    for trial in load('attention_is_all_you_need'):
        model, train = resolve_model(trial.config.model), trial.config.train
        assert model.num_encoder_layers == model.num_decoder_layers and model.num_kv_heads == model.num_heads
        rows.append((
            model.num_encoder_layers, model.emb_dim, model.mlp_dim, model.num_heads, model.head_dim, model.value_dim,
            model.dropout_rate, train.label_smoothing, model.position, train.num_steps,
        ))  # fmt: skip
    assert rows == TABLE_3


DECODER = {
    'model.family': 'decoder', 'model.encoder_vocab_size': None, 'model.num_encoder_layers': 4, 'model.max_len': 692,
    'data.length': 692, 'data.encoder_length': None,
}  # fmt: skip
HALF = {'model.num_encoder_layers': 6, 'model.num_decoder_layers': 6}
ROOM = {'model.vocab_size': 32_200, 'model.encoder_vocab_size': 32_200, 'model.max_len': 768, 'data.sentinels': 200}
GATES = {'model.emb_dim': 64, 'model.mlp_bias': False, 'train.num_steps': 650, 'train.eval_every': 325}
STATED = {  # what each arm changes of its recipe, besides the seed
    'bert_tasks': [
        {},
        {'train.objective': 'masked_lm'},
        {
            'model.family': 'decoder', 'model.num_encoder_layers': 4, 'model.num_decoder_layers': 12,
            'model.num_token_types': None, 'train.objective': 'causal_lm',
        },
    ],
    't5_architectures': [
        {'data.length': 180, 'data.mean_span_length': 1 / 0.85},
        {**HALF, 'data.length': 180, 'data.mean_span_length': 1 / 0.85},
        {**DECODER, 'data.mean_span_length': 1 / 0.85, 'data.bidirectional_prefix': False},
        {**DECODER, 'data.mean_span_length': 1 / 0.85},
        {'data.length': 512, 'train.objective': 'prefix_lm'},
        {**HALF, 'data.length': 512, 'train.objective': 'prefix_lm'},
        {**DECODER, 'train.objective': 'causal_lm'},
        {**DECODER, 'train.objective': 'prefix_lm'},
    ],
    't5_denoising': [
        {**ROOM, 'data.length': 148, 'data.mean_span_length': 1 / 0.85},
        {**ROOM, 'data.length': 512, 'train.objective': 'prefix_lm'},
        {**ROOM, 'data.length': 512, 'train.objective': 'denoising', 'data.noise': ('mask',)},
        {**ROOM, 'data.length': 101, 'data.mask_rate': 0.1, 'data.mean_span_length': 1 / 0.9},
        {**ROOM, 'data.length': 241, 'data.mask_rate': 0.25, 'data.mean_span_length': 1 / 0.75},
        {**ROOM, 'data.length': 513, 'data.mask_rate': 0.5, 'data.mean_span_length': 2.0},
        {**ROOM, 'data.length': 127, 'data.mean_span_length': 2.0},
        {**ROOM, 'data.length': 116},  # spans of 3 are the recipe's
        {**ROOM, 'data.length': 107, 'data.mean_span_length': 5.0},
        {**ROOM, 'data.length': 100, 'data.mean_span_length': 10.0},
    ],
    'gqa': [{}, {'model.num_kv_heads': 8}, {'model.num_kv_heads': 4}, {'model.num_kv_heads': 1}],
    'glu': [
        {**GATES, 'model.mlp_dim': 256},
        {**GATES, 'model.mlp_dim': 256, 'model.activation': 'gelu'},
        {**GATES, 'model.mlp_dim': 256, 'model.activation': 'silu'},
        {**GATES, 'model.mlp_dim': 171, 'model.activation': 'glu'},
        {**GATES, 'model.mlp_dim': 171, 'model.activation': 'reglu'},
        {**GATES, 'model.mlp_dim': 171, 'model.activation': 'geglu'},
        {**GATES, 'model.mlp_dim': 171, 'model.activation': 'swiglu'},
    ],
}  # fmt: skip
RECIPES = {  # what is not stated above
    'bert_tasks': {
        'model.family': 'encoder', 'model.num_encoder_layers': 12, 'model.emb_dim': 768, 'model.mlp_dim': 3072,
        'model.num_heads': 12, 'data.length': 128, 'train.objective': 'masked_lm_nsp', 'train.batch_size': 256,
        'train.num_steps': 900_000,
    },
    't5_architectures': {
        'model.family': 'encoder_decoder', 'model.num_encoder_layers': 12, 'model.num_decoder_layers': 12,
        'model.emb_dim': 768, 'model.mlp_dim': 3072, 'model.num_heads': 12, 'model.head_dim': 64,
        'data.encoder_length': 512, 'data.mask_rate': 0.15, 'data.mean_span_length': 3.0,
        'data.bidirectional_prefix': True, 'train.objective': 'span_corruption', 'train.batch_size': 128,
        'train.num_steps': 524_288,
    },
    'gqa': {
        'model.family': 'encoder_decoder', 'model.num_encoder_layers': 24, 'model.num_decoder_layers': 24,
        'model.emb_dim': 1024, 'model.mlp_dim': 2816, 'model.num_heads': 16, 'model.head_dim': 64,
        'model.num_kv_heads': None,
    },
    'glu': {'model.activation': 'relu'},
}  # fmt: skip
RECIPES['t5_denoising'] = RECIPES['t5_architectures']


@pytest.mark.slow
@pytest.mark.parametrize('sweep', STATED)
def test_the_rows_of_the_other_tables(sweep: str) -> None:
    """Devlin et al. 2019, 5; Raffel et al. 2020, 2 and 4 to 7; Ainslie et al. 2023's heads; Shazeer 2020, 1."""
    base, made = loaded(f'{recipes.FOLDER}/sweeps/{sweep}.py')
    assert [trial.overrides for trial in made if trial.seed == 0] == STATED[sweep]
    assert config.override(base, RECIPES[sweep]) == base


VALUES = {  # of what a sweep varies alone, arm by arm
    'norms': {
        'model.norm': ['layernorm'] * 3 + ['rmsnorm'] * 3,
        'model.norm_placement': ['pre', 'post', 'sandwich', 'pre', 'post', 'sandwich'],
    },
    'positions': {'model.position': ['sinusoidal', 'learned', 'rope', 'alibi', 'relative', None]},
    'heads': {'model.num_heads': [8, 4, 2, 1]},
    'gqa:small': {
        'model.num_kv_heads': [None, 4, 2, 1, None],
        'model.kv_latent_dim': [None, None, None, None, 48],
        'model.rotary_dim': [None, None, None, None, 16],
    },
    'label_smoothing': {'train.label_smoothing': [0.0, 0.1, 0.2]},
    'grokking': {'optimizer.weight_decay': [1.0, 0.0]},
    'warmup': {
        'model.norm_placement': ['post', 'post', 'pre', 'pre'],
        'optimizer.warmup_steps': [100, 0, 100, 0],
    },
    'batchnorm': {
        'model.norm': ['layernorm', 'batchnorm', 'layernorm', 'batchnorm'],
        'model.norm_placement': ['pre', 'pre', 'post', 'post'],
    },
    'recurrent': {
        'model.recurrence': [None, 'rnn', 'lstm', 'gru', 'lstm', 'lstm', 'lstm'],
        'model.bidirectional': [False, False, False, False, True, True, True],
        'model.recurrent_attention': [None, None, None, None, None, 'dot', 'additive'],
        'model.emb_dim': [64, 166, 84, 98, 90, 88, 84],
        'model.mlp_dim': [256, 1024, 1024, 1024, 1024, 1024, 1024],  # of cells the field's default
    },
}


@pytest.mark.parametrize('sweep', [pytest.param(name, marks=SLOW.get(name, ())) for name in VALUES])
def test_what_a_sweep_varies(sweep: str) -> None:
    made = load(sweep)
    baseline, *others = arms = [trial.config for trial in made if trial.seed == made[0].seed]
    assert {name for arm in others for name in config.difference(baseline, arm)} == VALUES[sweep].keys()
    for name, values in VALUES[sweep].items():
        section, field = name.split('.')
        assert [getattr(getattr(arm, section), field) for arm in arms] == values


@pytest.mark.parametrize('sweep', VALUES)
def test_a_size_that_a_sweep_does_not_have_is_refused(sweep: str) -> None:
    with pytest.raises(UserError, match=r"size='smke' is unknown; did you mean 'smoke'\?"):
        load(f'{sweep.partition(":")[0]}:smke')


@pytest.mark.slow
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


@pytest.mark.slow
def test_arms_of_the_same_flops_have_them() -> None:
    flops = np.array([matching.num_flops(trial.config) for trial in load('scaling:isoflop')]).reshape(3, 5)
    np.testing.assert_allclose(flops, flops[:, :1] * np.ones(5), rtol=0.03)
    sizes = {matching.num_parameters(trial.config) for trial in load('scaling:isoflop')}
    assert len(sizes) == 7
    grid = [(matching.num_parameters(t.config), matching.num_tokens(t.config)) for t in load('scaling')]
    assert len(set(grid)) == 16 and len({size for size, _ in grid}) == len({tokens for _, tokens in grid}) == 4


@pytest.mark.slow
def test_muTransfer_widens_from_its_base_and_heads_stay_as_they_are() -> None:
    for sweep, base in (('mutransfer', 32), ('mutransfer:large', 128)):
        made = [trial.config for trial in load(sweep)]
        assert {one.model.base_emb_dim for one in made} == {None, base} and min(o.model.emb_dim for o in made) == base
        assert len({one.model.emb_dim // one.model.num_heads for one in made}) == 1
        assert len({one.model.mlp_dim / one.model.emb_dim for one in made}) == 1
