"""`faulty+URL`: a connector with injected faults, for tests and game days.

    faulty+redis://host:6379?faults=corrupt:0.1,delay:0.2&fault_seed=7&fault_delay_s=0.5

`FaultyFactory` takes the fault options out of the URL, opens the connector that the rest names,
and puts a `FaultyBackend` between its mover and its backend. The connector's name stays the same,
so tiers with and without faults work together.

Each fault strikes each block, or call, with a probability of its own:

    fault      when blocks are put                     when they are fetched
    corrupt    some bytes are changed                  some bytes are changed
    truncate   a shorter object is stored              the status is WRONG_SIZE or the end is blank
    drop       the object is not stored                the status is MISSING
    delay      the call takes up to `delay_s` longer   the same, and in `num_held`
    duplicate  the object is put twice                 an object fetched before comes in its place
    reorder    it changes places with the one before   the same
    fail_load                                          the status is MISSING, or the call fails

With `drop`, `num_held` also counts blocks that the backend does not hold. Draws depend on the
seed, on the key and on how often the key was drawn for. So threads do not change the outcome.
"""

import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from typing_extensions import override

from baton.common.errors import ConfigurationError
from kvstore.codec import HEADER_BYTES
from kvstore.connector import Connector, ConnectorCapabilities, ConnectorFactory
from kvstore.jobs import LoadJob, SaveJob
from kvstore.mover.backend import Backend
from kvstore.store import GetStatus, KvObject, StoreUnavailableError
from kvstore.url import FAULTY_PREFIX, scheme_of

__all__ = [
    "FAULTS",
    "FaultPlan",
    "Faultable",
    "FaultyBackend",
    "FaultyFactory",
    "take_fault_options",
]

FAULTS = ("corrupt", "truncate", "drop", "delay", "duplicate", "reorder", "fail_load")

_OPTIONS = ("faults", "fault_seed", "fault_delay_s")
_DEFAULT_DELAY_S = 0.1
_MAX_DELAY_S = 60.0
_MAX_COUNTED_DRAWS = 1 << 16


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults to inject.

    Attributes:
        probabilities: from 0 to 1, by fault; faults that are not named do not strike.
        seed: for all draws.
        delay_s: longest delay of a call, in seconds.
    """

    probabilities: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    delay_s: float = 0.0


class FaultyBackend(Backend):
    """Puts faults into what passes between a mover and its backend.

    Args:
        backend: the connector's.
        plan: the faults.
    """

    def __init__(self, backend: Backend, plan: FaultPlan) -> None:
        self._backend = backend
        self._dice = _Dice(plan)
        self._delay_s = plan.delay_s
        self._stale: bytes | None = None  # the object that was fetched last

    @override
    def num_held(self, keys: Sequence[bytes]) -> int:
        self._delay("ask", keys)
        num_held = self._backend.num_held(keys)
        while num_held < len(keys) and self._dice.draw("drop", "ask", keys[num_held]):
            num_held += 1
        return num_held

    @override
    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        """Puts copies where a fault changes bytes: the slots may lie in a pool."""
        self._delay("put", keys)
        kept: list[tuple[bytes, KvObject]] = []
        for key, slot in zip(keys, slots, strict=True):
            if not self._dice.draw("drop", "put", key):
                kept.append((key, self._altered(key, slot)))
                self._swap_last(kept)
                if self._dice.draw("duplicate", "put", key):
                    kept.append(kept[-1])
        if kept:
            put_keys, values = zip(*kept, strict=True)
            self._backend.put(job, put_keys, values)

    @override
    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[KvObject]
    ) -> list[GetStatus]:
        self._delay("fetch", keys)
        drawn = {key: self._dice.draw("fail_load", "fetch", key) for key in keys}
        failing = {key: dice for key, dice in drawn.items() if dice}
        if any(dice.random() < 1 / 2 for dice in failing.values()):
            raise StoreUnavailableError("injected fault: fail_load")
        statuses = list(self._backend.fetch(job, keys, slots))
        for index, (key, status) in enumerate(zip(keys, statuses, strict=False)):
            if key in failing or self._dice.draw("drop", "fetch", key):
                statuses[index] = GetStatus.MISSING
            elif status is GetStatus.HIT:
                statuses[index] = self._spoil(key, slots, index)
        return statuses

    @override
    def discard(self, key: bytes) -> None:
        self._backend.discard(key)

    # Faults of puts.

    def _altered(self, key: bytes, slot: KvObject) -> KvObject:
        """Returns the slot, or a copy with faults."""
        corrupt = self._dice.draw("corrupt", "put", key)
        truncate = self._dice.draw("truncate", "put", key)
        if not corrupt and not truncate:
            return slot
        copy = bytearray(slot.to_bytes())
        if corrupt:
            _flip(copy, corrupt)
        if truncate:
            del copy[truncate.randrange(len(copy)) :]
        return KvObject.split(memoryview(copy), HEADER_BYTES)

    def _swap_last(self, kept: list[tuple[bytes, KvObject]]) -> None:
        """If "reorder" strikes, swaps the last two objects, but not their keys."""
        if len(kept) > 1 and self._dice.draw("reorder", "put", kept[-1][0]):
            (key, slot), (last_key, last_slot) = kept[-2:]
            kept[-2:] = [(key, last_slot), (last_key, slot)]

    # Faults of fetches.

    def _spoil(self, key: bytes, slots: Sequence[KvObject], index: int) -> GetStatus:
        """Puts faults into a filled slot; returns its status."""
        slot = slots[index]
        self._replace_by_stale(key, slot)
        if index and self._dice.draw("reorder", "fetch", key):
            before = slots[index - 1].to_bytes()
            slots[index - 1].fill(slot.to_bytes())
            slot.fill(before)
        corrupt = self._dice.draw("corrupt", "fetch", key)
        truncate = self._dice.draw("truncate", "fetch", key)
        if not corrupt and not truncate:
            return GetStatus.HIT
        spoiled = bytearray(slot.to_bytes())
        if corrupt:
            _flip(spoiled, corrupt)
        if truncate:
            start = truncate.randrange(len(spoiled))
            spoiled[start:] = bytes(len(spoiled) - start)
        slot.fill(spoiled)
        return truncate.choice([GetStatus.HIT, GetStatus.WRONG_SIZE]) if truncate else GetStatus.HIT

    def _replace_by_stale(self, key: bytes, slot: KvObject) -> None:
        """If "duplicate" strikes, replaces the object by the one that was fetched before it."""
        if not self._dice.may_strike("duplicate"):
            return
        stale, self._stale = self._stale, slot.to_bytes()
        if stale and len(stale) == slot.nbytes and self._dice.draw("duplicate", "fetch", key):
            slot.fill(stale)

    def _delay(self, call: str, keys: Sequence[bytes]) -> None:
        """Delays the call once if "delay" strikes any of its blocks."""
        struck = [dice for key in keys if (dice := self._dice.draw("delay", call, key))]
        if struck:
            time.sleep(max(dice.random() for dice in struck) * self._delay_s)


class _Dice:
    """Draws whether faults strike. Threads do not change the draws of a key. Thread-safe."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._num_draws: OrderedDict[tuple[str, str, bytes], int] = OrderedDict()

    def may_strike(self, fault: str) -> bool:
        return self._plan.probabilities.get(fault, 0.0) > 0

    def draw(self, fault: str, call: str, key: bytes) -> random.Random | None:
        """Returns None unless the fault strikes; then, random numbers that say how."""
        if not self.may_strike(fault):
            return None
        count = self._count((fault, call, key))
        dice = random.Random(f"{self._plan.seed}/{fault}/{call}/{key.hex()}/{count}")
        return dice if dice.random() < self._plan.probabilities[fault] else None

    def _count(self, what: tuple[str, str, bytes]) -> int:
        """Counts a draw; returns how many there were before it."""
        with self._lock:
            count = self._num_draws.pop(what, 0)
            self._num_draws[what] = count + 1
            if len(self._num_draws) > _MAX_COUNTED_DRAWS:
                self._num_draws.popitem(last=False)
        return count


