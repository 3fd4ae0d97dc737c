"""RoBERTa (Liu et al. 2019, 2.2 and table 9): BERT trained longer on whole blocks of text, base and large.

    tformer train --config=configs/architectures/roberta.py --config.data.path=DIR --workdir=runs/roberta

| argument | parameters with the pooler, without the masked-LM head | with the head, without the pooler |
| --- | --- | --- |
| (base) | 124,645,632 | 124,697,433 |
| large | 355,359,744 | 355,412,057 |

As in the published weights, the position table has two rows before position 0, and there is one type of token.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder',
            vocab_size=50_265,
            emb_dim=768,
            mlp_dim=3072,
            num_encoder_layers=12,
            num_heads=12,
            embedding_scale=None,
            embedding_norm=True,
            num_token_types=1,
            position='learned',
            position_offset=2,
            norm_placement='post',
            norm_epsilon=1e-5,
            attention_bias=('query', 'key', 'value', 'out'),
            activation='gelu',
            output_bias=True,
            mlm_transform=True,
            pooling='cls',
            pooler=True,
            attention_dropout_rate=0.1,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=50_265, length=512, batching='pack'),
        optimizer=Optimizer(
            learning_rate=6e-4,
            schedule='linear',
            warmup_steps=24_000,
            epsilon=1e-6,
            weight_decay=0.01,
            clip_norm=None,
        ),
        train=Train(objective='masked_lm', num_steps=500_000, batch_size=8192, eval_every=10_000),
    )
    return recipe(
        base,
        size,
        large={
            'model.emb_dim': 1024,
            'model.mlp_dim': 4096,
            'model.num_encoder_layers': 24,
            'model.num_heads': 16,
            'optimizer.learning_rate': 4e-4,
            'optimizer.warmup_steps': 30_000,
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
