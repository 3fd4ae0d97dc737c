"""Variations of the transformer on English to German: table 3 of Vaswani et al. 2017, rows A to E and big.

    tformer sweep --config=configs/sweeps/attention_is_all_you_need.py --workdir=runs/table3 --dry_run
    tformer sweep --config=configs/sweeps/attention_is_all_you_need.py --workdir=runs/table3
    tformer sweep --config=configs/sweeps/attention_is_all_you_need.py:small --workdir=runs/small3 --parallel=2

Each arm is configs/wmt14_en_de.py with the changes of one row. The data come from TFDS, or from files:
`--config.data.source=files --config.data.path=DIR`. `small` is the same table on configs/g2p.py:demo with an eighth of
the widths and half of the depths, for a laptop. `smoke` takes two steps.

The comments give the millions of parameters that the paper prints. They agree with a vocabulary of about 41,100 tokens;
with the 37,000 tokens of section 5.1, which are used here, base has 63 million and big has 214 million. The paper
scores perplexity per piece and BLEU on newstest2013, which is the valid split here. Sizes, rates and steps are the
paper's. The pieces are SentencePiece's, and a batch has 25,000 tokens of the longer side; the paper has 25,000 tokens
of each side.

Machine and time: not run here; in the paper 12 hours for base and 3.5 days for big on 8 P100 (5.2).
"""

import pathlib
from typing import Literal

from tformer.config import changes
from tformer.lab.sweep import Overrides, Sweep, chain, grid

WMT = f'{pathlib.Path(__file__).parents[1]}/wmt14_en_de.py'


def table(width: int, depth: int) -> list[Overrides]:
    """Returns rows base, A, B, C, D and E of a model of this width, with 8 heads, and of this depth."""
    head_dim = width // 8

    def layers(number: int) -> Overrides:
        return {'model.num_encoder_layers': number, 'model.num_decoder_layers': number}

    return chain(
        [{}],  # 65
        [{'model.num_heads': heads} for heads in (1, 4, 16, 32)],  # A: as base
        [{'model.head_dim': head_dim // 4, 'model.value_dim': head_dim}],  # B: 58
        [{'model.head_dim': head_dim // 2, 'model.value_dim': head_dim}],  # B: 60
        [layers(depth // 3), layers(2 * depth // 3), layers(4 * depth // 3)],  # C: 36, 50, 80
        [{'model.emb_dim': width // 2}, {'model.emb_dim': 2 * width}],  # C: 28, 168; 8 heads share the width
        [{'model.mlp_dim': 2 * width}, {'model.mlp_dim': 8 * width}],  # C: 53, 90
        grid({'model.dropout_rate': [0.0, 0.2]}),  # D
        grid({'train.label_smoothing': [0.0, 0.2]}),  # D
        [{'model.position': 'learned'}],  # E
    )


def get_sweep(size: Literal['paper', 'small', 'smoke'] = 'paper') -> Sweep:
    if size == 'paper':
        return Sweep(WMT, chain(table(512, 6), [changes(f'{WMT}:big')]))  # 213
    if size == 'smoke':
        return Sweep(f'{WMT}:smoke', table(32, 6))
    small = {
        'model.emb_dim': 64,
        'model.mlp_dim': 256,
        'model.num_heads': 8,
        'model.num_encoder_layers': 3,
        'model.num_decoder_layers': 3,
        'model.dropout_rate': 0.1,
        'train.label_smoothing': 0.1,
        'train.num_steps': 650,
        'train.eval_every': 650,
        'evaluate.max_examples': 4000,
    }
    return Sweep('../g2p.py:demo', [{**small, **row} for row in table(64, 3)])
