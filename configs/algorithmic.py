"""Modular division from half of its equations (Power et al. 2022): memorised first, generalised much later.

    tformer train --config=configs/algorithmic.py --workdir=runs/division
    tformer train --config=configs/algorithmic.py:small --workdir=runs/small
    tformer train --config=configs/algorithmic.py:reverse --workdir=runs/reverse    # and copy, sort: on longer inputs

The model reads `a o b` and names c as one of p classes; accuracy is the share of right classes. `--config.data.task`
chooses another task. `small`, for a CPU, has one layer, p = 59 and seven tenths of the equations: in 3,000 steps of
one seed the training loss fell below 0.1 nats at step 550, and validation accuracy passed 99 % at step 2,600.
`reverse`, `copy` and `sort` train on up to 10 numbers; the test split has 11 to 20. `smoke` is two steps of a size
that any machine trains: `:reverse,smoke`.

Machine and time: `small` took a minute and a half on two CPU cores beside other work; the rest was not run here.
From the paper: two layers, 128 wide, four heads; AdamW at 1e-3 after 10 steps, weight decay 1, batches of 512 (A.1.2).
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Evaluate, Model, Optimizer, Train, recipe


def get_config(arguments: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            emb_dim=128,
            mlp_dim=512,
            num_heads=4,
            num_decoder_layers=2,
            max_len=64,
            position='learned',
            pooling='last',
            dropout_rate=0.0,
            scan_layers=False,
        ),
        data=Data(source='algorithmic', tokenizer='symbol', byte_fallback=False, length=5, batching='pad'),
        optimizer=Optimizer(
            schedule='constant', warmup_steps=10, weight_decay=1.0, clip_norm=None, epsilon=1e-8
        ),
        train=Train(
            objective='classification', num_steps=5000, batch_size=512, eval_every=100, best_metric='valid/accuracy'
        ),
        evaluate=Evaluate(samples=0),
    )  # fmt: skip
    writing = {
        'model.pooling': 'mean',  # nothing is pooled
        'data.modulus': 10,
        'data.length': 48,  # of 20 numbers given, 20 written, two marks
        'data.batching': 'bucket',
        'optimizer.weight_decay': 0.01,
        'train.objective': 'seq2seq',
        'train.num_steps': 2000,
        'train.batch_size': 128,
        'train.eval_every': 500,
        'train.best_metric': 'valid/loss',
        'decode.max_len': 32,
        'evaluate.metrics': ('exact_match',),
    }
    return recipe(
        base,
        arguments,
        **{task: {**writing, 'data.task': task} for task in ('copy', 'reverse', 'sort')},
        small={
            'model.num_decoder_layers': 1,
            'data.modulus': 59,
            'data.train_share': 0.7,
            'optimizer.clip_norm': 1.0,
            'train.num_steps': 4000,
            'train.batch_size': 256,
        },
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'data.modulus': 11,
            'train.num_steps': 2,
            'train.batch_size': 16,
            'train.eval_every': 2,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
