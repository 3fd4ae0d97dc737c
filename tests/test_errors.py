"""A mistake is one line that can be printed; what does not fit into the memory of the machine is one."""

import pytest

from tformer import errors


def test_what_needs_more_than_the_memory_of_the_machine_is_refused_with_both_sizes(monkeypatch) -> None:
    four_gib = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 2**20}
    monkeypatch.setattr(errors.os, 'sysconf', four_gib.__getitem__)
    errors.check_memory('the logits of a step', 4 * 2**30)
    with pytest.raises(errors.UserError) as error:
        errors.check_memory('the logits of a step', 5.5 * 2**30)
    assert str(error.value) == 'the logits of a step need 5.5 GiB of memory, and this machine has 4.0'


def test_the_line_of_a_mistake_can_be_printed_and_is_not_endless() -> None:
    assert str(errors.UserError('a\n  b \ud800')) == r'a b \ud800'
    line = str(errors.UserError('first ' + 'x' * 10**6 + ' last'))
    assert len(line) < 5000 and line.startswith('first x') and line.endswith('x last')
