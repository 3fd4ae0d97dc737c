"""How text is corrupted: tables 4 to 7 of Raffel et al. 2020, objectives, corruption rates and lengths of spans.

    tformer sweep --config=configs/sweeps/t5_denoising.py --workdir=runs/t5_denoising --dry_run
    tformer sweep --config=configs/sweeps/t5_denoising.py --workdir=runs/t5_denoising
    tformer sweep --config=configs/sweeps/t5_denoising.py:small --workdir=runs/small --parallel=2

Each arm is configs/t5.py with another corruption. They compare by what is fine-tuned from them: `tformer train
--config=configs/text_to_text.py:mnli --config.train.init_from=runs/t5_denoising/ARM/seed_0`.
Not here, for no corruption makes them: BERT's (random tokens among the masks), deshuffling of tokens, and dropped
tokens that are wanted without their places. The tables hide tokens one by one, of which neighbours are one
span; here spans have the mean length of that, 1 / (1 - rate). The base size, rows and steps are the paper's; the pieces
are learnt from English alone, there from German, French and Romanian too, and 200 sentinels make the table larger.

`small`: the same on the standard library's bytes, which a laptop runs. `smoke`: two steps.

Machine and time: not run here.
"""

import math
from typing import Literal

from tformer.lab.sweep import Overrides, Sweep


def spans(given: int, rate: float, length: float | None = None) -> Overrides:
    """Returns span corruption of texts that fill `given` tokens once it is done, with room for what is hidden."""
    length = length or 1 / (1 - rate)
    text = (given - 1) / (1 - rate + rate / length)
    wanted = math.ceil(rate * text * (1 + 1 / length)) + 2
    return {'data.mask_rate': rate, 'data.mean_span_length': length, 'data.length': wanted}


def tables(given: int) -> list[Overrides]:
    return [
        spans(given, 0.15),
        {**spans(given, 0.15), 'train.objective': 'prefix_lm', 'data.length': given},
        {**spans(given, 0.15), 'train.objective': 'denoising', 'data.noise': ('mask',), 'data.length': given},
        *(spans(given, rate) for rate in (0.1, 0.25, 0.5)),
        *(spans(given, 0.15, length) for length in (2.0, 3.0, 5.0, 10.0)),
    ]


def get_sweep(size: Literal['paper', 'small', 'smoke'] = 'paper') -> Sweep:
    room = {
        'model.vocab_size': 32_200,
        'model.encoder_vocab_size': 32_200,
        'model.max_len': 768,
        'data.sentinels': 200,
    }
    if size == 'paper':
        return Sweep('../t5.py', [{**room, **row} for row in tables(512)])
    if size == 'smoke':
        return Sweep('../t5.py:smoke', tables(32))
    small = {
        'model.vocab_size': None,
        'model.encoder_vocab_size': None,
        'model.emb_dim': 128,
        'model.mlp_dim': 384,
        'model.num_heads': 4,
        'model.head_dim': 32,
        'model.num_encoder_layers': 3,
        'model.num_decoder_layers': 3,
        'data.source': 'stdlib',
        'data.tokenizer': 'byte',
        'data.encoder_length': 128,
        'optimizer.warmup_steps': 200,
        'train.num_steps': 1000,
        'train.batch_size': 16,
    }
    return Sweep('../t5.py', [{**small, **row} for row in tables(128)])