def _flip(value: bytearray, dice: random.Random) -> None:
    """Changes one to four random bytes."""
    for index in dice.sample(range(len(value)), min(len(value), dice.randint(1, 4))):
        value[index] ^= dice.randint(1, 255)


@runtime_checkable
class Faultable(Protocol):
    """A worker half whose blocks pass through a `Backend`."""

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Replaces the backend by `wrap(backend)`. Called before the first job."""


@dataclass(frozen=True, slots=True)
class FaultyFactory:
    """Opens a connector with faults.

    Attributes:
        inner: opens the connector itself.
    """

    inner: ConnectorFactory

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """The capabilities of the connector itself."""
        return self.inner.capabilities

    def open(self, url: str) -> Connector:
        """Opens the connector, and puts the faults of the URL's options into it.

        Raises:
            ConfigurationError: an option is wrong, or the connector is not `Faultable`.
        """
        plan, inner_url = take_fault_options(url)
        scheduler, worker = self.inner.open(inner_url)
        if not isinstance(worker, Faultable):
            worker.close()
            raise ConfigurationError(
                f"{FAULTY_PREFIX}{scheme_of(inner_url)}://: this connector takes no faults; "
                f"of multi://, write {FAULTY_PREFIX} before each member"
            )
        worker.wrap_backend(lambda backend: FaultyBackend(backend, plan))
        return scheduler, worker


def take_fault_options(url: str) -> tuple[FaultPlan, str]:
    """Returns the faults that a `faulty+` URL names, and the URL of the connector itself.

    Raises:
        ConfigurationError: a fault option is wrong; names it.
    """
    base, _, query = url[len(FAULTY_PREFIX) :].partition("?")
    pairs = [pair.partition("=")[::2] for pair in query.split("&") if pair]
    options = {name: value for name, value in pairs if name in _OPTIONS}
    rest = "&".join("=".join(pair) for pair in pairs if pair[0] not in _OPTIONS)
    plan = FaultPlan(
        _probabilities(options.get("faults", "")),
        seed=_seed(options),
        delay_s=_number(options, "fault_delay_s", _DEFAULT_DELAY_S, _MAX_DELAY_S),
    )
    return plan, f"{base}?{rest}" if rest else base


def _probabilities(text: str) -> Mapping[str, float]:
    """Parses `FAULT:PROBABILITY,...`."""
    chosen: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, _, probability = item.partition(":")
        if name not in FAULTS:
            raise ConfigurationError(f"faults: unknown {name!r}; known are {', '.join(FAULTS)}")
        chosen[name] = probability
    return {name: _number(chosen, name, 0.0, 1.0) for name in chosen}


def _seed(options: Mapping[str, str]) -> int:
    text = options.get("fault_seed", "0")
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"fault_seed is {text!r}; it must be a whole number") from None


def _number(options: Mapping[str, str], name: str, default: float, highest: float) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= highest:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number from 0 to {highest:g}")
    return value
