r"""Classes or numbers of your texts by a trained model: a workdir, an imported one, or a directory of the hub.

    tformer train --config=configs/finetune_classify.py --config.data.path=DIR --workdir=runs/tuned \
        --config.train.init_from=runs/bert
    tformer evaluate --workdir=runs/tuned --baseline

The model is that of train.init_from. DIR holds {train,valid,test}.tsv, label<TAB>text[<TAB>second text]. Arguments,
several with commas (`:regression,lora`):

    regression    labels are numbers
    small         20 epochs, for less than about 3,000 texts (Mosbach et al. 2021)
    lora          adapters of rank 8 alone, at their rate (Hu et al. 2022, table 9)
    frozen        the embeddings and the lowest 4 layers stay as they are (Lee et al. 2019)
    layer_decay   rates fall by 0.95 from layer to layer (Sun et al. 2019, section 5.3.4)
    smoke         a size that any machine trains, from scratch

Rates, epochs, batches and the warm-up over a tenth of the run are those of Devlin et al. 2019, A.3. A model of at most
512 wide, such as MiniLM, has four times the rate, and its table of tokens ten times that (train.init_narrow): words
that few texts have move too little otherwise. docs/results.md has figures.
"""

from ml_collections import ConfigDict

from tformer.config import Config, Data, Model, Optimizer, Train, recipe


def get_config(arguments: str = '') -> ConfigDict:
    base = Config(
        model=Model(head_dropout_rate=0.1),
        data=Data(length=128, overlong='truncate'),
        optimizer=Optimizer(
            learning_rate=5e-5, schedule='linear', warmup_steps=0.1, beta2=0.999, epsilon=1e-8, weight_decay=0.01
        ),
        train=Train(
            objective='classification', init_model=True, num_epochs=4, batch_size=32, eval_every=0.25,
            best_metric='valid/accuracy',
            init_narrow=('optimizer.learning_rate=2e-4', 'optimizer.lr_multipliers=embed=10'),
        ),
    )  # fmt: skip
    return recipe(
        base,
        arguments,
        regression={'train.objective': 'regression', 'train.best_metric': 'valid/pearson'},
        small={'train.num_epochs': 20},
        lora={
            'model.lora_rank': 8,
            'model.lora_alpha': 8.0,
            'optimizer.learning_rate': 5e-4,
            'train.init_narrow': (),
        },
        frozen={'optimizer.frozen_layers': 4},
        layer_decay={'optimizer.layer_decay': 0.95},
        smoke={
            'model.emb_dim': 32,
            'model.mlp_dim': 64,
            'data.tokenizer_vocab_size': 400,
            'data.length': 32,
            'data.num_buckets': 2,
            'train.init_model': False,
            'train.init_narrow': (),
            'train.num_epochs': None,
            'train.num_steps': 2,
            'train.batch_size': 8,
            'train.eval_batches': 1,
            'evaluate.max_examples': 16,
        },
    )
