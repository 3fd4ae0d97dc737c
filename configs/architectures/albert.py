"""ALBERT (Lan et al. 2020, table 1): one block at every depth and a factorised token table. Trained on masked tokens.

    tformer train --config=configs/architectures/albert.py --config.data.path=DIR --workdir=runs/albert

| argument | parameters with the pooler, without the masked-LM head |
| --- | --- |
| (base) | 11,683,584 |
| large | 17,683,968 |
| xlarge | 58,724,864 |
| xxlarge | 222,595,584 |

The second published version has no dropout, and neither has this one. The paper's optimizer is LAMB.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder',
            vocab_size=30_000,
            emb_dim=768,
            mlp_dim=3072,
            num_encoder_layers=12,
            num_heads=12,
            embedding_scale=None,
            embedding_factor_dim=128,
            embedding_norm=True,
            num_token_types=2,
            position='learned',
            norm_placement='post',
            norm_epsilon=1e-12,
            layer_sharing='all',
            attention_bias=('query', 'key', 'value', 'out'),
            activation='gelu_tanh',
            output_bias=True,
            mlm_transform=True,
            pooling='cls',
            pooler=True,
            dropout_rate=0.0,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_vocab_size=30_000, length=512, batching='pack'),
        optimizer=Optimizer(schedule='linear', warmup_steps=3125, beta2=0.999, epsilon=1e-6, weight_decay=0.01),
        train=Train(objective='masked_lm', num_steps=125_000, batch_size=4096, eval_every=5000),
    )
    return recipe(
        base,
        size,
        large={'model.emb_dim': 1024, 'model.mlp_dim': 4096, 'model.num_encoder_layers': 24, 'model.num_heads': 16},
        xlarge={'model.emb_dim': 2048, 'model.mlp_dim': 8192, 'model.num_encoder_layers': 24, 'model.num_heads': 16},
        xxlarge={'model.emb_dim': 4096, 'model.mlp_dim': 16_384, 'model.num_heads': 64},
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'model.num_heads': 4,
            'model.embedding_factor_dim': 16,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
