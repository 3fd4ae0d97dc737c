"""BART (Lewis et al. 2020, 2.1): base and large.

    tformer train --config=configs/architectures/bart.py:large --config.data.path=DIR --workdir=runs/bart

| argument | parameters |
| --- | --- |
| (base) | 139,420,416 |
| large | 406,291,456 |

As in the published weights, the position tables have two rows before position 0. The number of steps and the learning
rate are those of fine-tuning on summaries. DIR holds {train,valid,test}.tsv, source<TAB>target.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            vocab_size=50_265,
            encoder_vocab_size=50_265,
            emb_dim=768,
            mlp_dim=3072,
            num_encoder_layers=6,
            num_decoder_layers=6,
            num_heads=12,
            max_len=1024,
            embedding_scale=None,
            embedding_norm=True,
            position='learned',
            position_offset=2,
            norm_placement='post',
            norm_epsilon=1e-5,
            attention_bias=('query', 'key', 'value', 'out'),
            activation='gelu',
            attention_dropout_rate=0.1,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=50_265, length=1024),
        optimizer=Optimizer(
            learning_rate=3e-5,
            schedule='linear',
            warmup_steps=500,
            beta2=0.999,
            epsilon=1e-8,
            weight_decay=0.01,
            clip_norm=0.1,
        ),
        train=Train(objective='seq2seq', num_steps=20_000, label_smoothing=0.1, eval_every=1000),
        decode=Decode(strategy='beam', beam_size=4, max_len=128),
    )
    return recipe(
        base,
        size,
        large={
            'model.emb_dim': 1024,
            'model.mlp_dim': 4096,
            'model.num_encoder_layers': 12,
            'model.num_decoder_layers': 12,
            'model.num_heads': 16,
        },
        smoke={
            'model.vocab_size': 400,
            'model.encoder_vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'model.num_decoder_layers': 2,
            'model.num_heads': 4,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
