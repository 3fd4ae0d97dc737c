"""Architectures and objectives (Raffel et al. 2020, table 2): denoising and language modelling by three families.

    tformer sweep --config=configs/sweeps/t5_architectures.py --workdir=runs/t5_architectures --dry_run
    tformer sweep --config=configs/sweeps/t5_architectures.py --workdir=runs/t5_architectures
    tformer sweep --config=configs/sweeps/t5_architectures.py:small --workdir=runs/small --parallel=2

Each arm is configs/t5.py with another model or objective. Compare what is fine-tuned from them, e.g. `tformer train
--config=configs/text_to_text.py:mnli --config.train.init_from=runs/t5_architectures/ARM/seed_0` with the model fields
of its trial.json. The rows in which encoder and decoder share their parameters are missing, because no field expresses
that. The paper hides single tokens, and neighbours form one span; here spans have the resulting mean length of 1.18
tokens. The base size, rows and steps are the paper's. The pieces are learnt from English only; the paper also uses
German, French and Romanian.

`small` is the same on the standard library's bytes, for a laptop. `smoke` takes two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Overrides, Sweep

ALONE = 1 / (1 - 0.15)  # mean length of a run of hidden tokens when 15 % are hidden independently


def table(layers: int, given: int, wanted: int) -> list[Overrides]:
    """Returns the rows of the table for stacks of `layers` layers, `given` input tokens and `wanted` target tokens."""
    half = {'model.num_encoder_layers': layers // 2, 'model.num_decoder_layers': layers // 2}
    decoder = {
        'model.family': 'decoder',
        'model.encoder_vocab_size': None,
        'model.num_encoder_layers': 4,  # the default of the field, because a decoder has no encoder
        'model.max_len': given + wanted,
        'data.length': given + wanted,
        'data.encoder_length': None,
    }
    causal = {**decoder, 'data.bidirectional_prefix': False}
    denoising = {'data.mean_span_length': ALONE}
    modelling = {'train.objective': 'prefix_lm'}
    rest = {**modelling, 'data.length': given}  # on average half of a text is given, at most all but one token
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
