"""Regular expressions as automata, against Python's own."""

import itertools
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tformer.decode import regular
from tformer.errors import UserError


def accepts(automaton: regular.OfBytes, text: bytes) -> bool:
    state = 0
    for byte in text:
        state = automaton.next_QB[state, byte]
        if state < 0:
            return False
    return bool(automaton.accepting_Q[state])


PATTERNS = [
    *(
        '',
        'a',
        'ab|ba|a',
        '(ab)*',
        '(a|b)*abb',
        'a{2}',
        'a{2,}',
        'a{,2}b',
        'a{1,3}?b*?',
        '(a?){3}',
        '(a*)*b',
        '(?:ab|)+',
    ),
    *('^a$', '[^ab]', '[a-c]b', '.', '.*b.*', '(?P<name>a)b', r'\.', '[]a]', '[a-]+', 'a|', '(|a)(|b)'),
]


@pytest.mark.parametrize('pattern', PATTERNS)
def test_short_texts_match_as_in_python(pattern):
    made = regular.automaton(pattern)
    for length in range(6):
        for letters in itertools.product('abc.' if length < 4 else 'ab', repeat=length):
            text = ''.join(letters)
            assert accepts(made, text.encode()) == (re.fullmatch(pattern, text) is not None), text


CLASSES = [r'\d', r'\W', r'\s', '[^\\w\u4e2d]', '.', '[\\x00-\u07ff]', '[\u0800-\uffff]', '[\U00010000-\U0010ffff]']
CLASSES += ['[a-\u00e9]', '[\u0101-\U00012345]', '[^a]']


@pytest.mark.parametrize('pattern', CLASSES)
def test_every_character_is_in_a_class_as_in_python(pattern):
    made, matches = regular.automaton(pattern), re.compile(pattern)
    rng = np.random.default_rng(0)
    edges = [0, 10, 0x7F, 0x7FF, 0xFFFF, 0x10FFFF, 0xD7FF, 0xE000, 0xE9, 0x101, 0x12345, 0x4E2D, ord('a')]
    points = {max(0, min(edge + step, 0x10FFFF)) for edge in edges for step in (-1, 0, 1)}
    points |= {*rng.integers(0, 0x3000, 2000).tolist(), *rng.integers(0, 0x110000, 2000).tolist()}
    for point in points - {*range(0xD800, 0xE000)}:
        character = chr(point)
        assert accepts(made, character.encode()) == (matches.fullmatch(character) is not None), hex(point)
    for wrong in (b'\x80', b'\xc3', b'\xc0\x80', b'\xed\xa0\x80', b'\xf4\x90\x80\x80', b'\xff'):  # not UTF-8
        assert not accepts(made, wrong)


ATOMS = st.sampled_from(['a', 'b', '\u00e9', '.', '[ab]', '[^a]', r'\w', ''])
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(''.join),
        st.tuples(inner, inner).map(lambda two: f'(?:{two[0]}|{two[1]})'),
        st.tuples(inner, st.sampled_from(['*', '+', '?', '{2}', '{1,2}', '{,3}'])).map(lambda x: f'(?:{x[0]}){x[1]}'),
    ),
    max_leaves=6,
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(pattern=TREES, texts=st.lists(st.text('ab\u00e9 ', max_size=5), max_size=20))
def test_any_expression_matches_as_in_python(pattern, texts):
    made = regular.automaton(pattern)
    for text in texts:
        assert accepts(made, text.encode()) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ('pattern', 'message'),
    [
        ('a(', 'it is not a regular expression: missing '),
        ('(' * 5000, 'it is not a regular expression: '),
        (r'(a)\1', 'an automaton cannot tell what a group matched'),
        ('a(?=b)', 'an automaton cannot tell what stands before or behind'),
        ('(?<!a)b', 'an automaton cannot tell what stands'),
        (r'a\b', 'an automaton cannot tell the ends of words, nor ^ and $ inside'),
        (r'\Aa|b\Z', 'an automaton cannot tell the ends of words, nor ^ and $ inside'),  # of a branch
        ('a$b', 'an automaton cannot tell the ends of words, nor ^ and $ inside'),
        (r'(a)?(?(1)b|c)', 'an automaton cannot tell whether a group matched'),
        ('a*+b', 'an automaton cannot tell which way was taken'),
        ('(?>a)b', 'an automaton cannot tell which way was taken'),
        ('(?i)a', 'flags are not supported'),
        ('(?i:a)', 'flags are not supported'),
        ('((((a{100}){100}){100}){100})', 'it has more than '),
        ('(a|b)*a(a|b){20}', 'it has more than 50,000 states'),
    ],
)
def test_what_an_automaton_cannot_tell_is_refused(pattern, message):
    with pytest.raises(UserError) as error:
        regular.automaton(pattern)
    assert str(error.value).startswith(message) and '\n' not in str(error.value)
