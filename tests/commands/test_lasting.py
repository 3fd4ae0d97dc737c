"""What a training prints may find no reader any more: it goes on."""

import os
import subprocess
import sys

from lives import environment

PRINTS = """
import sys
from tformer.commands import lasting
lasting.begin()
for number in range(20_000):
    print('a line that somebody reads', number)
    print('and another', file=sys.stderr)
open(sys.argv[1], 'w').write('done')
"""


def test_what_is_printed_is_lost_once_nobody_reads_it_and_the_work_goes_on(tmp_path):
    reading, writing = os.pipe()
    command = [sys.executable, '-c', PRINTS, tmp_path / 'done']
    printing = subprocess.Popen(command, stdout=writing, stderr=writing, env=environment())
    os.close(writing)
    assert os.read(reading, 10) == b'a line tha'
    os.close(reading)
    assert printing.wait() == 0 and (tmp_path / 'done').read_text() == 'done'
