"""`faulty+URL`: a connector whose transfers go wrong, for tests and game days.

    faulty+redis://host:6379?faults=corrupt:0.1,delay:0.2&fault_seed=7&fault_delay_s=0.5

The options are taken out of the URL; the rest opens the connector, whose
backend is then wrapped: see `kvstore.faulty_backend`. Tiers see no difference
between a connector and the same with faults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.errors import ConfigurationError
from kvstore.backend import Backend
from kvstore.connector_factory import Connector, ConnectorCapabilities, ConnectorFactory
from kvstore.connector_url import FAULTY_PREFIX, scheme_of
from kvstore.faulty_backend import FAULTS, FaultPlan, FaultyBackend

__all__ = ["Faultable", "FaultyFactory", "take_fault_options"]

_OPTIONS = ("faults", "fault_seed", "fault_delay_s")
_DEFAULT_DELAY_S = 0.1
_LONGEST_DELAY_S = 60.0


@runtime_checkable
class Faultable(Protocol):
    """A worker half whose blocks pass through a `kvstore.backend.Backend`."""

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Puts something between the worker and its backend. Before the first job."""


@dataclass(frozen=True, slots=True)
class FaultyFactory:
    """See `ConnectorFactory`.

    Attributes:
        inner: opens the connector that shall go wrong.
    """

    inner: ConnectorFactory

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """The connector's own."""
        return self.inner.capabilities

    def open(self, url: str) -> Connector:
        """See `ConnectorFactory`."""
        plan, inner_url = take_fault_options(url)
        scheduler, worker = self.inner.open(inner_url)
        if not isinstance(worker, Faultable):
            worker.close()
            raise ConfigurationError(
                f"{FAULTY_PREFIX}{scheme_of(inner_url)}://: no faults can be put into this "
                "connector; into members of multi:// they can, one by one"
            )
        worker.wrap_backend(lambda backend: FaultyBackend(backend, plan))
        return scheduler, worker


def take_fault_options(url: str) -> tuple[FaultPlan, str]:
    """What a `faulty+` URL asks for, and the URL of the connector itself.

    Raises:
        ConfigurationError: an option is wrong; names it.
    """
    base, _, query = url[len(FAULTY_PREFIX) :].partition("?")
    pairs = [pair.partition("=")[::2] for pair in query.split("&") if pair]
    options = {name: value for name, value in pairs if name in _OPTIONS}
    rest = "&".join("=".join(pair) for pair in pairs if pair[0] not in _OPTIONS)
    plan = FaultPlan(
        _probabilities(options.get("faults", "")),
        seed=_seed(options),
        delay_s=_number(options, "fault_delay_s", _DEFAULT_DELAY_S, _LONGEST_DELAY_S),
    )
    return plan, f"{base}?{rest}" if rest else base


def _probabilities(text: str) -> Mapping[str, float]:
    """Reads `FAULT:PROBABILITY,...`."""
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
