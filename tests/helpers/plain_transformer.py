"""A transformer in numpy and float64: one row, one layer, one head and one query at a time, written from the papers.

It shares with the library only the names of the configuration and of the parameters.
"""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.where(x > 0, x, 0)


def clamped(gate):
    """gpt-oss: the other projection is bounded, too, and counts 1 more."""
    gate = np.minimum(gate, 7)
    return gate * sigmoid(1.702 * gate)


GATES = {'glu': sigmoid, 'reglu': relu, 'geglu': gelu, 'geglu_tanh': gelu_tanh, 'swiglu': lambda x: x * sigmoid(x)}
GATES['swiglu_clamped'] = clamped
PLAIN = {
    'relu': relu,
    'relu_squared': lambda x: relu(x) ** 2,
    'gelu': gelu,
    'gelu_tanh': gelu_tanh,
    'silu': lambda x: x * sigmoid(x),
}


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def sinusoids(position, width):
    """Vaswani et al. 2017, 3.5."""
    angles = [position / 10_000 ** (2 * i / width) for i in range(width // 2)]
    return np.array([f(angle) for angle in angles for f in (math.sin, math.cos)])


def timing_signal(position, width):
    """Vaswani et al. 2018: the code of the paper has all sines first, and ends at exactly 10,000."""
    half = width // 2
    angles = [position / 10_000 ** (i / (half - 1)) for i in range(half)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles] + [0.0] * (width % 2))


def normalised(cfg, kind, params, x):
    """A norm of one vector."""
    size = x.size

    def over(x, square):
        inside = cfg.norm_epsilon_in_root
        root = math.sqrt(square + cfg.norm_epsilon) if inside else math.sqrt(square) + cfg.norm_epsilon
        return x / root

    if kind == 'layernorm':
        centred = x - x.mean()
        return over(centred, (centred**2).sum() / size) * params['scale'] + params.get('bias', 0.0)
    if kind == 'rmsnorm':
        return over(x, (x**2).sum() / size) * params['scale']
    if kind == 'rmsnorm_offset':
        return over(x, (x**2).sum() / size) * (1 + params['scale'])
    if kind == 'scalenorm':
        return params['gain'] * over(x, (x**2).sum())
    if kind == 'dyt':
        return np.tanh(params['gain'] * x) * params['scale'] + params.get('bias', 0.0)
    assert kind is None
    return x


def norm_of(cfg, params, prefix=''):
    """The stream's norm that stands in `params`; inside an embedding or a head it has the name of its class."""
    if prefix:
        own = params.get(f'{prefix}norm')
    else:
        own = next((part for name, part in params.items() if name.endswith(('Norm_0', 'DyT_0'))), None)
    return lambda x: np.stack([normalised(cfg, cfg.norm, own, row) for row in x])


def dense(params, x):
    """Vectors x [T, ...] by a kernel whose first axes are those of a vector."""
    y = np.tensordot(x, params['kernel'], x.ndim - 1)
    return y + params.get('bias', 0.0)


def frequency(cfg, pair, size, length, local=False):
    """Radians per position of a rotary pair (Su et al. 2021, eq. 15), for longer contexts where the config says so.

    `length` counts the positions of the longest row.
    """
    if local and cfg.local_rope_theta is not None:
        return cfg.local_rope_theta ** (-2 * pair / size)
    turn = cfg.rope_theta ** (-2 * pair / size)
    if cfg.rope_scaling == 'yarn':  # Peng et al. 2023: pair R ln(L / (2 pi r)) / (2 ln theta) turns r times
        ends = [
            size * math.log(cfg.rope_trained_len / (2 * math.pi * turns)) / (2 * math.log(cfg.rope_theta))
            for turns in (cfg.rope_fast_turns, cfg.rope_slow_turns)
        ]
        if cfg.rope_round_ramp:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], size - 1)
        share = min(max((pair - low) / (high - low or 0.001), 0), 1)
        return (1 - share) * turn + share * turn / cfg.rope_factor
    if cfg.rope_scaling == 'dynamic':
        stretch = cfg.rope_factor * max(length, cfg.rope_trained_len) / cfg.rope_trained_len - (cfg.rope_factor - 1)
        return (cfg.rope_theta * stretch ** (size / (size - 2))) ** (-2 * pair / size)
    if cfg.rope_scaling == 'longrope':
        return turn / (cfg.rope_long_factors if length > cfg.rope_trained_len else cfg.rope_short_factors)[pair]
    if cfg.rope_scaling == 'linear':
        return turn / cfg.rope_factor
    if cfg.rope_scaling == 'llama3':
        turns = cfg.rope_trained_len * turn / (2 * math.pi)
        if turns >= 4:
            return turn
        if turns <= 1:
            return turn / cfg.rope_factor
        share = (turns - 1) / 3
        return (1 - share) * turn / cfg.rope_factor + share * turn
    return turn


