"""Compiles train steps of one layer below a large vocabulary, whose logits are computed in chunks and at once, and of
an encoder and a decoder that share it; prints a line of JSON for each.

python tests/helpers/ahead_vocabulary.py h100:8
"""

import json
import sys

from tformer.commands import dry_run, dry_run_report
from tformer.config import Config, Data, Mesh, Model, Train, override
from tformer.distributed import devices

VOCABULARY, WIDTH = 128_256, 512


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    config = Config(
        model=Model(
            family='decoder', vocab_size=VOCABULARY, emb_dim=WIDTH, mlp_dim=WIDTH, num_heads=4, num_decoder_layers=1,
            max_len=8192, position='rope', dropout_rate=0.0, dtype='bfloat16', tied_embeddings=None,
        ),
        data=Data(length=8192),
        train=Train(objective='causal_lm', batch_size=8, num_steps=10),
        mesh=Mesh(data=1, fsdp=8),
    )  # fmt: skip
    shared = {
        'model.family': 'encoder_decoder', 'model.num_encoder_layers': 1, 'model.tied_embeddings': 'all',
        'model.encoder_vocab_size': VOCABULARY, 'data.encoder_length': 8192, 'train.objective': 'seq2seq',
    }  # fmt: skip
    for given in ({}, {'train.loss_chunk': None}, shared):
        given = override(config, given)
        print(json.dumps(dry_run_report.figures(dry_run.compile_program('train step', given, target))))


if __name__ == '__main__':
    main(sys.argv[1])
