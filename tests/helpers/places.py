"""Where the repository's files are."""

import pathlib

TESTS = pathlib.Path(__file__).absolute().parents[1]
ROOT = TESTS.parent
LAUNCH = ROOT / 'launch'
HELPERS = TESTS / 'helpers'
