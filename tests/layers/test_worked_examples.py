"""The numbers that papers and textbooks print, reproduced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tformer import config
from tformer.config import Config, Model
from tformer.config.run import Data, Train
from tformer.data.examples import example_arrays, example_formats
from tformer.data.tokenizers.bytes_and_characters import Symbol
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import BOS, EOS
from tformer.layers import block, masks, norms, placements
from tformer.layers.attention import Attention, AttentionContext
from tformer.layers.class_scores import cross_entropy
from tformer.layers.initializers import deepnorm
from tformer.layers.kernels import ScoreOptions, attend, probabilities
from tformer.layers.masks import AttentionMask
from tformer.layers.positions import (
    alibi_slopes,
    relative_bucket,
    rotary_angles,
    rotary_frequencies,
    rotate,
    sinusoidal,
)
from tformer.layers.resolved import resolve_model
from tformer.layers.rope_scalings import llama3_scaling
from tformer.model import build
from tformer.optim import schedules
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.state import count_parameters

# Vaswani et al. 2017, 3.5, with d = 4: rows are positions 0, 1, 2.
ENCODING = [[0, 1, 0, 1], [0.841, 0.540, 0.010, 1.000], [0.909, -0.416, 0.020, 0.9998]]

# Three tokens, d = 4.
Q = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
K = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]]
VALUES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
SCORES = [[1, 1, 2], [1, 1, 0], [2, 0, 1]]
WEIGHTS = [[0.27407, 0.27407, 0.45186], [0.38365, 0.38365, 0.23270], [0.50648, 0.18632, 0.30720]]
FIRST_COLUMN = [5.71118, 4.39618, 4.20286]


def attention_probabilities(q, k, mask):
    return probabilities(q, k, mask, ScoreOptions(q.shape[-1] ** -0.5))


def heads(rows):
    return jnp.asarray(rows, jnp.float32)[None, None]


def test_sinusoidal_encoding_for_width_four():
    found = sinusoidal(jnp.arange(3)[None], 4)[0]
    assert np.allclose(found, ENCODING, atol=5e-4)
    assert np.allclose(found[2], [np.sin(2), np.cos(2), np.sin(0.02), np.cos(0.02)], atol=1e-6)


def test_a_shift_turns_every_sinusoidal_pair_by_one_angle():
    """PE(pos + k) is a linear function of PE(pos) (Vaswani et al. 2017, 3.5)."""
    table = np.asarray(sinusoidal(jnp.arange(40)[None], 8)[0], np.float64).reshape(40, 4, 2)
    sin, cos = table[7, :, 0], table[7, :, 1]
    turned = np.stack([table[..., 0] * cos + table[..., 1] * sin, table[..., 1] * cos - table[..., 0] * sin], -1)
    assert np.allclose(turned[:33], table[7:], atol=1e-5)


def test_attention_of_three_tokens():
    q, k, v = heads(Q), heads(K), heads(VALUES)
    assert np.array_equal(np.asarray(Q) @ np.asarray(K).T, SCORES)
    everyone = jnp.ones((1, 3, 3), bool)
    probs = attention_probabilities(q, k, everyone)
    assert np.allclose(probs[0, 0, 0], WEIGHTS, atol=6e-6)
    out = attend(probs, v, 1)[0, 0]
    assert np.allclose(out[:, 0], FIRST_COLUMN, atol=1e-5)
    assert np.allclose(np.diff(out, axis=1), 1, atol=1e-5)


def test_causal_attention_of_three_tokens():
    positions = jnp.arange(3)[None]
    mask = masks.attention_mask(positions, positions, causal=True)
    assert np.array_equal(mask[0], np.tril(np.ones((3, 3), bool)))
    probs = np.asarray(attention_probabilities(heads(Q), heads(K), mask)[0, 0, 0])
    assert np.array_equal(probs[0], [1, 0, 0]) and not np.triu(probs, 1).any()
    assert np.allclose(probs[1], [0.5, 0.5, 0]) and np.allclose(probs[2], WEIGHTS[2], atol=6e-6)


def test_grouped_queries_share_keys_in_order():
    """Heads 0, 1 read the first key head and 2, 3 the second (Ainslie et al. 2023, figure 2)."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, n, 3, 4)), jnp.float32) for n in (4, 2))
    mask = jnp.ones((1, 3, 3), bool)
    grouped = attention_probabilities(q, k, mask).reshape(1, 4, 3, 3)
    full = attention_probabilities(q, jnp.repeat(k, 2, axis=1), mask).reshape(1, 4, 3, 3)
    assert np.allclose(grouped, full, atol=1e-6)
    v = k + 1
    assert np.allclose(
        attend(grouped.reshape(1, 2, 2, 3, 3), v, 4), attend(full[:, :, None], jnp.repeat(v, 2, 1), 4), atol=1e-6
    )


