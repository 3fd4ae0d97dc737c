"""The pre-training tasks of BERT (Devlin et al. 2019, table 5): with and without next-sentence, and left to right.

    tformer sweep --config=configs/sweeps/bert_tasks.py --workdir=runs/bert_tasks --dry_run
    tformer sweep --config=configs/sweeps/bert_tasks.py --workdir=runs/bert_tasks
    tformer sweep --config=configs/sweeps/bert_tasks.py:small --workdir=runs/small --parallel=2

Each arm is the first phase of configs/bert.py with another objective. Their losses are of different tokens, so compare
what is fine-tuned from them: `tformer train --config=configs/glue.py:mnli
--config.train.init_from=runs/bert_tasks/ARM/seed_0` (for the last arm add `--config.model.family=decoder` and the model
fields of its trial.json). The fourth row of the table, a BiLSTM on top of the left-to-right model, is not available
here. The size is the paper's base. Differences from the paper: the data lack BooksCorpus, the pieces are
SentencePiece's and cased, and there are 900,000 steps of 128 tokens without the following 100,000 steps of 512 tokens.

`small` is the same on the standard library's bytes, for a laptop. `smoke` takes two steps.

Machine and time: not run here.
"""

from typing import Literal

from tformer.lab.sweep import Overrides, Sweep


def tasks(layers: int) -> list[Overrides]:
    left_to_right = {
        'model.family': 'decoder',
        'model.num_encoder_layers': 4,  # the default of the field, because a decoder has no encoder
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
