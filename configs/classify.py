r"""Classification of labelled text by a pooled encoder, from scratch or from a masked language model of the same text.

    tformer train --config=configs/classify.py --config.data.path=DIR --workdir=runs/scratch

    tformer train --config=configs/classify.py:pretrain --config.data.path=DIR --workdir=runs/pretrained
    tformer train --config=configs/classify.py --config.data.path=DIR --workdir=runs/tuned \
        --config.train.init_from=runs/pretrained

    tformer train --config=configs/classify.py:small,distilled --config.data.path=DIR --workdir=runs/distilled \
        --config.train.teacher=runs/scratch

`few_labels.py` holds the measured experiment, with a smaller model and pre-training on packed rows.

DIR holds {train,valid,test}.tsv, label<TAB>text. From scratch, a few thousand texts may not suffice to beat counted
words, which `tformer evaluate --workdir=runs/scratch --baseline` says; a trained model is the better start then
(finetune_classify.py).
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe


def get_config(arguments: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder',
            emb_dim=192,
            mlp_dim=768,
            num_heads=4,
            num_encoder_layers=4,
            max_len=256,
            activation='gelu',
            scan_layers=False,
        ),
        data=Data(tokenizer_model='bpe', length=128, num_buckets=8, overlong='truncate'),
        optimizer=Optimizer(learning_rate=5e-4, weight_decay=0.01),
        train=Train(
            objective='classification', num_epochs=12, batch_size=32, eval_every=0.1, best_metric='valid/accuracy'
        ),
    )
    return recipe(
        base,
        arguments,
        pretrain={
            'train.objective': 'masked_lm',
            'data.overlong': 'drop',
            'train.num_epochs': 6,
            'train.batch_size': 64,
            'train.eval_every': 500,
            'train.best_metric': 'valid/loss',
            'optimizer.learning_rate': 1e-3,
        },
        distilled={'train.objective': 'classification_distilled', 'train.teacher': 'runs/scratch'},
        small={
            'model.emb_dim': 128,
            'model.mlp_dim': 512,
            'model.num_encoder_layers': 2,
            'train.num_epochs': 3,
            'train.eval_every': 500,
            'optimizer.learning_rate': 1e-3,
        },
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'data.num_buckets': 2,
            'train.num_epochs': None,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_every': 500,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