@pytest.mark.parametrize('head_dim', [4, 64, 512])
def test_scaled_dot_products_of_unit_vectors_have_unit_variance(head_dim):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 400, head_dim)), jnp.float32) for _ in range(2))
    probs = attention_probabilities(q, k, jnp.ones((1, 400, 400), bool))
    # log softmax is the score less a constant of its row. Over rows, |q|^2 / H varies by 2 / H.
    variance = np.var(np.log(np.asarray(probs[0, 0, 0], np.float64)), axis=-1).mean()
    assert abs(variance - 1) < 4 * (2 / head_dim / 400 + 2 / 400) ** 0.5


def test_rotary_scores_depend_on_the_distance_alone():
    """<R_m q, R_n k> is a function of q, k and n - m (Su et al. 2021, eq. 11), and m = 0 turns nothing."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(m, n):
        turned = [
            rotate(x, rotary_angles(jnp.full((1, 1), at), rotary_frequencies(8, 10_000.0)))
            for x, at in ((q, m), (k, n))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(3, 5) == pytest.approx(score(10, 12), abs=1e-5) == score(0, 2)
    assert score(0, 0) == pytest.approx(float(jnp.sum(q * k)), abs=1e-6)
    assert abs(score(3, 5) - score(5, 3)) > 1e-3
    angle = 3 * 10_000.0 ** -(2 / 8)
    pair = rotate(
        jnp.zeros((1, 1, 1, 8)).at[..., 1].set(1.0), rotary_angles(jnp.full((1, 1), 3), rotary_frequencies(8, 10_000.0))
    )
    assert np.allclose(pair[0, 0, 0, [1, 5]], [np.cos(angle), np.sin(angle)], atol=1e-6)


def test_norms_of_one_vector():
    x = jnp.asarray([[[1.0, 2.0, 3.0, 6.0]]])
    ones, zeros = jnp.ones(4), jnp.zeros(4)
    # Mean 3, variance 3.5; mean square 12.5.
    assert np.allclose(
        norms.layer_norm(x, ones, zeros, 0.0, True)[0, 0], np.asarray([-2, -1, 0, 3]) / 3.5**0.5, atol=1e-6
    )
    assert np.allclose(norms.rms_norm(x, ones, 0.0, True)[0, 0], np.asarray([1, 2, 3, 6]) / 12.5**0.5, atol=1e-6)
    found = norms.layer_norm(x, 2 * ones, 1 + zeros, 0.5, True)[0, 0]
    assert np.allclose(found, 1 + 2 * np.asarray([-2, -1, 0, 3]) / 2.0, atol=1e-6)
    outside = norms.layer_norm(x, ones, zeros, 0.5, False)[0, 0]
    assert np.allclose(outside, np.asarray([-2, -1, 0, 3]) / (3.5**0.5 + 0.5), atol=1e-6)


def test_layer_norm_is_of_a_row_and_batch_norm_of_a_column():
    """Two tokens of two features, and one of padding, which batch normalisation leaves out."""
    x, real = jnp.asarray([[[1.0, 10.0], [3.0, 30.0], [100.0, 100.0]]]), jnp.asarray([[True, True, False]])
    rows = norms.layer_norm(x, jnp.ones(2), jnp.zeros(2), 0.0, True)
    assert np.allclose(rows[0, :2], [[-1, 1], [-1, 1]], atol=1e-6)
    mean, variance = norms.batch_moments(x, real)
    assert np.allclose(mean, [2, 20]) and np.allclose(variance, [1, 100])
    cfg = resolve_model(Model(norm='batchnorm', norm_epsilon=1e-12))
    layer = norms.BatchNorm(cfg)
    variables = nn.unbox(layer.init(jax.random.key(0), x, real))
    columns, updated = layer.apply(variables, x, real, mutable=['statistics'])
    assert np.allclose(columns[0, :2], [[-1, -1], [1, 1]], atol=1e-6)
    assert np.allclose(updated['statistics']['mean'], [0.2, 2]) and np.allclose(
        updated['statistics']['variance'], [0.9 + 0.1, 0.9 + 10]
    )
    running = layer.apply({**variables, **updated}, x, real)
    assert np.allclose(running[0, 0], [0.8 / 1.0, 8 / 10.9**0.5], atol=1e-5)


def test_scale_norm_has_one_length_and_tanh_needs_no_statistics():
    x = jnp.asarray([[[3.0, 4.0]]])
    cfg = resolve_model(Model(norm_epsilon=1e-12))
    layer = norms.ScaleNorm(cfg)
    found = layer.apply(nn.unbox(layer.init(jax.random.key(0), x)), x)
    assert np.allclose(found[0, 0], [2**0.5 * 0.6, 2**0.5 * 0.8], atol=1e-6)
    layer = norms.DyT(cfg)
    assert np.allclose(layer.apply(nn.unbox(layer.init(jax.random.key(0), x)), x)[0, 0], np.tanh([1.5, 2.0]), atol=1e-6)


def test_alibi_slopes_are_the_paper_ones():
    """Press et al. 2022, 3: 1/2, 1/4, ... 1/256 for eight heads; their code's rule where it is no power of two."""
    assert np.allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    assert np.allclose(alibi_slopes(16), [2 ** (-n / 2) for n in range(1, 17)])
    assert np.allclose(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])


