"""The versions that a run states."""

import platform

import jax
import pytest

from tformer.training import versions


def test_a_package_that_is_not_installed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, 'PACKAGES', ('jax', 'tformer-that-is-a-source-tree'))
    found = {
        'python': platform.python_version(),
        'jax': jax.__version__,
        'tformer-that-is-a-source-tree': 'not installed',
    }
    assert versions.versions() == found
