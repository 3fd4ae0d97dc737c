"""Translation from parallel text: the original encoder-decoder, one shared vocabulary, beam search.

    tformer train --config=configs/translate.py --config.data.path=DIR --workdir=runs/mt

Machine and time: 6,000 steps in under an hour on two CPU cores beside other work. Result on Debian package
descriptions (English to German, 31,754 pairs): BLEU 25.1 with beam 4; copying the source gives 7.5.

DIR holds {train,valid,test}.tsv, source<TAB>target; several directories, separated by commas, train together.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Decode, Evaluate, Model, Optimizer, Train, recipe


def get_config(size: str = '') -> ConfigDict:
    base = Config(
        model=Model(
            family='encoder_decoder',
            emb_dim=192,
            mlp_dim=768,
            num_heads=4,
            num_encoder_layers=3,
            num_decoder_layers=3,
            max_len=128,
            tied_embeddings='all',
            dropout_rate=0.15,
            scan_layers=False,
        ),
        data=Data(tokenizer_vocab_size=4000, length=64, num_buckets=8, batch_tokens=2560),
        optimizer=Optimizer(learning_rate=2e-3, schedule='cosine', warmup_steps=400),
        train=Train(objective='seq2seq', num_steps=6000, batch_size=64, label_smoothing=0.1, eval_every=500),
        decode=Decode(strategy='beam', beam_size=4, length_penalty=0.6, max_len=96, batch_size=64),
        evaluate=Evaluate(metrics=('bleu', 'chrf')),
    )
    small = {'model.emb_dim': 128, 'model.mlp_dim': 512, 'model.num_encoder_layers': 2, 'model.num_decoder_layers': 2}
    return recipe(
        base,
        size,
        small={**small, 'train.num_steps': 2000},
        smoke={
            **small,
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'data.num_buckets': 2,
            'data.batch_tokens': None,
            'decode.max_len': 8,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
