"""Attention maps: the probabilities are those of the model, and the page shows them and nothing else."""

import html.parser
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import plain_transformer
from lives import HANG
from tformer import config
from tformer.evaluation.attention_maps import UNIT, Panel, attention_probabilities, page, panels
from tformer.model import build

L, B, N, T, S, V = 2, 2, 4, 5, 6, 11
HOSTILE = '</script><script>console.error("<b>&amp;")</script>'


@pytest.fixture(scope='module', params=['encoder', 'decoder', 'encoder_decoder'])
def maps(request):
    sizes = {'emb_dim': 16, 'mlp_dim': 16, 'num_heads': N, 'num_kv_heads': 2, 'max_len': 8, 'num_classes': 2}
    layers = {'num_encoder_layers': L, 'num_decoder_layers': L}
    model = build(config.Model(family=request.param, vocab_size=V, **sizes, **layers))
    rng = np.random.default_rng(0)
    batch = {'inputs': rng.integers(1, V, (B, T)), 'encoder_inputs': rng.integers(1, V, (B, S))}
    batch['positions'] = np.where(np.arange(B)[:, None] == 1, np.arange(T) - 2, np.arange(T)).clip(-1)  # in front
    batch['encoder_positions'] = np.array([[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]])  # behind
    batch = {name: jnp.array(value, jnp.int32) for name, value in batch.items()}
    if request.param != 'encoder_decoder':
        batch = {name: batch[name] for name in ('inputs', 'positions')}
    variables = jax.jit(model.init)(jax.random.key(0), batch)
    return request.param, batch, attention_probabilities(model, variables, batch), (model.cfg, variables['params'])


@pytest.mark.slow
def test_maps_are_those_of_the_family(maps):
    family, _, found, _ = maps
    shapes = {'encoder': {'encoder': (T, T)}, 'decoder': {'decoder': (T, T)}}
    shapes['encoder_decoder'] = {'encoder': (S, S), 'decoder': (T, T), 'cross': (T, S)}
    assert {name: probs.shape for name, probs in found.items()} == {
        name: (L, B, N, *shape) for name, shape in shapes[family].items()
    }


@pytest.mark.slow
def test_every_map_is_that_of_its_head_in_its_layer(maps):
    """Against a transformer in numpy: heads or layers in another order, or even weights, would not do."""
    _, batch, found, (cfg, params) = maps
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), nn.unbox(params))
    _, expected = plain_transformer.transformer(cfg, wide, jax.tree.map(np.asarray, batch))
    assert set(found) == set(expected)
    for name, probs in found.items():
        side = 'encoder_positions' if name == 'encoder' and 'encoder_positions' in batch else 'positions'
        for row, real in enumerate(np.asarray(batch[side]) >= 0):
            mine, theirs = probs[:, row][:, :, real], expected[name][:, row][:, :, real]
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
            assert np.ptp(theirs, axis=0).max() > 0.02 and np.ptp(theirs, axis=1).max() > 0.02


def test_rows_sum_to_one_padding_and_the_future_weigh_nothing(maps):
    family, batch, found, _ = maps
    for name, probs in found.items():
        np.testing.assert_allclose(probs.sum(-1), 1.0, atol=1e-5)
        encoder_keys = family == 'encoder_decoder' and name != 'decoder'
        keys = np.asarray(batch['encoder_positions' if encoder_keys else 'positions'])
        queries = keys if name != 'cross' else np.asarray(batch['positions'])
        for row in range(B):
            real = probs[:, row][:, :, queries[row] >= 0]
            assert (real[..., keys[row] < 0] == 0).all() and (real[..., keys[row] >= 0] > 0).any()
        if name == 'decoder':
            assert np.allclose(np.triu(probs[:, 0], 1), 0, atol=0)


def test_panels_leave_padding_out(maps):
    family, _, found, _ = maps
    tokens = [None, None, 'a', 'b', 'c']
    made = panels(found, 1, tokens, list('uvwxyz') if family == 'encoder_decoder' else None)
    assert len(made) == len(found)
    for panel in made:
        assert panel.weights_LNTS.shape == (L, N, len(panel.queries), len(panel.keys))
        np.testing.assert_allclose(panel.weights_LNTS.sum(-1), 1.0, atol=1e-5)
    if family != 'encoder':
        assert made[-1].queries == ['a', 'b', 'c']


# ------------------------------------------------------------------------------------------------------- the page
def example(layers=4, heads=4, length=20):
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.full(length, 0.3), (layers, heads, length))
    tokens = ['', ' ', 'a\nb', HOSTILE, '▁übergroßes', 'x' * 40] + ['word'] * (length - 6)
    return [Panel(f'Panel {i} {HOSTILE}', 'note & <i>', weights, tokens, tokens) for i in range(3)]


class Page(html.parser.HTMLParser):
    """Collects the tags, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.addresses = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ('src', 'href', 'srcset', 'action')]
        if tag not in ('meta', 'link'):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == 'script':
            self.scripts.append(data)


def test_page_is_one_well_formed_file_that_asks_for_nothing():
    text = page(f'A title {HOSTILE} [[DATA]]', example())
    parsed = Page(text)
    assert parsed.open == [] and len(parsed.scripts) == 2 and parsed.addresses == []
    assert 'http' not in text and '@import' not in text and 'url(' not in text
    assert HOSTILE not in text and not re.search(r'\[\[(TITLE|SCALE|STEPS|UNIT)\]\]', text)
    assert len(text.encode()) < 400_000


def test_page_holds_the_weights_and_the_tokens():
    want = example()
    data = json.loads(Page(page('A title', want)).scripts[0])
    for got, panel in zip(data, want, strict=True):
        assert got['name'] == panel.name and got['queries'] == panel.queries and got['keys'] == panel.keys
        np.testing.assert_allclose(np.array(got['weights_LNTS']) / UNIT, panel.weights_LNTS, atol=0.5001 / UNIT)


@pytest.mark.skipif(shutil.which('chromium') is None, reason='chromium is not installed')
def test_page_draws_every_map_without_an_error(tmp_path):
    file = tmp_path / 'page.html'
    file.write_text(page('A title', example(layers=2, heads=3)), encoding='utf-8')
    flags = 'headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync'
    flags += f' no-first-run user-data-dir={tmp_path} enable-logging=stderr virtual-time-budget=3000 dump-dom'
    command = ['chromium', *[f'--{flag}' for flag in flags.split()], file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert 'CONSOLE' not in done.stderr
    assert done.stdout.count('<figcaption>') == 3 * (1 + 3)  # panels x (mean, heads), of the last layer
    assert done.stdout.count('aria-pressed="true"') == 3
    assert '&lt;/script&gt;' in done.stdout
