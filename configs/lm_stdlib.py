r"""A language model of the source text of the running interpreter's standard library, split by file.

    tformer train --config=configs/lm_stdlib.py --workdir=runs/lm
    tformer generate --workdir=runs/lm 'def '
    tformer train --config=configs/lm_stdlib.py:small,distilled --workdir=runs/small --config.train.teacher=runs/lm
    tformer train --config=configs/lm_stdlib.py:dpo --config.data.path=DIR --workdir=runs/preferred \
        --config.train.init_from=runs/lm
    tformer train --config=configs/lm_stdlib.py:latent --workdir=runs/latent
    tformer train --config=configs/lm_stdlib.py:fim --workdir=runs/fim
    tformer generate --workdir=runs/fim 'def add(a, b):\n    <FILL_ME>\n\nprint(add(1, 2))'

DIR holds {train,valid,test}.jsonl, {"prompt": ..., "chosen": ..., "rejected": ...} a line.
`latent` caches 96 numbers for each token and layer in place of 512 (DeepSeek-AI 2024, 2.1).

Machine and time: 600 steps in 34 minutes on two CPU cores, beside three other trainings. Result: 1.35 bits per byte
on the test files.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Model, Optimizer, Train, recipe

# the fields of a tokenizer without training
BYTES = {'data.tokenizer': 'byte', 'data.tokenizer_vocab_size': 8000, 'data.tokenizer_model': 'unigram'}


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='decoder',
            emb_dim=256,
            mlp_dim=768,
            num_heads=4,
            num_decoder_layers=4,
            max_len=512,
            position='rope',
            norm='rmsnorm',
            activation='swiglu',
            mlp_bias=False,
            dropout_rate=0.0,
            scan_layers=False,
        ),
        data=Data(
            source='stdlib', tokenizer='sentencepiece', tokenizer_model='bpe', tokenizer_vocab_size=4096,
            length=256, batching='pack',
        ),
        optimizer=Optimizer(learning_rate=2e-3, warmup_steps=100, final_fraction=0.05, weight_decay=0.1),
        train=Train(objective='causal_lm', num_steps=600, batch_size=16, eval_every=200, best_metric='valid/loss'),
        decode=Decode(strategy='sample', temperature=0.8, top_p=0.95, max_len=128),
    )  # fmt: skip
    return recipe(
        base,
        size,
        bytes={  # 64 at a time, for sweeps on a CPU
            'model.emb_dim': 96,
            'model.mlp_dim': 256,
            'model.num_decoder_layers': 2,
            'model.max_len': 64,
            **BYTES,
            'data.length': 64,
            'decode.max_len': 32,
            'data.num_buckets': 1,
            'train.num_steps': 400,
            'train.batch_size': 32,
            'train.eval_every': 400,
            'train.eval_batches': 20,
            'evaluate.max_examples': 8,
            'evaluate.samples': 0,
        },
        distilled={'train.objective': 'causal_lm_distilled', 'train.teacher': 'runs/lm'},
        dpo={
            'train.objective': 'dpo',
            'train.init_from': 'runs/lm',
            'data.source': 'files',
            'data.batching': 'bucket',
            'optimizer.learning_rate': 1e-4,
            'train.num_steps': 200,
            'train.eval_every': 50,
        },
        fim={'train.objective': 'fill_in_middle', 'data.sentinels': 3},
        latent={'model.kv_latent_dim': 64, 'model.query_latent_dim': 96, 'model.rotary_dim': 32},
        small={'model.emb_dim': 128, 'model.mlp_dim': 384, 'train.num_steps': 500},
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_decoder_layers': 2,
            **BYTES,
            'data.length': 32,
            'decode.max_len': 8,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
