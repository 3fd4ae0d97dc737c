r"""Spelling of 1623 to modern spelling, letter by letter: an encoder-decoder on lines of Shakespeare's First Folio.

    tformer train --config=configs/modernize.py --config.data.path=DIR --workdir=runs/modernize
    tformer generate --workdir=runs/modernize 'In deliuering my sonne from me'

DIR holds {train,valid,test}.tsv, old<TAB>modern (64,134 lines for training); `smoke` is a size that any machine trains.

Machine and time: about twenty minutes on two CPU cores beside other work. Result: 5.0 % of the characters of the test
lines are wrong, and 34.6 % of the lines are right. Copying the old line gets 9.7 % of the characters wrong, by

    python -c "from tformer.evaluation import text_scores
    rows = [line.rstrip('\n').split('\t') for line in open('DIR/test.tsv')]
    print(text_scores.error_rate([old for old, _ in rows], [[new] for _, new in rows], list))"
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Evaluate, Model, Optimizer, Train, recipe


def get_config(arguments: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            emb_dim=128,
            mlp_dim=512,
            num_heads=4,
            num_encoder_layers=3,
            num_decoder_layers=3,
            max_len=96,
            scan_layers=False,
        ),
        data=Data(tokenizer='char', length=72, num_buckets=5),
        optimizer=Optimizer(learning_rate=2e-3, warmup_steps=300),
        train=Train(objective='seq2seq', num_steps=4000, batch_size=64, label_smoothing=0.1, eval_every=1000),
        decode=Decode(max_len=80, batch_size=128),
        evaluate=Evaluate(metrics=('character_error_rate', 'exact_match')),
    )
    return recipe(
        base,
        arguments,
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'model.num_decoder_layers': 2,
            'data.length': 64,
            'data.num_buckets': 1,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