def temperature(cfg, local):
    """The factor on queries and keys (Peng et al. 2023, eq. 22; Ding et al. 2024)."""
    if cfg.rope_scaling not in ('yarn', 'longrope') or (local and cfg.local_rope_theta is not None):
        return 1.0
    if cfg.rope_attention_factor is not None:
        return cfg.rope_attention_factor
    if cfg.rope_scaling == 'yarn':
        return 1 + math.log(cfg.rope_factor) / 10
    return math.sqrt(1 + math.log(cfg.max_len / cfg.rope_trained_len) / math.log(cfg.rope_trained_len))


def rotated(cfg, x, position, length, local):
    """One head of one query or key: its first entries are complex numbers (i, i + half), turned by the position."""
    size = round(x.size * cfg.rope_fraction)
    half, turned = size // 2, np.array(x)
    for i in range(half):
        number = complex(x[i], x[i + half]) * np.exp(1j * position * frequency(cfg, i, size, length, local))
        number *= temperature(cfg, local)
        turned[i], turned[i + half] = number.real, number.imag
    return turned


def bucket(cfg, distance, bidirectional):
    """Raffel et al. 2020, 2.1, of a distance from key to query."""
    count, first = cfg.relative_buckets, 0
    if bidirectional:
        count //= 2
        first = count if distance < 0 else 0
        distance = abs(distance)
    near = count // 2
    if distance < near:
        return first + max(distance, 0)
    far = near + math.floor(math.log(distance / near) / math.log(cfg.relative_max_distance / near) * (count - near))
    return first + min(far, count - 1)


def bias(cfg, tables, head, distance, bidirectional):
    if cfg.position == 'alibi':  # Press et al. 2022, of a power of two of heads
        return -(2 ** (-8 * (head + 1) / cfg.num_heads)) * abs(distance)
    if cfg.position in ('relative', 'learned_relative'):
        return tables['table'][bucket(cfg, distance, bidirectional), head]
    return 0.0