def test_relative_buckets_are_exact_near_and_logarithmic_far():
    """Raffel et al. 2020, 2.1: 32 buckets, all beyond 128 alike."""
    one_way = np.asarray(relative_bucket(jnp.arange(-3, 200), 32, 128, False))
    assert one_way[:20].tolist() == [0, 0, 0, *range(17)]
    assert (np.diff(one_way) >= 0).all() and set(one_way) == set(range(32))
    assert (one_way[3 + 128 :] == 31).all() and one_way[3 + 112] < 31
    both_ways = np.asarray(relative_bucket(jnp.arange(-200, 201), 32, 128, True))
    assert set(both_ways[200:]) == set(range(16)) and set(both_ways[:200]) == set(range(17, 32))
    assert both_ways[200 + 7] == 7 and both_ways[200 - 7] == 16 + 7


def test_llama3_scaling_leaves_fast_pairs_and_stretches_slow_ones():
    """Turns in the trained length: above 4 as they were, below 1 divided, between by the share."""
    turns = np.array([100, 4, 2.5, 1, 0.1])
    scaled = llama3_scaling(turns * 2 * np.pi / 8192, 8.0, 8192) * 8192 / (2 * np.pi)
    assert np.allclose(scaled, [100, 4, 0.5 * 2.5 + 0.5 * 2.5 / 8, 1 / 8, 0.1 / 8])


