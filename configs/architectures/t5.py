"""T5 1.0 (Raffel et al. 2020, 3.7) and 1.1 (Shazeer 2020: gated, output not tied, no dropout in pre-training).

    tformer train --config=configs/architectures/t5.py:v1_1_base --config.data.path=DIR --workdir=runs/t5

| argument | parameters | 1.1 | parameters |
| --- | --- | --- | --- |
| small | 60,506,624 | v1_1_small | 76,961,152 |
| (base) | 222,903,552 | v1_1_base | 247,577,856 |
| large | 737,668,096 | v1_1_large | 783,150,080 |
| 3b | 2,851,598,336 | v1_1_xl | 2,849,757,184 |
| 11b | 11,307,321,344 | v1_1_xxl | 11,135,332,352 |

Adafactor at a constant rate of 1e-3 is the paper's fine-tuning (3.1.2).
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe

V1_1 = {
    'model.activation': 'geglu_tanh',
    'model.tied_embeddings': 'inputs',
    'model.output_scale': None,
    'model.dropout_rate': 0.0,
    'model.attention_dropout_rate': 0.0,
    'model.activation_dropout_rate': 0.0,
}


def widths(emb_dim: int, mlp_dim: int, num_heads: int, num_layers: int, head_dim: int = 64) -> dict[str, int]:
    """Returns the differences of one size, both stacks alike."""
    return {
        'model.emb_dim': emb_dim,
        'model.mlp_dim': mlp_dim,
        'model.num_heads': num_heads,
        'model.head_dim': head_dim,
        'model.num_encoder_layers': num_layers,
        'model.num_decoder_layers': num_layers,
    }


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            vocab_size=32_128,
            encoder_vocab_size=32_128,
            emb_dim=768,
            mlp_dim=3072,
            num_encoder_layers=12,
            num_decoder_layers=12,
            num_heads=12,
            head_dim=64,
            embedding_scale=None,
            position='relative',
            norm='rmsnorm',
            attention_scale='unscaled',
            mlp_bias=False,
            output_scale='rsqrt_dim',
            attention_dropout_rate=0.1,
            activation_dropout_rate=0.1,
            initializer='t5',
        ),
        data=Data(tokenizer_vocab_size=32_000, length=512),
        optimizer=Optimizer(name='adafactor', learning_rate=1e-3, schedule='constant', warmup_steps=0, clip_norm=None),
        train=Train(objective='seq2seq', num_steps=262_144, batch_size=128, eval_every=5000),
        decode=Decode(max_len=128),
    )
    sizes = {
        'small': widths(512, 2048, 8, 6),
        'large': widths(1024, 4096, 16, 24),
        '3b': widths(1024, 16_384, 32, 24, 128),
        '11b': widths(1024, 65_536, 128, 24, 128),
        'v1_1_small': {**V1_1, **widths(512, 1024, 6, 8)},
        'v1_1_base': {**V1_1, **widths(768, 2048, 12, 12)},
        'v1_1_large': {**V1_1, **widths(1024, 2816, 16, 24)},
        'v1_1_xl': {**V1_1, **widths(2048, 5120, 32, 24)},
        'v1_1_xxl': {**V1_1, **widths(4096, 10_240, 64, 24)},
    }
    return recipe(
        base,
        size,
        **sizes,
        smoke={
            **widths(32, 64, 4, 2, 8),
            'model.vocab_size': 400,
            'model.encoder_vocab_size': 400,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