class Attention:
    """One attention of one layer; `cross` reads an encoder. `tables` are those of a bias."""

    def __init__(self, cfg, params, tables, *, cross, causal, window=None, length=None):
        self.length = length
        self.cfg, self.params, self.tables = cfg, params, tables
        self.cross, self.causal, self.window = cross, causal, window
        self.maps = None

    def may(self, query, key):
        """Whether a query sees a key, both (position, segment, prefix)."""
        if key[0] < 0 or query[1] != key[1]:
            return False
        if self.window is not None and abs(query[0] - key[0]) >= self.window:
            return False
        return not self.causal or key[0] <= query[0] or bool(key[2])

    def scale(self):
        cfg = self.cfg
        named = {None: 'head_dim' if cfg.parametrization == 'mup' else 'sqrt_head_dim'}
        return {
            'sqrt_head_dim': 1 / math.sqrt(cfg.head_dim),
            'sqrt_emb_dim': 1 / math.sqrt(cfg.emb_dim),
            'sqrt_scale_dim': 1 / math.sqrt(cfg.attention_scale_dim),
            'head_dim': 1 / cfg.head_dim,
            'unscaled': 1.0,
        }[named.get(cfg.attention_scale, cfg.attention_scale)]

    def normed(self, name, x):
        """Queries or keys [T, heads, size]; each head has the norm, or all of a token together."""
        cfg, own = self.cfg, self.params.get(name)
        if cfg.qk_norm == 'rmsnorm_joint':
            flat = {'scale': own['scale'].reshape(-1)}
            return np.stack([normalised(cfg, 'rmsnorm', flat, token.reshape(-1)).reshape(token.shape) for token in x])
        return np.stack([[normalised(cfg, cfg.qk_norm, own, head) for head in token] for token in x])

    def __call__(self, x, queries, source, keys):
        """Streams [T, D] and [S, D], and who their tokens are."""
        cfg, params = self.cfg, self.params
        placed = cfg.cross_position or not self.cross
        local, length = self.window is not None, self.length
        rotary = lambda x, at: rotated(cfg, x, at, length, local) if cfg.position == 'rope' and placed else x  # noqa: E731
        if cfg.attention_projections:
            q, k, v = dense(params['query'], x), dense(params['key'], source), dense(params['value'], source)
        else:
            q, k, v = (y.reshape(len(y), cfg.num_heads, -1) for y in (x, source, source))
        q, k = self.normed('query_norm', q), self.normed('key_norm', k)
        sink = {'learned': lambda n: math.exp(params['sink']['sink'][n]), 'zero': lambda n: 1.0, None: lambda n: 0.0}
        heads, self.maps = [], np.zeros((cfg.num_heads, len(queries), len(keys)))
        for n, (t, query) in ((n, pair) for n in range(cfg.num_heads) for pair in enumerate(queries)):
            group = n * k.shape[1] // cfg.num_heads
            mine = rotary(q[t, n], query[0])
            seen = [s for s, key in enumerate(keys) if self.may(query, key)]
            scores = []
            for s in seen:
                theirs = rotary(k[s, group], keys[s][0])
                score = mine @ theirs * self.scale()
                if cfg.attention_softcap is not None:
                    score = cfg.attention_softcap * math.tanh(score / cfg.attention_softcap)
                distance = query[0] - keys[s][0]
                scores.append(score + (bias(cfg, self.tables, n, distance, not self.causal) if placed else 0.0))
            weights = np.exp(scores)
            self.maps[n, t, seen] = weights / (weights.sum() + sink[cfg.attention_sink](n)) if seen else []
            heads.append(self.maps[n, t] @ v[:, group])
        joined = np.stack(heads).reshape(cfg.num_heads, len(queries), -1).swapaxes(0, 1)
        return dense(params['out'], joined) if cfg.attention_projections else joined.reshape(len(queries), -1)


def feed_forward(cfg, params, x):
    """One expert, or the only one."""
    first = dense(params['in_0'], x)
    if cfg.activation in GATES:
        second = dense(params['in_1'], x)
        second = np.clip(second, -7, 7) + 1 if cfg.activation == 'swiglu_clamped' else second
        hidden = GATES[cfg.activation](first) * second
    else:
        hidden = PLAIN[cfg.activation](first)
    return dense(params['out'], hidden)


def mixture(cfg, params, x):
    """Each token by the experts that its router likes best."""
    outputs = []
    for vector in x:
        odds = softmax(vector @ params['router']['kernel'] / widening(cfg) + params['router'].get('bias', 0.0))
        chosen = np.argsort(-odds)[: cfg.experts_per_token]
        share = odds[chosen] / (odds[chosen].sum() if len(chosen) > 1 else 1)
        total = 0.0
        for expert, weight in zip(chosen, share, strict=True):
            own = {name: {k: v[expert] for k, v in part.items()} for name, part in params.items() if name != 'router'}
            total = total + weight * feed_forward(cfg, own, vector[None])[0]
        outputs.append(total)
    return np.stack(outputs)


def widening(cfg):
    return cfg.emb_dim / cfg.base_emb_dim if cfg.parametrization == 'mup' else 1


