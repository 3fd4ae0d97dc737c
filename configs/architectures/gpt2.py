"""GPT-2 (Radford et al. 2019, table 2): small, medium, large, xl.

    tformer train --config=configs/architectures/gpt2.py:medium --config.data.path=DIR --workdir=runs/gpt2

| argument | parameters |
| --- | --- |
| (small) | 124,439,808 |
| medium | 354,823,168 |
| large | 774,030,080 |
| xl | 1,557,611,200 |

The counts in the paper's table are wrong, as its authors say. The paper leaves the optimizer out; this one is GPT-3's
at the same size (Brown et al. 2020, table 2.1 and B).
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            vocab_size=50_257,
            emb_dim=768,
            mlp_dim=3072,
            num_decoder_layers=12,
            num_heads=12,
            max_len=1024,
            embedding_scale=None,
            position='learned',
            norm_epsilon=1e-5,
            attention_bias=('query', 'key', 'value', 'out'),
            activation='gelu_tanh',
            attention_dropout_rate=0.1,
            initializer='gpt2',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=50_257, length=1024, batching='pack'),
        optimizer=Optimizer(
            learning_rate=6e-4, warmup_steps=2000, final_fraction=0.1, beta2=0.95, epsilon=1e-8, weight_decay=0.1
        ),
        train=Train(objective='causal_lm', num_steps=600_000, batch_size=512, eval_every=5000),
        decode=Decode(strategy='sample', top_k=40, max_len=256),
    )
    return recipe(
        base,
        size,
        medium={
            'model.emb_dim': 1024,
            'model.mlp_dim': 4096,
            'model.num_decoder_layers': 24,
            'model.num_heads': 16,
            'optimizer.learning_rate': 3e-4,
        },
        large={
            'model.emb_dim': 1280,
            'model.mlp_dim': 5120,
            'model.num_decoder_layers': 36,
            'model.num_heads': 20,
            'optimizer.learning_rate': 2.5e-4,
        },
        xl={
            'model.emb_dim': 1600,
            'model.mlp_dim': 6400,
            'model.num_decoder_layers': 48,
            'model.num_heads': 25,
            'optimizer.learning_rate': 2e-4,
        },
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
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
