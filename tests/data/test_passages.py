"""Long texts in passages: nothing is lost, and no line, word or character is cut where that can be."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.data.sources import passages, text_reader

LINES = st.text('ab \u00e9\u20ac\U0001f600\n', min_size=20, max_size=80)


@given(LINES, st.integers(0, 80), st.integers(4, 20))
@settings(deadline=None)
def test_a_beginning_is_that_of_a_line_a_word_or_a_character(tmp_path_factory, text: str, place: int, reach: int):
    file = tmp_path_factory.getbasetemp() / 'beginning.txt'
    file.write_text(content := text, newline='')
    stored = content.encode()
    place = min(place, len(stored))
    with file.open('rb') as opened:
        found = passages.beginning(opened, place, reach)
    assert max(place - reach, 0) <= found <= place
    stored[:found].decode(), stored[found:].decode()  # no character is cut
    near = stored[max(place - reach, 0) : place]
    mark = b'\n' if b'\n' in near else b' '
    if mark in near:
        assert stored[found - 1 : found] == mark and mark not in stored[found:place]


@given(LINES, st.integers(12, 30), st.integers(4, 12), st.sampled_from([(), ('valid',), ('valid', 'test')]))
@settings(deadline=None)
def test_the_parts_of_a_text_are_the_text(tmp_path_factory, text: str, size: int, length: int, held_out) -> None:
    place = tmp_path_factory.getbasetemp() / 'parts.txt'
    place.write_text(text, newline='')
    stored = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, 'LENGTH', length)
        parts = list(passages.edges(place, held_out, 0.2, size))
        file, before = text_reader.find(place), text_reader.state(place)
        found = [
            (split, own)
            for split, start, stop in parts
            for own in passages.Passages(file, 'stop', start, stop, before).texts()
        ]
    order = ('train', 'valid', 'test')
    assert ''.join(own for split in order for name, own in found if name == split) == text
    assert all(edge <= len(stored) for _, *edges in parts for edge in edges)
    assert max(len(own) for _, own in found) < 2 * length


def test_the_held_out_end_is_that_of_a_file_that_is_read_whole(tmp_path: Path) -> None:
    """What training alone would hold out, where no line is longer than that."""
    from tformer.data.sources import files

    text = ''.join(f'line {i} of a long text\n' for i in range(5000))
    file = tmp_path / 'a.txt'
    file.write_text(text)
    parts = list(passages.edges(file, ('valid', 'test'), files.HELD_OUT, 1 << 14))
    for split in ('train', 'valid', 'test'):
        own = [text[start:stop] for name, start, stop in parts if name == split]
        assert ''.join(own) == files._cut(text, ('valid', 'test'), split)
    assert all(text[start - 1] == '\n' for _, start, _ in parts if start) and len(parts) > 5
    assert all(stop - start < 2 << 14 for _, start, stop in parts)
