"""How a trial failed, by the log of its process."""

import pytest

from tformer.lab.sweep.jobs import Job
from tformer.lab.sweep.trial_process import Training

BEFORE = 'tformer: an error of a life before\n'


@pytest.mark.parametrize(
    ('log', 'told'),
    [
        ('step 1\ntformer: data.path: no file\nbye\n', 'tformer: data.path: no file'),
        ('ValueError: first\njaxlib.XlaRuntimeError: last\n  at line 3\n', 'jaxlib.XlaRuntimeError: last'),
        ('KeyboardInterrupt\n', 'KeyboardInterrupt'),
        ('no Error here\n  the last line \n\n', 'the last line'),
        ('', 'exit code 3'),
    ],
)
def test_the_last_line_that_looks_like_an_error_is_told_or_the_last_line(tmp_path, log, told):
    file = tmp_path / 'log.txt'
    file.write_text(BEFORE + log)
    assert Training(Job(()), None, 0.0, file, len(BEFORE), [])._last_error(3) == told
