"""Compiles train steps of one layer below a large vocabulary, whose logits are computed in chunks and at once, and of
an encoder and a decoder that share it; prints a line of JSON for each.

python tests/helpers/ahead_vocabulary.py h100:8
"""

import json
import sys

import ahead
from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import override
from tformer.distributed import devices

VOCABULARY, WIDTH = 128_256, 512


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    sizes = {'vocab_size': VOCABULARY, 'emb_dim': WIDTH, 'num_decoder_layers': 1, 'max_len': 8192}
    fields = {f'model.{name}': size for name, size in sizes.items()}
    fields |= {'model.tied_embeddings': None, 'data.length': 8192, 'train.batch_size': 8}
    config = override(ahead.case('fsdp', 'decoder'), fields)
    shared = {
        'model.family': 'encoder_decoder', 'model.num_encoder_layers': 1, 'model.tied_embeddings': 'all',
        'model.encoder_vocab_size': VOCABULARY, 'data.encoder_length': 8192, 'train.objective': 'seq2seq',
    }  # fmt: skip
    for given in ({}, {'train.loss_chunk': None}, shared):
        given = override(config, given)
        print(json.dumps(dry_run_report.figures(dry_run.compile_program('train step', given, target))))


if __name__ == '__main__':
    main(sys.argv[1])
