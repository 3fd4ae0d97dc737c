"""One batch, number by number, and the processes that make batches."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from lives import HANG
from places import ROOT
from small_sweeps import wait_for
from tformer.config import Config, Data, Model, Train
from tformer.data.batches.pipeline import Batches
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import BOS, EOS, FIRST, PAD, Specials

A, B, C = (FIRST + ord(letter) for letter in 'abc')


def test_packed_texts_stand_side_by_side_and_padding_is_apart():
    """BOS a b -> a b EOS and BOS c -> c EOS in a row of seven places."""
    data = Data(tokenizer='byte', length=7, batching='pack')
    run = Config(data=data, train=Train(objective='causal_lm', batch_size=1, num_steps=1))
    records = [{'text': 'ab'}, {'text': 'c'}]
    batch = Batches(run, Tokenizers(None, Byte()), 'train', training=True, records=records).batch(0)
    wanted = {
        'inputs': [BOS, A, B, BOS, C, PAD, PAD],
        'targets': [A, B, EOS, C, EOS, PAD, PAD],
        'weights': [1, 1, 1, 1, 1, 0, 0],
        'positions': [0, 1, 2, 0, 1, -1, -1],
        'segment_ids': [1, 1, 1, 2, 2, 0, 0],
    }
    assert {name: row[0].tolist() for name, row in batch.items()} == wanted
    assert {name: row.dtype for name, row in batch.items()} == {
        **dict.fromkeys(wanted, np.int32),
        'weights': np.float32,
    }


def test_each_side_is_padded_by_its_own_tokenizer():
    data, source = Data(tokenizer='byte', length=5, batching='pad'), Byte()
    source.specials = Specials(pad=FIRST - 1)
    run = Config(Model(family='encoder_decoder'), data, train=Train(objective='seq2seq', batch_size=1, num_steps=1))
    records = [{'source': 'a', 'target': 'bc'}]
    batch = Batches(run, Tokenizers(source, Byte()), 'train', training=True, records=records).batch(0)
    assert batch['encoder_inputs'].tolist() == [[A, EOS, FIRST - 1, FIRST - 1, FIRST - 1]]
    assert (batch['inputs'].tolist(), batch['targets'].tolist()) == ([[BOS, B, C, PAD, PAD]], [[B, C, EOS, PAD, PAD]])


@pytest.mark.signals
def test_a_worker_ends_although_its_process_was_killed_before_it_watched_it(tmp_path):
    command = [sys.executable, ROOT / 'tests/helpers/orphans.py', tmp_path]
    path = os.pathsep.join(map(str, (ROOT, ROOT / 'tests/helpers', ROOT / 'tests/accelerator')))
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    parent = subprocess.Popen(command, env={**os.environ, 'PYTHONPATH': path}, text=True, **pipes)
    worker = pathlib.Path('/proc', parent.stdout.readline().strip())
    wait_for((tmp_path / 'begun').exists)
    parent.kill()
    parent.wait()
    (tmp_path / 'go').touch()
    wait_for(lambda: not worker.exists())  # else it would sleep twice as long as this waits
    with parent.stdout, parent.stderr:
        assert 'Traceback' not in parent.stderr.read()


@pytest.mark.proof
@pytest.mark.signals
def test_workers_go_on_after_a_signal_to_all_processes_and_none_is_missed_in_silence():
    path = os.pathsep.join(map(str, (ROOT, ROOT / 'tests/helpers')))
    ended = {
        which: subprocess.run(
            [sys.executable, ROOT / 'tests/helpers/worked_batches.py', which],
            env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True, timeout=HANG,
        )
        for which in ('all', 'one')
    }  # fmt: skip
    assert (ended['all'].returncode, ended['all'].stdout) == (0, '2 True\n'), ended['all'].stderr
    assert (ended['one'].returncode, ended['one'].stdout) == (1, '')
    assert 'tformer: a process of data.num_workers ended by SIGKILL, e.g. for want of memory' in ended['one'].stderr
