"""What BERT is pre-trained on: table 5 of Devlin et al. 2019, with the next sentence, without it, and left to right.

    tformer sweep --config=configs/sweeps/bert_tasks.py --workdir=runs/bert_tasks --dry_run
    tformer sweep --config=configs/sweeps/bert_tasks.py --workdir=runs/bert_tasks
    tformer sweep --config=configs/sweeps/bert_tasks.py:small --workdir=runs/small --parallel=2

Each arm is configs/bert.py, its first phase, with another objective. They compare by what is fine-tuned from them, for
their losses are of different tokens: `tformer train --config=configs/glue.py:mnli
--config.train.init_from=runs/bert_tasks/ARM/seed_0` (of the last arm also `--config.model.family=decoder` and the model
fields that its trial.json has). The table's fourth row, a BiLSTM on top of the left-to-right model, has no fields here.
The size is the paper's base; not its own are the data, which lack BooksCorpus, the pieces, SentencePiece's and cased,
and the steps, 900,000 of 128 tokens without the 100,000 of 512 after them.

`small`: the same on the standard library's bytes, which a laptop runs. `smoke`: two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Overrides, Sweep


def tasks(layers: int) -> list[Overrides]:
    left_to_right = {
        'model.family': 'decoder',
        'model.num_encoder_layers': 4,  # a field's default, for a decoder has none
        'model.num_decoder_layers': layers,
        'model.num_token_types': None,
        'train.objective': 'causal_lm',
    }
    return [{}, {'train.objective': 'masked_lm'}, left_to_right]


def get_sweep(size: Literal['paper', 'small', 'smoke'] = 'paper') -> Sweep:
    if size == 'paper':
        return Sweep('../bert.py', tasks(12))
    if size == 'smoke':
        return Sweep('../bert.py:smoke', tasks(2))
    small = {
        'model.vocab_size': None,
        'model.emb_dim': 128,
        'model.mlp_dim': 512,
        'model.num_heads': 4,
        'model.num_encoder_layers': 3,
        'data.source': 'stdlib',
        'data.tokenizer': 'byte',
        'optimizer.learning_rate': 1e-3,
        'optimizer.warmup_steps': 100,
        'train.num_steps': 1000,
        'train.batch_size': 16,
    }
    return Sweep('../bert.py', [{**small, **task} for task in tasks(3)])
