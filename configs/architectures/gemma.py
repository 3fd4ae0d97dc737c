"""Gemma 2 (Gemma Team 2024, table 1): 2B, 9B and 27B. Local and global layers alternate; soft-caps.

    tformer train --config=configs/architectures/gemma.py --config.data.path=DIR --workdir=runs/gemma

| argument | parameters |
| --- | --- |
| (gemma2_2b) | 2,614,341,888 |
| gemma2_9b | 9,241,705,984 |
| gemma2_27b | 27,227,128,320 |
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            vocab_size=256_000,
            emb_dim=2304,
            mlp_dim=9216,
            num_decoder_layers=26,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            max_len=8192,
            position='rope',
            norm='rmsnorm_offset',
            norm_placement='sandwich',
            mlp_bias=False,
            attention_pattern=('local', 'global'),
            window=4096,
            attention_softcap=50.0,
            activation='geglu_tanh',
            output_softcap=30.0,
            dropout_rate=0.0,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_vocab_size=256_000, length=8192, batching='pack'),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, beta2=0.95, epsilon=1e-8, weight_decay=0.1),
        train=Train(objective='causal_lm', num_steps=500_000, batch_size=512, eval_every=5000),
        decode=Decode(strategy='sample', max_len=256),
    )
    return recipe(
        base,
        size,
        gemma2_9b={
            'model.emb_dim': 3584,
            'model.mlp_dim': 14_336,
            'model.num_decoder_layers': 42,
            'model.num_heads': 16,
            'model.num_kv_heads': 8,
        },
        gemma2_27b={
            'model.emb_dim': 4608,
            'model.mlp_dim': 36_864,
            'model.num_decoder_layers': 46,
            'model.num_heads': 32,
            'model.num_kv_heads': 16,
            'model.head_dim': 128,
            'model.attention_scale': 'sqrt_scale_dim',
            'model.attention_scale_dim': 144.0,  # emb_dim / num_heads
        },
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_decoder_layers': 2,
            'model.num_heads': 4,
            'model.num_kv_heads': 2,
            'model.head_dim': 8,
            'model.window': 8,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
