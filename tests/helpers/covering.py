"""The designs that the contracts are held to: an array of configurations that covers every legal pair of choices.

A factor is a choice and its levels; a level is a set of fields. `cover` picks few rows so that every two levels that
may stand together do so in one of them (the covering arrays of Cohen et al. 1997). The rows are stored; a change of the
factors makes them anew:

    python tests/helpers/covering.py
"""

import functools
import itertools
import json
import pathlib
import random

from tformer import checks
from tformer.config import Config, Data, Decode, Model, Train
from tformer.errors import UserError

T, VOCABULARY = 8, 17
TINY = {'vocab_size': VOCABULARY, 'emb_dim': 16, 'mlp_dim': 24, 'num_heads': 4, 'max_len': 16, 'dropout_rate': 0.0}
OBJECTIVE = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}


def each(field, *values):
    """Levels of one field."""
    return [{field: value} for value in values]


def table(name, *left_out):
    return each(name, *(key for key in checks.TABLES[f'model.{name}'] if key not in left_out))


EXPERTS = {'num_experts': 3, 'balance_weight': 0.0, 'router_z_weight': 0.0}
ROPE = {'position': 'rope'}
# Rows that act as another row of their table does, with other numbers: in `ALONE`.
ROWS_ALONE = {
    'norm': ('rmsnorm_offset',),
    'qk_norm': ('rmsnorm_offset', 'rmsnorm_joint'),
    'norm_placement': ('res_post', 'parallel_norms'),
    'position': ('timing_signal', 'learned_relative'),
    'attention_scale': ('sqrt_scale_dim',),
}
FACTORS = {
    'task': [
        {'family': 'encoder', 'num_encoder_layers': 2},
        {'family': 'decoder', 'num_decoder_layers': 2},
        {'family': 'encoder_decoder', 'num_encoder_layers': 2, 'num_decoder_layers': 2},
        {'family': 'encoder', 'num_encoder_layers': 2, 'num_classes': 5},
        {'family': 'decoder', 'num_decoder_layers': 2, 'prefix': True},
    ],
    'position': [
        *table('position', *ROWS_ALONE['position']),
        {'position': 'relative', 'relative_per_layer': True, 'relative_buckets': 8, 'relative_max_distance': 9},
        *({'position': position, 'cross_position': True} for position in ('rope', 'alibi', 'relative')),
    ],
    'norm': [*table('norm', *ROWS_ALONE['norm']), {'norm': 'layernorm', 'norm_epsilon_in_root': False}],
    'norm_placement': table('norm_placement', *ROWS_ALONE['norm_placement']),
    'final_norm': each('final_norm', None, True, False),
    'embedding_norm': each('embedding_norm', False, True),
    'heads': [
        {},
        {'num_kv_heads': 2},
        {'num_kv_heads': 1, 'value_dim': 6},
        {'num_heads': 2, 'head_dim': 4},
        {'attention_projections': False},
    ],
    'attention_bias': each('attention_bias', (), checks.TABLES['model.attention_bias'], ('query', 'value')),
    'attention_scale': table('attention_scale', None, *ROWS_ALONE['attention_scale']),
    'attention_pattern': [{}, {'attention_pattern': ('local', 'global'), 'window': 3}],
    'attention_softcap': each('attention_softcap', None, 2.0),
    'attention_sink': table('attention_sink'),
    'qk_norm': table('qk_norm', *ROWS_ALONE['qk_norm']),
    'attention_kernel': table('attention_kernel', 'auto', 'cudnn', 'triton', 'flash', 'mosaic'),
    'activation': each('activation', 'relu', 'gelu', 'swiglu'),  # tests/layers/test_mlp.py has the values of all
    'mlp_bias': each('mlp_bias', True, False),
    'experts': [
        {},
        EXPERTS,
        {**EXPERTS, 'experts_per_token': 1, 'expert_dispatch': 'capacity', 'expert_capacity': 3.0},
    ],
    'layer_sharing': table('layer_sharing'),
    'tied_embeddings': table('tied_embeddings'),
    'embedding_scale': table('embedding_scale'),
    'embedding_factor_dim': each('embedding_factor_dim', None, 8),
    'num_token_types': each('num_token_types', None, 2),
    'mlm_transform': each('mlm_transform', False, True),
    'output_bias': each('output_bias', False, True),
    'output_scale': table('output_scale'),
    'output_softcap': each('output_softcap', None, 100.0),
    'pooling': [*table('pooling'), {'pooling': 'cls', 'pooler': True}],
    'parametrization': [{}, {'parametrization': 'mup', 'base_emb_dim': 8}],
    'adapters': [
        {},
        {'lora_rank': 2, 'lora_alpha': 2.0},
        {'lora_rank': 3, 'lora_alpha': 2.0, 'lora_targets': tuple(checks.TABLES['model.lora_targets'])},
    ],
    'execution': [{}, {'remat': 'full'}, {'scan_layers': False}],
}
# Levels whose arithmetic is of single positions: each in one case of its own, on the first level of all other factors.
# fmt: off
ALONE = [
    {'position': 'learned', 'position_offset': 2, 'first_norm': False, 'norm_bias': False},
    {'position': 'learned_relative', 'position_offset': 1, 'relative_buckets': 8, 'relative_max_distance': 9},
    {**ROPE, 'rope_fraction': 0.5, 'rope_scaling': 'linear', 'rope_factor': 2.0},
    {**ROPE, 'rope_scaling': 'llama3', 'rope_factor': 4.0, 'rope_trained_len': 16},
    {
        **ROPE, 'norm': 'rmsnorm_offset', 'qk_norm': 'rmsnorm_offset', 'rope_scaling': 'yarn', 'rope_factor': 4.0,
        'rope_trained_len': 16, 'attention_pattern': ('local', 'global'), 'window': 3, 'local_rope_theta': 50.0,
    },
    {
        **ROPE, 'norm': 'rmsnorm', 'qk_norm': 'rmsnorm_joint', 'norm_placement': 'res_post',
        'rope_scaling': 'dynamic', 'rope_factor': 2.0, 'rope_trained_len': 16,
    },
    {
        **ROPE, 'norm_placement': 'parallel_norms', 'rope_fraction': 0.5, 'rope_scaling': 'longrope',
        'rope_short_factors': (1.5,), 'rope_long_factors': (4.0,), 'rope_trained_len': 16,
    },
    {
        'position': 'timing_signal', 'position_offset': 2, 'attention_scale': 'sqrt_scale_dim',
        'attention_scale_dim': 3.0, **EXPERTS, 'router_bias': True, 'activation': 'swiglu_clamped',
    },
    {**ROPE, 'norm': 'rmsnorm', 'kv_latent_dim': 6, 'query_latent_dim': 5, 'rotary_dim': 4, 'value_dim': 3},
]
# fmt: on
STORED = pathlib.Path(__file__).with_suffix('.json')
NAMES = [(factor, level) for factor, levels in FACTORS.items() for level in range(len(levels))]
ORDER = {name: place for place, name in enumerate(NAMES)}


