"""Ranks that register their parts of the pool."""

from multiprocessing import Pipe

import pytest

from engine.runtime.ranks import transfers
from kernels.ranks import RanksLostError
from kvstore.connector import SavedSlices


def test_a_rank_reports_what_it_saves() -> None:
    own, theirs = Pipe()
    theirs.send(SavedSlices(b"params", (1, 3)))
    assert transfers._receive_slices(own) == SavedSlices(b"params", (1, 3))


def test_a_rank_that_ends_while_it_registers_is_lost() -> None:
    own, theirs = Pipe()
    theirs.close()
    with pytest.raises(RanksLostError, match="has ended"):
        transfers._receive_slices(own)


def test_a_rank_that_does_not_register_in_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_REGISTRATION_S", 0.01)
    own, theirs = Pipe()
    with theirs, pytest.raises(RanksLostError, match="in time"):
        transfers._receive_slices(own)
