"""BERT (Devlin et al. 2019, 3 and A.2): base and large, trained on masked tokens without next-sentence prediction.

    tformer train --config=configs/architectures/bert.py:large --config.data.path=DIR --workdir=runs/bert

| argument | parameters with the pooler, without the masked-LM head | with the head, without the pooler |
| --- | --- | --- |
| (base) | 109,482,240 | 109,514,298 |
| large | 335,141,888 | 335,174,458 |
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder',
            vocab_size=30_522,
            emb_dim=768,
            mlp_dim=3072,
            num_encoder_layers=12,
            num_heads=12,
            embedding_scale=None,
            embedding_norm=True,
            num_token_types=2,
            position='learned',
            norm_placement='post',
            norm_epsilon=1e-12,
            attention_bias=('query', 'key', 'value', 'out'),
            activation='gelu',
            output_bias=True,
            mlm_transform=True,
            pooling='cls',
            pooler=True,
            attention_dropout_rate=0.1,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_vocab_size=30_522, length=512, batching='pack'),
        optimizer=Optimizer(
            learning_rate=1e-4, schedule='linear', warmup_steps=10_000, beta2=0.999, epsilon=1e-6, weight_decay=0.01
        ),
        train=Train(objective='masked_lm', num_steps=1_000_000, batch_size=256, eval_every=10_000),
    )
    return recipe(
        base,
        size,
        large={
            'model.emb_dim': 1024,
            'model.mlp_dim': 4096,
            'model.num_encoder_layers': 24,
            'model.num_heads': 16,
        },
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'model.num_heads': 4,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
