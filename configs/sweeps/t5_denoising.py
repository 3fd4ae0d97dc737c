"""How text is corrupted (Raffel et al. 2020, tables 4 to 7): objectives, corruption rates and lengths of spans.

    tformer sweep --config=configs/sweeps/t5_denoising.py --workdir=runs/t5_denoising --dry_run
    tformer sweep --config=configs/sweeps/t5_denoising.py --workdir=runs/t5_denoising
    tformer sweep --config=configs/sweeps/t5_denoising.py:small --workdir=runs/small --parallel=2

Each arm is configs/t5.py with another corruption. Compare what is fine-tuned from them: `tformer train
--config=configs/text_to_text.py:mnli --config.train.init_from=runs/t5_denoising/ARM/seed_0`. Three objectives are
missing, because no corruption makes them: BERT's (random tokens among the masks), deshuffling of tokens, and dropped
tokens to be predicted without their places. The paper hides single tokens, and neighbours form one span; here spans
have the resulting mean length of 1 / (1 - rate). The base size, rows and steps are the paper's. The pieces are learnt
from English only; the paper also uses German, French and Romanian. 200 sentinels enlarge the vocabulary.

`small` is the same on the standard library's bytes, for a laptop. `smoke` takes two steps.

Machine and time: not run here.
"""

import math
from typing import Literal

from tformer.lab.sweep import Overrides, Sweep


def spans(given: int, rate: float, length: float | None = None) -> Overrides:
    """Returns span corruption of texts that fill `given` tokens after it, with room for the hidden tokens."""
    length = length or 1 / (1 - rate)
    text = (given - 1) / (1 - rate + rate / length)
    wanted = math.ceil(rate * text * (1 + 1 / length)) + 2
    return {'data.mask_rate': rate, 'data.mean_span_length': length, 'data.length': wanted}


def tables(given: int) -> list[Overrides]:
    return [
        spans(given, 0.15),
        {'train.objective': 'prefix_lm', 'data.length': given},
        {'train.objective': 'denoising', 'data.noise': ('mask',), 'data.mask_rate': 0.15, 'data.length': given},
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
