"""Stores that cannot be opened now, or whose files are removed: they are down, and come back."""

import pytest

from tests.support import mounted_stores


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return mounted_stores.run_cases(tmp_path_factory.mktemp("mounts"))


@pytest.mark.parametrize("name", [case.__name__ for case in mounted_stores.CASES])
def test_on_a_mount(outcomes, name):
    assert not outcomes[name], outcomes[name]
