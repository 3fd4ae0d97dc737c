"""Llama 2 (Touvron et al. 2023, 2.2 and table 1) and Llama 3.1 (Llama Team 2024, table 3).

    tformer train --config=configs/architectures/llama.py:llama3_1_8b --config.data.path=DIR --workdir=runs/llama

| argument | parameters |
| --- | --- |
| (llama2_7b) | 6,738,415,616 |
| llama2_13b | 13,015,864,320 |
| llama2_70b | 68,976,648,192 |
| llama3_1_8b | 8,030,261,248 |
| llama3_1_70b | 70,553,706,496 |
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe

LLAMA3_1 = {
    'model.vocab_size': 128_256,
    'model.num_kv_heads': 8,
    'model.max_len': 131_072,
    'model.rope_theta': 500_000.0,
    'model.rope_scaling': 'llama3',
    'model.rope_factor': 8.0,
    'model.rope_trained_len': 8192,
    'data.length': 8192,
}
WIDTH_70B = {
    'model.emb_dim': 8192,
    'model.mlp_dim': 28_672,
    'model.num_decoder_layers': 80,
    'model.num_heads': 64,
    'model.num_kv_heads': 8,
    'optimizer.learning_rate': 1.5e-4,
}


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            vocab_size=32_000,
            emb_dim=4096,
            mlp_dim=11_008,
            num_decoder_layers=32,
            num_heads=32,
            max_len=4096,
            tied_embeddings=None,
            embedding_scale=None,
            position='rope',
            norm='rmsnorm',
            norm_epsilon=1e-5,
            mlp_bias=False,
            activation='swiglu',
            dropout_rate=0.0,
            initializer='truncated_normal',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=32_000, length=4096, batching='pack'),
        optimizer=Optimizer(
            learning_rate=3e-4, warmup_steps=2000, final_fraction=0.1, beta2=0.95, epsilon=1e-5, weight_decay=0.1
        ),
        train=Train(objective='causal_lm', num_steps=500_000, batch_size=1024, eval_every=5000),
        decode=Decode(strategy='sample', top_p=0.9, max_len=256),
    )
    return recipe(
        base,
        size,
        llama2_13b={
            'model.emb_dim': 5120,
            'model.mlp_dim': 13_824,
            'model.num_decoder_layers': 40,
            'model.num_heads': 40,
        },
        llama2_70b=WIDTH_70B,
        llama3_1_8b={**LLAMA3_1, 'model.mlp_dim': 14_336},
        llama3_1_70b={**WIDTH_70B, **LLAMA3_1},
        smoke={
            'model.vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_decoder_layers': 2,
            'model.num_heads': 4,
            'model.num_kv_heads': 2,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
