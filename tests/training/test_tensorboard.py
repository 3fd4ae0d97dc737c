"""Metrics as files: what TensorBoard reads is what was written, also after a resume."""

import importlib.util
import pathlib
import struct
from typing import Any

import pytest

from tformer.config import Config, Optimizer, Train
from tformer.training import writers

# Imported by the tests alone: tensorboardX imports torch where it finds it, which takes seconds.
if importlib.util.find_spec('tensorboardX') is None:
    pytest.skip('tensorboardX is not installed', allow_module_level=True)


def events(workdir: pathlib.Path) -> list[list[Any]]:
    """The events of each file, as TensorBoard orders them; a record: length, its checksum, event, its checksum."""
    from tensorboardX.proto import event_pb2

    found = []
    for file in sorted((workdir / 'tensorboard').iterdir()):
        data, at, read = file.read_bytes(), 0, []
        while at < len(data):
            (length,) = struct.unpack('<Q', data[at : at + 8])
            read.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
        assert at == len(data)
        found.append(read)
    return found


def values(read: list[Any]) -> list[tuple[int, str, float]]:
    found = [(event.step, value.tag, value.simple_value) for event in read for value in event.summary.value]
    return [each for each in found if not each[1].startswith('_hparams_/')]


def test_tensorboard_reads_each_number_under_its_name_and_step(tmp_path: pathlib.Path) -> None:
    writer = writers.MetricWriter(tmp_path, 0, 0, config=Config())
    writer.write(3, {'train/loss': 2.5, 'train/grad_norm': 0.125})
    writer.write(4, {'valid/loss': -1.75})
    writer.close()
    (read,) = events(tmp_path)
    assert values(read) == [(3, 'train/loss', 2.5), (3, 'train/grad_norm', 0.125), (4, 'valid/loss', -1.75)]
    assert read[0].file_version == 'brain.Event:2' and all(event.wall_time > 1.7e9 for event in read)


def test_a_resumed_run_begins_a_file_and_hides_what_came_after_its_checkpoint(tmp_path) -> None:
    for resumed, loss in ((0, 8.0), (4, 2.0)):
        writer = writers.MetricWriter(tmp_path, resumed, resumed, config=Config())
        for step in range(resumed + 1, 7):
            writer.write(step, {'train/loss': loss})
        writer.close()
    first, second = events(tmp_path)
    starts = [[event.step for event in read if event.HasField('session_log')] for read in (first, second)]
    assert starts == [[1], [5]]  # the step from which TensorBoard forgets what earlier files say
    assert values(first) == [(step, 'train/loss', 8.0) for step in range(1, 7)]
    assert values(second) == [(5, 'train/loss', 2.0), (6, 'train/loss', 2.0)]
    assert [(row['step'], row['train/loss']) for row in writers.read(tmp_path)] == [
        *((step, 8.0) for step in range(1, 5)),
        (5, 2.0),
        (6, 2.0),
    ]


def test_the_plugin_of_hyperparameters_finds_what_differs_from_the_defaults(tmp_path: pathlib.Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    config = Config(train=Train(seed=3, init_from='a/b'), optimizer=Optimizer(learning_rate=0.25, clip_norm=None))
    writer = writers.MetricWriter(tmp_path, 0, 0, config=config)
    writer.write(1, {'train/loss': 2.0})
    writer.close()
    (read,) = events(tmp_path)
    found = {value.tag: value.metadata.plugin_data for event in read for value in event.summary.value}
    tags = ['_hparams_/experiment', '_hparams_/session_start_info', 'train/loss', '_hparams_/session_end_info']
    assert [*found] == tags and {found[tag].plugin_name for tag in tags if tag[0] == '_'} == {'hparams'}
    parsed = [HParamsPluginData.FromString(found[tag].content) for tag in tags if tag[0] == '_']
    begun = dict(parsed[1].session_start_info.hparams.items())
    assert begun['optimizer.learning_rate'].number_value == 0.25 and begun['train.seed'].number_value == 3
    assert begun['train.init_from'].string_value == 'a/b' and begun['optimizer.clip_norm'].string_value == 'None'
    assert len(begun) == 4 and {info.name for info in parsed[0].experiment.hparam_infos} == {*begun}
    assert [info.name.tag for info in parsed[0].experiment.metric_infos] == ['train/loss', 'valid/loss']
    assert parsed[2].session_end_info.status == 1  # success