def test_placements_are_their_formulas():
    """Of two sub-layers F and G with norms of their own, alpha 3 and gain 0.5; papers stand where the placements do."""
    x = jnp.asarray([[[1.0, 2.0, 3.0, 6.0]]])

    def F(x):
        return x**2

    def G(x):
        return jnp.sin(x)

    def LN(x):
        return norms.layer_norm(x, jnp.ones(4), jnp.zeros(4), 0.0, True)

    def LN2(x):
        return 2 * LN(x) + 1

    def out(x):
        return x / 7

    subs = [placements.Sublayer(f, norm, out, lambda: jnp.asarray(0.5)) for f, norm in ((F, LN), (G, LN2))]

    def then(first, second):
        return second(first(x))

    expected = {
        'pre': then(lambda x: x + F(LN(x)), lambda x: x + G(LN2(x))),
        'post': then(lambda x: LN(x + F(x)), lambda x: LN2(x + G(x))),
        'sandwich': then(lambda x: x + out(F(LN(x))), lambda x: x + out(G(LN2(x)))),
        'res_post': then(lambda x: x + LN(F(x)), lambda x: x + LN2(G(x))),
        'deepnorm': then(lambda x: LN(3 * x + F(x)), lambda x: LN2(3 * x + G(x))),
        'parallel': x + F(LN(x)) + G(LN(x)),
        'parallel_norms': x + F(LN(x)) + G(LN2(x)),
        'rezero': then(lambda x: x + 0.5 * F(x), lambda x: x + 0.5 * G(x)),
        'no_residual': then(lambda x: F(LN(x)), lambda x: G(LN2(x))),
    }
    assert set(expected) == set(placements.PLACEMENTS)
    for placement, row in placements.PLACEMENTS.items():
        assert np.allclose(row.block(x, subs, 3.0), expected[placement], atol=1e-6), placement


@pytest.mark.parametrize('stack', ['encoder', 'decoder'])
def test_a_deepnorm_block_has_the_factor_of_its_stack(stack):
    cfg = resolve_model(
        Model(
            family='encoder_decoder',
            vocab_size=7,
            emb_dim=8,
            mlp_dim=8,
            num_heads=2,
            num_encoder_layers=5,
            num_decoder_layers=3,
            norm_placement='deepnorm',
        )
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 8)), jnp.float32)
    positions = jnp.arange(3)[None]
    context = AttentionContext(AttentionMask(positions, positions))
    inputs = block.StackInputs(context, dropout_rates=block.DropoutRates(), cross=context, encoded_BSD=x)
    layer = block.Block(cfg, stack, cross=stack == 'decoder')
    args = (None, None, block.PerLayer(), inputs)
    parts = layer.bind(nn.unbox(layer.init(jax.random.key(0), x, *args)))
    alpha, expected = deepnorm(stack, 5, 3)[0], x
    names = ['attention', 'cross_attention', 'mlp'] if stack == 'decoder' else ['attention', 'mlp']
    for name in names:
        part, norm = getattr(parts, name), getattr(parts, f'{name.removesuffix("_attention")}_norm')
        keys = x if name == 'cross_attention' else expected
        found = part(expected) if name == 'mlp' else part(expected, *part.keys_values(keys, None), context)
        expected = norm(alpha * expected + found)
    assert np.allclose(parts(x, *args)[0], expected, atol=1e-5)


@pytest.mark.parametrize('placement', ['pre', 'post'])
def test_a_block_is_its_sublayers_in_their_placement(placement):
    cfg = resolve_model(Model(vocab_size=7, emb_dim=8, mlp_dim=8, num_heads=2, norm_placement=placement))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 8)), jnp.float32)
    positions = jnp.arange(3)[None]
    inputs = block.StackInputs(
        AttentionContext(AttentionMask(positions, positions)), dropout_rates=block.DropoutRates()
    )
    layer = block.Block(cfg, 'decoder')
    args = (None, None, block.PerLayer(), inputs)
    parts = layer.bind(nn.unbox(layer.init(jax.random.key(0), x, *args)))

    def attention(h):
        return parts.attention(h, *parts.attention.keys_values(h, None), inputs.own)

    one, two = parts.attention_norm, parts.mlp_norm
    if placement == 'pre':
        middle = x + attention(one(x))
        expected = middle + parts.mlp(two(middle))
    else:
        middle = one(x + attention(x))
        expected = two(middle + parts.mlp(middle))
    assert np.allclose(parts(x, *args)[0], expected, atol=1e-6)


