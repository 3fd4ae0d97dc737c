"""Architecture and objective: table 2 of Raffel et al. 2020, denoising and language modelling by three families.

    tformer sweep --config=configs/sweeps/t5_architectures.py --workdir=runs/t5_architectures --dry_run
    tformer sweep --config=configs/sweeps/t5_architectures.py --workdir=runs/t5_architectures
    tformer sweep --config=configs/sweeps/t5_architectures.py:small --workdir=runs/small --parallel=2

Each arm is configs/t5.py with another model or objective. They compare by what is fine-tuned from them, e.g.
`tformer train --config=configs/text_to_text.py:mnli --config.train.init_from=runs/t5_architectures/ARM/seed_0` with the
model fields of its trial.json.
Not here: the rows in which encoder and decoder share their parameters, which no field expresses. The table hides tokens
one by one, of which neighbours are one span; here spans are of 1.18 tokens, the mean of that. The base size, rows and
steps are the paper's; the pieces are learnt from English alone, there from German, French and Romanian too.

`small`: the same on the standard library's bytes, which a laptop runs. `smoke`: two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Overrides, Sweep

ALONE = 1 / (1 - 0.15)  # mean length of a run of hidden tokens, where 15 % are, each for itself


def table(layers: int, given: int, wanted: int) -> list[Overrides]:
    """Returns its rows for stacks of so many layers and rows of so many tokens that are given and wanted."""
    half = {'model.num_encoder_layers': layers // 2, 'model.num_decoder_layers': layers // 2}
    decoder = {
        'model.family': 'decoder',
        'model.encoder_vocab_size': None,
        'model.num_encoder_layers': 4,  # a field's default, for a decoder has none
        'model.max_len': given + wanted,
        'data.length': given + wanted,
        'data.encoder_length': None,
    }
    causal = {**decoder, 'data.bidirectional_prefix': False}
    denoising = {'data.mean_span_length': ALONE}
    modelling = {'train.objective': 'prefix_lm'}
    rest = {**modelling, 'data.length': given}  # half of a text is given on average, at most all but a token
    return [
        *({**denoising, **each} for each in ({}, half, causal, decoder)),
        *({**rest, **each} for each in ({}, half)),
        {**causal, 'data.bidirectional_prefix': True, 'train.objective': 'causal_lm'},
        {**decoder, **modelling},
    ]


def get_sweep(size: Literal['paper', 'small', 'smoke'] = 'paper') -> Sweep:
    if size == 'paper':
        return Sweep('../t5.py', [{'data.length': 180, **row} for row in table(12, 512, 180)])
    if size == 'smoke':
        return Sweep('../t5.py:smoke', table(2, 32, 32))
    small = {
        'model.vocab_size': None,
        'model.encoder_vocab_size': None,
        'model.emb_dim': 128,
        'model.mlp_dim': 384,
        'model.num_heads': 4,
        'model.head_dim': 32,
        'model.num_encoder_layers': 4,
        'model.num_decoder_layers': 4,
        'data.source': 'stdlib',
        'data.tokenizer': 'byte',
        'data.encoder_length': 128,
        'data.length': 48,
        'optimizer.warmup_steps': 200,
        'train.num_steps': 1000,
        'train.batch_size': 16,
    }
    return Sweep('../t5.py', [{**small, **row} for row in table(4, 128, 48)])
