"""How the workers of one machine share its cores."""

import pytest

from baton.up.threads import threads_per_worker


@pytest.mark.parametrize(
    ("cores", "num_workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (None, 1, 1)]
)
def test_each_has_its_share_and_at_least_one(monkeypatch, cores, num_workers, threads):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert threads_per_worker(num_workers) == threads
