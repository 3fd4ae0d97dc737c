"""From recurrence to attention, at the same number of parameters: emb_dim is matched.

    tformer sweep --config=configs/sweeps/recurrent.py --workdir=runs/recurrent --dry_run
    tformer sweep --config=configs/sweeps/recurrent.py --workdir=runs/recurrent --parallel=2
    tformer sweep --config=configs/sweeps/recurrent.py:length --workdir=runs/length

An encoder and a decoder of simple RNN cells (Elman 1990), LSTM (Sutskever et al. 2014) and GRU (Cho et al. 2014), an
encoder that reads both ways, attention (Bahdanau et al. 2015; Luong et al. 2015), and the transformer, the baseline
(Vaswani et al. 2017). Three seeds of each of seven arms on g2p data; a trial is configs/g2p.py:demo at half its width
for a quarter of its steps. `length` has language models of configs/lm_stdlib.py, an LSTM and a transformer, on rows of
64 to 512 tokens with equally many tokens per step: compare loss and seconds against the length. `smoke` takes two
steps.

Machine and time: 21 trials in 32 minutes on two CPU cores that were shared with other work.
"""

from typing import Literal

from tformer.config import Model
from tformer.lab.sweep import Match, Overrides, Sweep, chain, grid, product, seeds, zipped

MATCH = [Match('parameters', 'model.emb_dim', multiple=2)]


def without_block(*fields: str) -> Overrides:
    """Returns the default values of a block's fields, which a recurrent model does not use."""
    return {f'model.{field}': getattr(Model, field) for field in fields}


def journey() -> list[Overrides]:
    cells = grid({'model.recurrence': ['rnn', 'lstm', 'gru']})
    lstm = {'model.recurrence': 'lstm', 'model.bidirectional': True}
    attention = grid({'model.recurrent_attention': ['dot', 'additive']})
    return product([without_block('mlp_dim')], chain(cells, [lstm], product([lstm], attention)))


def get_sweep(size: Literal['small', 'length', 'smoke'] = 'small') -> Sweep:
    if size == 'smoke':
        return Sweep('../g2p.py:smoke', chain([{}], journey()), MATCH)
    if size == 'length':
        lengths = zipped({'data.length': [64, 128, 256, 512], 'train.batch_size': [64, 32, 16, 8]})
        lstm = {'model.recurrence': 'lstm', **without_block('mlp_dim', 'position', 'norm', 'activation', 'mlp_bias')}
        tiny = {'data.tokenizer_vocab_size': 1024, 'train.num_steps': 300, 'train.eval_every': 150}
        arms = [{'model.emb_dim': 64, 'model.mlp_dim': 192}, {'model.emb_dim': 64, **lstm}]
        return Sweep('../lm_stdlib.py:small', product([tiny], arms, lengths, seeds(3)), MATCH)
    tiny = {'model.emb_dim': 64, 'train.num_steps': 650, 'train.eval_every': 325}
    return Sweep('../g2p.py:demo', product([tiny], chain([{'model.mlp_dim': 256}], journey()), seeds(3)), MATCH)
