"""Mixtral 8x7B (Jiang et al. 2024, table 1): a mixture of eight feed-forwards, two for each token.

    tformer train --config=configs/architectures/mixtral.py --config.data.path=DIR --workdir=runs/mixtral

| argument | parameters |
| --- | --- |
| (8x7b) | 46,702,792,704 |
| 8x22b | 140,620,634,112 |
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            vocab_size=32_000,
            emb_dim=4096,
            mlp_dim=14_336,
            num_decoder_layers=32,
            num_heads=32,
            num_kv_heads=8,
            max_len=32_768,
            tied_embeddings=None,
            embedding_scale=None,
            position='rope',
            rope_theta=1_000_000.0,
            norm='rmsnorm',
            norm_epsilon=1e-5,
            mlp_bias=False,
            activation='swiglu',
            num_experts=8,
            balance_weight=0.02 * 2 / 32,  # the published weight is of the mean over layers, of the sum over choices
            router_z_weight=0.0,
            dropout_rate=0.0,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=32_000, length=4096, batching='pack'),
        optimizer=Optimizer(
            learning_rate=3e-4, warmup_steps=2000, final_fraction=0.1, beta2=0.95, epsilon=1e-5, weight_decay=0.1
        ),
        train=Train(objective='causal_lm', num_steps=500_000, batch_size=1024, eval_every=5000),
        decode=Decode(strategy='sample', max_len=256),
    )
    sizes = {
        '8x22b': {
            'model.emb_dim': 6144,
            'model.mlp_dim': 16_384,
            'model.num_decoder_layers': 56,
            'model.num_heads': 48,
            'model.max_len': 65_536,
        },
    }
    return recipe(
        base,
        size,
        **sizes,
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_decoder_layers': 2,
            'model.num_heads': 4,
            'model.num_kv_heads': 2,
            'model.num_experts': 4,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
