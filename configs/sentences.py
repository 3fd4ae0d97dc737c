r"""Vectors of sentences, whose cosine is high where they belong together: pairs, single sentences, or scored pairs.

    tformer train --config=configs/sentences.py --config.data.path=DIR --workdir=runs/sentences
    tformer embed --workdir=runs/sentences --input=texts.txt --output=vectors.npy --normalize

DIR holds {train,valid,test}.tsv, text<TAB>positive[<TAB>negative], or .jsonl with "text", "positive" and, where there
are any, "negative" (a text, or a list): questions and answers, titles and texts, sentences in two languages.

    tformer train --config=configs/sentences.py:simcse --config.data.path=DIR --workdir=runs/simcse
    tformer train --config=configs/sentences.py:scored --config.data.path=DIR --workdir=runs/sts

`simcse` takes plain texts, paragraphs of a .txt file or the "text" of .jsonl (Gao et al. 2021: from a trained encoder,
batch_size=64, learning_rate=3e-5, one epoch). `scored` takes score<TAB>text<TAB>text, as STS-B has them, from 0 to 5.

A trained encoder is a better start. `minilm` has the shape of all-MiniLM-L6-v2 of the hub and a rate of fine-tuning:

    tformer train --config=configs/sentences.py:minilm --config.data.path=DIR --workdir=runs/tuned \
        --config.train.init_from=DIRECTORY_OF_THE_HUB
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Evaluate, Model, Optimizer, Train, recipe


def get_config(arguments: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder',
            emb_dim=192,
            mlp_dim=768,
            num_heads=4,
            num_encoder_layers=4,
            max_len=128,
            activation='gelu',
            scan_layers=False,
        ),
        data=Data(length=128, overlong='truncate'),
        optimizer=Optimizer(learning_rate=5e-4, schedule='linear', weight_decay=0.01),
        train=Train(
            objective='contrastive',
            num_epochs=2,
            batch_size=128,
            eval_every=500,
            best_metric='valid/mean_reciprocal_rank',
        ),
        evaluate=Evaluate(samples=0),
    )
    return recipe(
        base,
        arguments,
        simcse={'train.objective': 'simcse', 'train.best_metric': 'valid/loss'},
        scored={
            'train.objective': 'cosine_similarity',
            'train.best_metric': 'valid/spearman',
            'data.label_range': (0.0, 5.0),
        },
        minilm={
            'model.emb_dim': 384,
            'model.mlp_dim': 1536,
            'model.num_heads': 12,
            'model.num_encoder_layers': 6,
            'model.max_len': 512,
            'model.embedding_scale': None,
            'model.embedding_norm': True,
            'model.num_token_types': 2,
            'model.position': 'learned',
            'model.norm_placement': 'post',
            'model.norm_epsilon': 1e-12,
            'model.attention_bias': ('query', 'key', 'value', 'out'),
            'optimizer.learning_rate': 2e-5,
        },
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'model.num_heads': 4,
            'model.num_encoder_layers': 2,
            'data.tokenizer_vocab_size': 400,
            'data.length': 64,
            'data.num_buckets': 2,
            'train.num_epochs': None,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