def alpha(cfg, decoder):
    """DeepNorm's factor on the residual (Wang et al. 2022, table 1)."""
    if cfg.family != 'encoder_decoder':
        return (2 * (cfg.num_decoder_layers if decoder else cfg.num_encoder_layers)) ** 0.25
    if decoder:
        return (3 * cfg.num_decoder_layers) ** 0.25
    return 0.81 * (cfg.num_encoder_layers**4 * cfg.num_decoder_layers) ** (1 / 16)


def block(cfg, params, x, parts, decoder, bare):
    """`parts` are (name, function of the stream) in their order."""
    if cfg.norm_placement == 'parallel':
        h = norm_of(cfg, params, f'{parts[0][0]}_')(x)
        return x + sum(function(h) for _, function in parts)
    if cfg.norm_placement == 'parallel_norms':
        return x + sum(function(norm_of(cfg, params, f'{name}_')(x)) for name, function in parts)
    for name, function in parts:
        norm, out_norm = norm_of(cfg, params, f'{name}_'), norm_of(cfg, params, f'{name}_out_')
        if bare and name == 'attention':
            norm = lambda x: x  # noqa: E731
        if cfg.norm_placement == 'pre':
            x = x + function(norm(x))
        elif cfg.norm_placement == 'post':
            x = norm(x + function(x))
        elif cfg.norm_placement == 'sandwich':
            x = x + out_norm(function(norm(x)))
        elif cfg.norm_placement == 'res_post':
            x = x + norm(function(x))
        elif cfg.norm_placement == 'deepnorm':
            x = norm(alpha(cfg, decoder) * x + function(x))
        elif cfg.norm_placement == 'rezero':
            x = x + params[f'{name}_gain']['gain'] * function(x)
        else:
            assert cfg.norm_placement == 'no_residual'
            x = function(norm(x))
    return x


def embedded(cfg, params, table, tokens, positions, types):
    width = table.shape[1]
    x = table[tokens]
    if cfg.embedding_scale == 'sqrt_dim':
        x = x * math.sqrt(width / (1 if cfg.embedding_factor_dim else widening(cfg)))
    if cfg.position == 'sinusoidal' and cfg.layer_sharing != 'universal':
        x = x + np.stack([sinusoids(at, width) for at in positions])
    elif cfg.position == 'timing_signal':
        x = x + np.stack([timing_signal(at + cfg.position_offset, width) for at in positions])
    elif cfg.position in ('learned', 'learned_relative'):
        x = x + params['positions']['table'][np.maximum(positions, 0) + cfg.position_offset]
    if cfg.num_token_types:
        x = x + params['token_types']['table'][types]
    if cfg.embedding_norm:
        x = norm_of(cfg, params)(x)
    return dense(params['projection'], x) if cfg.embedding_factor_dim else x


def layer(tree, number):
    return {name: layer(part, number) if isinstance(part, dict) else part[number] for name, part in tree.items()}


def tower(cfg, params, x, tokens, encoded=None, encoder_tokens=None, *, decoder, length=None):
    """Returns the stream after a stack, and the maps of its self- and cross-attention, [L, N, T, S] each."""
    maps, crossed = [], []
    for i in range(cfg.num_decoder_layers if decoder else cfg.num_encoder_layers):
        own = params['stack']['layers'] if cfg.layer_sharing else layer(params['stack']['layers'], i)
        if cfg.layer_sharing == 'universal':  # Dehghani et al. 2019, eq. 4: layers count from 1
            x = x + sinusoids(i + 1, cfg.emb_dim)
            if cfg.position == 'sinusoidal':
                x = x + np.stack([sinusoids(at, cfg.emb_dim) for at, *_ in tokens])
        local = cfg.attention_pattern[i % len(cfg.attention_pattern)] == 'local'
        tables = own.get('attention', {}).get('bias') if cfg.relative_per_layer else params.get('bias')
        itself = Attention(
            cfg,
            own.get('attention', {}),
            tables,
            cross=False,
            causal=decoder,
            window=cfg.window if local else None,
            length=length,
        )
        parts = [('attention', lambda h, itself=itself: itself(h, tokens, h, tokens))]
        if encoded is not None:
            across = Attention(cfg, own['cross_attention'], params.get('cross_bias'), cross=True, causal=False)
            parts.append(('cross', lambda h, across=across: across(h, tokens, encoded, encoder_tokens)))
        hidden = mixture if cfg.num_experts else feed_forward
        parts.append(('mlp', lambda h, own=own, hidden=hidden: hidden(cfg, own['mlp'], h)))
        x = block(cfg, own, x, parts, decoder, bare=i == 0 and not cfg.first_norm)
        maps.append(itself.maps)
        if encoded is not None:
            crossed.append(across.maps)
    if 'norm' in params['stack']:
        x = norm_of(cfg, {'final_norm': params['stack']['norm']}, 'final_')(x)
    return x, np.stack(maps), np.stack(crossed) if crossed else None


