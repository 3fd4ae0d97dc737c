"""The transformer of Vaswani et al. 2017 ("Attention Is All You Need"), table 3: base and big, with 5.3's optimizer.

    tformer train --config=configs/architectures/original.py:big --config.data.path=DIR --workdir=runs/big

| argument | parameters, with 37,000 shared tokens | with attention_biases |
| --- | --- | --- |
| (base) | 63,045,632 | 63,082,496 |
| big | 214,171,648 | 214,245,376 |

The paper's 65M and 213M are rounded and belong to a larger vocabulary. DIR holds {train,valid,test}.tsv.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Evaluate, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            vocab_size=37_000,
            encoder_vocab_size=37_000,
            emb_dim=512,
            mlp_dim=2048,
            num_encoder_layers=6,
            num_decoder_layers=6,
            num_heads=8,
            norm_placement='post',
        ),
        data=Data(tokenizer_model='bpe', tokenizer_vocab_size=37_000, batch_tokens=25_000),
        optimizer=Optimizer(name='adam', learning_rate=1.0, schedule='noam', warmup_steps=4000, clip_norm=None),
        train=Train(objective='seq2seq', num_steps=100_000, label_smoothing=0.1, eval_every=5000),
        decode=Decode(strategy='beam', beam_size=4, length_penalty=0.6, max_len=256),
        evaluate=Evaluate(metrics=('bleu',)),
    )
    return recipe(
        base,
        size,
        big={
            'model.emb_dim': 1024,
            'model.mlp_dim': 4096,
            'model.num_heads': 16,
            'model.dropout_rate': 0.3,
            'train.num_steps': 300_000,
        },
        attention_biases={'model.attention_bias': ('query', 'key', 'value', 'out')},
        smoke={
            'model.vocab_size': 400,
            'model.encoder_vocab_size': 400,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_encoder_layers': 2,
            'model.num_decoder_layers': 2,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'data.batch_tokens': None,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'decode.max_len': 8,
            'evaluate.max_examples': 16,
        },
    )