def test_deepnorm_factors_are_those_of_the_table():
    """Wang et al. 2022, table 1, for an encoder of 18 layers, a decoder of 18, and both."""
    assert deepnorm('encoder', 18, 0) == deepnorm('decoder', 0, 18) == (36**0.25, 144**-0.25)
    alpha, beta = deepnorm('encoder', 18, 18)
    assert alpha == pytest.approx(0.81 * (18**5) ** (1 / 16)) and beta == pytest.approx(0.87 * (18**5) ** (-1 / 16))
    assert deepnorm('decoder', 18, 18) == ((3 * 18) ** 0.25, (12 * 18) ** -0.25)


def test_teacher_forcing_shifts_the_targets_by_one():
    """<SOS> y reads what y <EOS> says."""
    words = Symbol(['y1', 'y2', 'y3'])
    config = Config(data=Data(length=8), train=Train(objective='causal_lm'))
    encoded = example_formats.make(config, Tokenizers(None, words), [{'text': 'y1 y2 y3'}], 'train', True)
    fields, (y1, y2, y3) = example_arrays.next_token(encoded, 0, None), words.encode('y1 y2 y3')
    assert fields['inputs'].tolist() == [BOS, y1, y2, y3] and fields['targets'].tolist() == [y1, y2, y3, EOS]


def test_attention_costs_length_squared_times_width_and_reaches_any_token_in_one_layer():
    """Vaswani et al. 2017, table 1: T^2 d a layer and a path of length 1, by the compiled program's own count."""

    def operations(T, d):
        shapes = jax.ShapeDtypeStruct((1, 1, T, d), jnp.float32), jax.ShapeDtypeStruct((1, T, T), bool)
        attention = jax.jit(lambda x, mask: attend(probabilities(x, x, mask, ScoreOptions(1.0)), x, 1))
        program = attention.lower(*shapes[:1], shapes[1])
        return program.compile().cost_analysis()['flops']

    assert operations(512, 256) / operations(256, 256) == pytest.approx(4, rel=0.02)
    assert operations(256, 1024) / operations(256, 512) == pytest.approx(2, rel=0.02)
    assert operations(512, 256) == pytest.approx(2 * 2 * 512**2 * 256, rel=0.05)

    def first_by_last(x):
        mask = jnp.ones((1, 64, 64), bool)
        return attend(probabilities(x, x, mask, ScoreOptions(1.0)), x, 1)[0, 0, 0].sum()

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 64, 8)), jnp.float32)
    assert np.abs(jax.grad(first_by_last)(x)[0, 0, -1]).max() > 0


# ---------------------------------------------------------------------------------------------------- losses
def test_label_smoothing_of_a_tenth_over_five_classes():
    """Targets 0.92 and 0.02: the loss is theirs, and is least where the model's distribution is theirs."""
    smoothed = np.asarray([0.02, 0.02, 0.92, 0.02, 0.02])
    logits = jnp.asarray(np.random.default_rng(0).standard_normal(5), jnp.float32)
    expected = float(-np.sum(smoothed * jax.nn.log_softmax(logits)))
    assert float(cross_entropy(logits, jnp.asarray(2), 0.1)) == pytest.approx(expected, rel=1e-6)
    gradient = jax.grad(cross_entropy)(logits, jnp.asarray(2), 0.1)
    assert np.allclose(jax.nn.softmax(logits) - gradient, smoothed, atol=1e-6)
    plain = jax.grad(cross_entropy)(logits, jnp.asarray(2), None)
    assert np.allclose(jax.nn.softmax(logits) - plain, [0, 0, 1, 0, 0], atol=1e-6)


def test_the_loss_of_even_odds_is_the_logarithm_of_the_classes():
    assert float(cross_entropy(jnp.zeros(10_000), jnp.asarray(3))) == pytest.approx(np.log(10_000), rel=1e-6)
    assert float(cross_entropy(jnp.zeros(10_000), jnp.asarray(3), 0.1)) == pytest.approx(np.log(10_000), rel=1e-6)


# ------------------------------------------------------------------------------------------------- schedules
def rates(schedule, steps, *, num_steps=100, emb_dim=512, **fields):
    hyper = Hyperparameters.of(Config(optimizer=config.Optimizer(schedule=schedule, **fields)))
    rate = functools.partial(schedules.learning_rate, schedule, hyper, num_steps=num_steps, emb_dim=emb_dim)
    return [float(rate(step)) for step in steps]


