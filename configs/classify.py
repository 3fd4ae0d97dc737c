"""Classification of labelled text by a pooled encoder, from scratch or from a masked language model.

    tformer train --config=configs/classify.py --config.data.path=DIR --workdir=runs/scratch
    tformer train --config=configs/classify.py --config.data.path=DIR --config.train.init_from=runs/mlm --workdir=runs/tuned

DIR holds {train,valid,test}.tsv, label<TAB>text.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe

MODEL = Model(
    family='encoder',
    emb_dim=192,
    mlp_dim=768,
    num_heads=4,
    num_encoder_layers=4,
    max_len=256,
    activation='gelu',
    dropout_rate=0.1,
    scan_layers=False,
)
SMALL = {'model.emb_dim': 128, 'model.mlp_dim': 512, 'model.num_encoder_layers': 2}
SMOKE = {'model.emb_dim': 32, 'model.mlp_dim': 64, 'model.num_encoder_layers': 2, 'data.tokenizer_vocab_size': 400,
         'data.length': 32, 'train.num_epochs': None, 'train.num_steps': 2, 'train.batch_size': 8,
         'train.eval_batches': 1, 'evaluate.max_examples': 16}  # fmt: skip


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=MODEL,
        data=Data(tokenizer_vocab_size=8000, length=128, overlong='truncate'),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=100, weight_decay=0.01),
        train=Train(
            objective='classification', num_epochs=4, batch_size=32, eval_every=500, best_metric='valid/accuracy'
        ),
    )
    return recipe(base, size, small={**SMALL, 'train.num_epochs': 2}, smoke=SMOKE)
