"""When a directory of runs has ended."""

import pathlib
import types

from tformer.lab.report import results


def test_a_sweep_has_ended_when_each_of_its_runs_has():
    def ended(*states: str) -> bool:
        runs = [types.SimpleNamespace(state=state) for state in states]
        return results.Results(pathlib.Path(), {'a': runs[:1], 'b': runs[1:]}, None).ended

    assert ended(results.DONE, results.FAILED, results.DONE)
    assert not ended(results.DONE, results.UNFINISHED, results.DONE)
    assert not ended(results.UNFINISHED, results.DONE)
