"""The attention probabilities of a batch, and a self-contained HTML page that shows them.

Shapes: L layers, B batch, N heads, T query length, S key length.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from flax import linen as nn

from tformer.evaluation import activations

UNIT = 10_000  # the page has weights as integers in units of 1 / UNIT
STEPS = 24  # of the colour scale

# name -> (stack, sub-layer, heading, what a row of the map is)
MAPS = {
    'encoder': ('encoder', 'attention', 'Encoder self-attention', 'each input token looks at all input tokens'),
    'decoder': ('decoder', 'attention', 'Decoder self-attention', 'each output token looks at itself and those before'),
    'cross': ('decoder', 'cross_attention', 'Cross-attention', 'each output token looks at the input tokens'),
}


class Panel(NamedTuple):
    """The maps of one kind of attention for one input: T queries and S keys, and a heading with a note below it."""

    name: str
    note: str
    weights_LNTS: np.ndarray
    queries: Sequence[str]
    keys: Sequence[str]


def attention_probabilities(model: nn.Module, variables: Any, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the probabilities of each attention of the family, float32, by their keys in `MAPS`.

    `encoder` [L, B, N, S, S], `decoder` [L, B, N, T, T], `cross` [L, B, N, T, S]. A padding key has weight 0; the row
    of a query that sees nothing (padding) is uniform.
    """
    forward = activations.Forward(model, '__call__')
    paths = {name: f'{stack}.stack.layers.{part}.probabilities' for name, (stack, part, _, _) in MAPS.items()}
    wanted = paths.values() & activations.names(forward, variables, batch).keys()
    found = activations.activations(forward, variables, batch, sorted(wanted))
    maps = {}
    for name, path in paths.items():
        if path in found:
            L, B, K, G, T, S = found[path].shape
            maps[name] = np.asarray(found[path].reshape(L, B, K * G, T, S))
    return maps


def panels(
    maps: Mapping[str, np.ndarray],
    row: int,
    tokens: Sequence[str | None],
    encoder_tokens: Sequence[str | None] | None = None,
) -> list[Panel]:
    """Returns the panels of the example in row number `row` of a batch.

    `tokens` are its `inputs` as text; None is padding, which is left out. `encoder_tokens` are its `encoder_inputs`
    likewise, where the model has two stacks.
    """
    encoder_tokens = tokens if encoder_tokens is None else encoder_tokens
    sides = {
        'encoder': (encoder_tokens, encoder_tokens),
        'decoder': (tokens, tokens),
        'cross': (tokens, encoder_tokens),
    }
    made = []
    for name, probs in maps.items():
        queries, keys = ([(i, token) for i, token in enumerate(side) if token is not None] for side in sides[name])
        weights = probs[:, row][:, :, [i for i, _ in queries]][:, :, :, [i for i, _ in keys]]
        made.append(Panel(*MAPS[name][2:], weights, [token for _, token in queries], [token for _, token in keys]))
    return made


def page(title: str, panels: Iterable[Panel]) -> str:
    """Returns a self-contained HTML page: for each panel, the mean and every head of a chosen layer."""
    data = []
    for panel in panels:
        weights = np.rint(np.asarray(panel.weights_LNTS, np.float64) * UNIT).astype(int).tolist()
        data.append(panel._replace(weights_LNTS=weights)._asdict())
    environment = jinja2.Environment(autoescape=True)
    environment.policies['json.dumps_kwargs'] = {'separators': (',', ':')}  # a page has many weights
    template = environment.from_string(pathlib.Path(__file__).with_suffix('.html.jinja').read_text(encoding='utf-8'))
    light, dark = ([_colour(i / STEPS, night) for i in range(STEPS + 1)] for night in (False, True))
    return template.render(title=title, panels=data, light=light, dark=dark, steps=STEPS, unit=UNIT)


def _colour(amount: float, dark: bool) -> str:
    """Returns the CSS colour of a share of the scale: from paper to ink by day, from night to light in the dark.

    Lightness has even steps in OKLCH (Ottosson 2020), so that neither hue vision nor colour is needed to rank them.
    """
    lightness = 0.25 + 0.70 * amount if dark else 0.965 - 0.69 * amount
    chroma = 0.015 + 0.125 * math.sin(math.pi * min(amount * 0.8 + 0.1 * (amount > 0), 0.8))
    hue = 285 - 190 * amount if dark else 100 + 185 * amount
    return f'oklch({lightness:.3f} {chroma:.3f} {hue:.0f})'
