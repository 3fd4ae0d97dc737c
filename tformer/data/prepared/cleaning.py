"""What is done to a text before it is tokenised: one row of `CLEANING` for each value of data.cleaning."""

import re
from collections.abc import Callable, Sequence

from tformer.errors import choose

_CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]')
_BULLETS, _ELLIPSES = ('•', '-', '*'), ('...', '…')
_STOP_WORDS = frozenset(('the', 'be', 'to', 'of', 'and', 'that', 'have', 'with'))


def clean(text: str, names: Sequence[str]) -> str:
    """Returns a text after what `names` do to it, in order; '' if it is left out."""
    for name in names:
        text = choose(CLEANING, name, 'data.cleaning')(text)
    return text if text.strip() else ''


def controls(text: str) -> str:
    """Line ends become line feeds, and other control characters but tabs are taken out."""
    return _CONTROLS.sub('', text.replace('\r\n', '\n').replace('\r', '\n'))


def spaces(text: str) -> str:
    """No spaces stand before the end of a line, several blank lines become one, and none is at the ends."""
    return re.sub(r'\n{3,}', '\n\n', re.sub(r'[ \t]+(?=\n|$)', '', text)).strip('\n')


def gopher(text: str) -> str:
    """Leaves out a text that the rules for English of Rae et al. (2021, appendix A.1.1) do, but for repetitions."""
    words, lines = text.split(), text.splitlines()
    if not 50 <= len(words) <= 100_000 or not 3 <= sum(map(len, words)) / len(words) <= 10:
        return ''
    symbols = max(text.count('#'), text.count('...') + text.count('…'))
    bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines)
    ellipses = sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
    letters = sum(any(map(str.isalpha, word)) for word in words)
    whole = (
        symbols <= 0.1 * len(words)
        and bullets <= 0.9 * len(lines)
        and ellipses <= 0.3 * len(lines)
        and letters >= 0.8 * len(words)
    )
    return text if whole and len(_STOP_WORDS & set(words)) >= 2 else ''


CLEANING: dict[str, Callable[[str], str]] = {'controls': controls, 'spaces': spaces, 'gopher': gopher}
