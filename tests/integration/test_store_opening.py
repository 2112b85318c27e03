"""Stores that cannot be opened now, or whose files are removed: they are down, and come back."""

from contextlib import ExitStack, closing

import pytest

from kvstore.conformance.engines import TinyEngine, random_prompt
from tests.support import mounted_stores

_FORMS = ("{}/a", "faulty+{}/b?faults=", "multi://grpc://,{}/c", "multi://{0}/d,{0}/e")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return mounted_stores.run_cases(tmp_path_factory.mktemp("mounts"))


@pytest.mark.parametrize("name", [case.__name__ for case in mounted_stores.CASES])
def test_a_store_on_a_mount_that_fails(outcomes, name):
    assert not outcomes[name], outcomes[name]


def test_connectors_start_without_their_store_and_use_it_when_it_is_there(tmp_path):
    """A link that leads nowhere stands for a mount that is absent, also for root."""
    (tmp_path / "mount").symlink_to(tmp_path / "disk")
    with ExitStack() as stack:
        url = f"file://{tmp_path}/mount"
        engines = [stack.enter_context(closing(TinyEngine(form.format(url)))) for form in _FORMS]
        keys = random_prompt(4)
        for engine in engines:
            assert engine.look_up(keys) == 0
            assert not engine.save(keys, range(4)).committed
        (tmp_path / "disk").mkdir()
        for engine in engines:
            engine.run_until(
                lambda engine=engine: (
                    engine.save(keys, range(4)).committed and engine.look_up(keys) == 4
                ),
                "the return of the store",
            )
