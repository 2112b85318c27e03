"""`OpenedOnDemand`: no thread waits for longer than it may, and nothing stays open."""

import threading

import pytest

from kvstore.store import StoreUnavailableError
from kvstore.stores.opening import OpenedOnDemand
from tests.support.redis_server import await_true


class Opened:
    """Something that is opened, and knows whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Opener:
    """Opens things; from the second one on, only when it may."""

    def __init__(self) -> None:
        self.made: list[Opened] = []
        self.may_open, self.is_opening = threading.Event(), threading.Event()

    def __call__(self) -> Opened:
        if self.made:
            self.is_opening.set()
            self.may_open.wait(30)
        self.made.append(Opened())
        return self.made[-1]


def test_a_second_thread_drops_what_is_lost_without_a_wait_for_the_first() -> None:
    opener = Opener()
    on_demand = OpenedOnDemand(opener, timeout_s=30)
    lost = on_demand.get()
    on_demand.drop(lost)
    assert lost.is_closed
    first = threading.Thread(target=on_demand.get)
    second = threading.Thread(target=on_demand.drop, args=(lost,))
    first.start()
    assert opener.is_opening.wait(30)
    second.start()
    try:
        await_true(lambda: not second.is_alive(), "nothing is left to drop")
    finally:
        opener.may_open.set()
        first.join()
        second.join()
    assert on_demand.current is opener.made[1]


def test_what_is_opened_while_the_store_closes_is_closed_and_not_used() -> None:
    opener = Opener()
    on_demand = OpenedOnDemand(opener, timeout_s=0.01)
    on_demand.drop(on_demand.get())
    errors: list[StoreUnavailableError] = []

    def get() -> None:
        with pytest.raises(StoreUnavailableError, match="the store is closed") as raised:
            on_demand.get()
        errors.append(raised.value)

    opening = threading.Thread(target=get)
    opening.start()
    assert opener.is_opening.wait(30)
    on_demand.close()
    opener.may_open.set()
    opening.join()
    assert errors
    assert opener.made[1].is_closed