def logits(cfg, params, table, x):
    if cfg.mlm_transform:
        kind = cfg.transform_activation or cfg.activation
        count = 2 if kind in GATES else 1
        joined = [dense(params[f'transform_{i}'], x) for i in range(count)]
        x = GATES[kind](joined[0]) * joined[1] if count == 2 else PLAIN[kind](joined[0])
        x = norm_of(cfg, params)(x)
    elif table is not None and cfg.embedding_factor_dim:
        x = dense(params['projection'], x)
    if cfg.output_scale == 'rsqrt_dim':
        x = x / math.sqrt(cfg.emb_dim / widening(cfg))
    x = x / widening(cfg)
    y = x @ table.T if table is not None else dense(params['logits'], x)
    y = y + params.get('bias', 0.0)
    return cfg.output_softcap * np.tanh(y / cfg.output_softcap) if cfg.output_softcap else y


def transformer(cfg, params, batch):
    """Returns logits [B, T, V] and attention maps by `encoder`, `decoder`, `cross`: [L, B, N, T, S] each."""
    found, rows, shared = {}, [], params['embed']['table']
    for b in range(len(batch['inputs'])):
        sides = {}
        for side in ('', 'encoder_'):
            if f'{side}inputs' in batch:
                tokens = np.asarray(batch[f'{side}inputs'])[b]
                own = {
                    name: np.asarray(batch.get(f'{side}{name}', [default] * (b + 1)))[b]
                    for name, default in (
                        ('positions', np.arange(len(tokens))),
                        ('segment_ids', np.zeros(len(tokens), int)),
                        ('prefix', np.zeros(len(tokens), bool)),
                        ('token_types', np.zeros(len(tokens), int)),
                    )
                }
                who = list(zip(*(own[name].tolist() for name in ('positions', 'segment_ids', 'prefix')), strict=True))
                sides[side] = tokens, own['positions'], own['token_types'], who
        maps, encoded, encoder_who = {}, None, None
        if cfg.family != 'decoder':
            tokens, positions, types, encoder_who = sides.get('encoder_', sides[''])
            table = params.get('encoder_embed', params['embed'])['table']
            x = embedded(cfg, params['encoder'].get('input_embedding', {}), table, tokens, positions, types)
            encoded, maps['encoder'], _ = tower(cfg, params['encoder'], x, encoder_who, decoder=False)
        x = encoded
        if cfg.family != 'encoder':
            tokens, positions, types, who = sides['']
            x = embedded(cfg, params['decoder'].get('input_embedding', {}), shared, tokens, positions, types)
            x, maps['decoder'], crossed = tower(
                cfg,
                params['decoder'],
                x,
                who,
                encoded,
                encoder_who,
                decoder=True,
                length=1 + int(np.max(batch.get('positions', len(tokens) - 1))),
            )
            if crossed is not None:
                maps['cross'] = crossed
        tied = shared if cfg.tied_embeddings in ('all', 'output') else None
        rows.append(logits(cfg, params.get('head', {}), tied, x))
        for name, value in maps.items():
            found.setdefault(name, []).append(value)
    return np.stack(rows), {name: np.stack(value, 1) for name, value in found.items()}