def test_the_paper_schedule_rises_to_its_peak_at_the_warmup_and_falls_as_the_root():
    found = rates('noam', [1, 2000, 4000, 16_000, 100_000], learning_rate=1.0, warmup_steps=4000)
    peak = 512**-0.5 * 4000**-0.5
    assert peak == pytest.approx(6.99e-4, rel=1e-3)
    expected = [512**-0.5 * 4000**-1.5, peak / 2, peak, peak / 2, 512**-0.5 * 100_000**-0.5]
    assert np.allclose(found, expected, rtol=1e-5)
    before, at, after = rates('noam', [3999, 4000, 4001], learning_rate=1.0, warmup_steps=4000)
    assert before < at > after
    assert rates('noam', [4000], learning_rate=2.0, warmup_steps=4000) == pytest.approx([2 * peak], rel=1e-5)


def test_schedules_warm_up_to_the_peak_and_end_at_their_fraction():
    fields = {'learning_rate': 2.0, 'warmup_steps': 20, 'final_fraction': 0.1}
    steps = [1, 10, 20, 60, 100, 150]
    assert np.allclose(rates('constant', steps, **fields), [0.1, 1, 2, 2, 2, 2])
    assert np.allclose(rates('linear', steps, **fields), [0.1, 1, 2, 1.1, 0.2, 0.2])
    assert np.allclose(rates('cosine', steps, **fields), [0.1, 1, 2, 1.1, 0.2, 0.2])
    assert np.allclose(rates('cosine', [40], **fields), [0.2 + 1.8 * 0.5 * (1 + np.cos(np.pi / 4))])
    for schedule in schedules.SCHEDULES:
        assert np.isfinite(rates(schedule, [1, 100], warmup_steps=0)).all()
    for schedule in ('constant', 'linear', 'cosine'):
        assert rates(schedule, [1], learning_rate=2.0, warmup_steps=1, num_steps=10**6) == pytest.approx(
            [2.0], rel=1e-5
        )


# ----------------------------------------------------------------------------------------------------- sizes
def size(method='__call__', **fields):
    cfg = Model(**fields)
    row = {'inputs': jax.ShapeDtypeStruct((1, 4), jnp.int32)}
    if cfg.family == 'encoder_decoder':
        row['encoder_inputs'] = row['inputs']
    init = functools.partial(build(cfg).init, method=method)
    return count_parameters(jax.eval_shape(init, jax.random.key(0), row)['params'])


def test_one_attention_of_width_512_has_a_million_parameters():
    cfg = resolve_model(Model(vocab_size=7, emb_dim=512, num_heads=8))
    x, positions = jax.ShapeDtypeStruct((1, 4, 512), jnp.float32), jnp.zeros((1, 4), int)

    def forward(attention, x):
        context = AttentionContext(AttentionMask(positions, positions))
        return attention(x, *attention.keys_values(x, None), context)

    init = nn.init(forward, Attention(cfg, 'decoder'))
    params = jax.eval_shape(init, jax.random.key(0), x)['params']
    assert count_parameters(params) == 4 * 512**2 == 1_048_576


BASE = {  # the base model of Vaswani et al. 2017, table 3, with its shared vocabulary of 37,000 pieces
    'family': 'encoder_decoder',
    'vocab_size': 37_000,
    'emb_dim': 512,
    'mlp_dim': 2048,
    'num_heads': 8,
    'num_encoder_layers': 6,
    'num_decoder_layers': 6,
    'tied_embeddings': 'all',
    'position': 'sinusoidal',
    'norm_placement': 'post',
    'mlp_bias': True,
    'final_norm': False,
}


def test_the_base_transformer_has_63_million_parameters():
    assert size(**BASE) == 63_045_632
    assert size(**{**BASE, 'attention_bias': ('query', 'key', 'value', 'out')}) == 63_082_496
    assert size(**{**BASE, 'final_norm': None}) == 63_045_632