def fields(row):
    """The model fields of a row, which gives the level of each factor, or of some."""
    merged = dict(TINY)
    for factor, level in row.items():
        merged |= FACTORS[factor][level]
    merged.pop('prefix', None)
    return merged


@functools.cache
def _legal(items):
    row = dict(items)
    if 'task' not in row:
        return any(_legal((*items, ('task', task))) for task in range(len(FACTORS['task'])))
    model = Model(**fields(row))
    try:
        checks.check_here(
            Config(
                model=model,
                data=Data(length=T),
                train=Train(num_steps=1, objective=OBJECTIVE[model.family]),
                decode=Decode(max_len=T),
            )
        )
    except UserError:
        return False
    return True


def legal(row):
    """Whether a row, or part of one, is a model."""
    return _legal(tuple(row.items()))


def legal_pairs():
    """Every two levels of different factors that may stand together."""
    pairs = itertools.combinations(NAMES, 2)
    return {pair for pair in pairs if pair[0][0] != pair[1][0] and legal(dict(pair))}


def cover(candidates=30):
    """Returns rows, a level for each factor, that hold every legal pair: each is the best of some greedy ones."""
    rng, left, rows = random.Random(0), legal_pairs(), []
    while left:
        found = [fill(rng, left) for _ in range(candidates)]
        rows.append(max(found, key=lambda row: len(left & set(pairs_of(row)))))
        left -= set(pairs_of(rows[-1]))
    return rows


def fill(rng, left):
    """Returns a row that begins with a pair that is left; each other level is one that makes most of those left."""
    row = dict(rng.choice(sorted(left, key=lambda pair: (ORDER[pair[0]], ORDER[pair[1]]))))
    if 'task' not in row:
        tasks = [task for task in range(len(FACTORS['task'])) if legal({**row, 'task': task})]
        row['task'] = max(tasks, key=lambda task: (gained(row, 'task', task, left), rng.random()))
    for factor in rng.sample([name for name in FACTORS if name not in row], len(FACTORS) - len(row)):
        options = [level for level in range(len(FACTORS[factor])) if legal({**row, factor: level})]
        cheap = factor == 'execution'  # unrolled layers compile for longer
        row[factor] = max(
            options, key=lambda level: (gained(row, factor, level, left), cheap and level == 0, rng.random())
        )
    return {factor: row[factor] for factor in FACTORS}


def pairs_of(row):
    return itertools.combinations(row.items(), 2)


def load():
    """Returns the stored rows."""
    return [dict(zip(FACTORS, levels, strict=True)) for levels in json.loads(STORED.read_text())]


def cover_once(rows):
    """Few of the rows, in which every level of every factor occurs."""
    left, chosen = {name for row in rows for name in row.items()}, []
    while left:
        best = max(rows, key=lambda row: len(left & set(row.items())))
        chosen.append(rows.index(best))
        left -= set(best.items())
    return chosen


def gained(row, factor, level, left):
    """How many pairs that are left the level makes with those of a row."""
    pairs = ([(name, other), (factor, level)] for name, other in row.items())
    return sum(tuple(sorted(pair, key=ORDER.get)) in left for pair in pairs)


if __name__ == '__main__':
    STORED.write_text('[\n' + ',\n'.join(f'  {list(row.values())}' for row in cover()) + '\n]\n')
