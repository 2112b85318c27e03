"""`Discovery`: the addresses of a list of targets, while they change.

host:port                       one address
dns:///name:port                every address that the name resolves to
file:///path                    every address in the file
k8s:///namespace/service:port   the pods of a Service of Kubernetes
register:///?label=value        workers that announced themselves with these labels
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from baton.common.errors import ConfigurationError
from rpc.discovery.announced import AnnouncedTarget
from rpc.discovery.dns import DnsTarget
from rpc.discovery.files import FileTarget
from rpc.discovery.hosts import HostTarget
from rpc.discovery.kubernetes import KubernetesTarget
from rpc.discovery.look_ups import LookUps
from rpc.discovery.source import LookedUpSource, Scope, Source, Target

__all__ = ["TARGET_FORMS", "Discovery", "parse_target"]

_LOGGER = logging.getLogger("baton.discovery")
_KINDS: Mapping[str, Callable[[str], Target]] = {
    "dns": DnsTarget.parse,
    "file": FileTarget.parse,
    "k8s": KubernetesTarget.parse,
    "register": AnnouncedTarget.parse,
}
TARGET_FORMS = (
    "host:port, dns:///name:port, file:///path, k8s:///namespace/service:port or "
    "register:///?label=value"
)


def parse_target(text: str) -> Target:
    """Parses one of the forms of the module's docstring.

    Raises:
        ConfigurationError: it is none of them; names the target.
    """
    scheme, separator, rest = text.partition(":///")
    parse = _KINDS.get(scheme) if separator else HostTarget.parse
    try:
        if parse is None:
            raise ConfigurationError(f"{scheme!r} is no kind of target")
        return parse(rest if separator else text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"target {text!r} must be {TARGET_FORMS}: {error.message}"
        ) from None


class Discovery:
    """The addresses of a list of targets. Its source of each target keeps the last addresses that
    it knew while it cannot find out new ones.

    Args:
        targets: the values of a flag.
        interval_s: seconds between two look-ups of names and files.
        scope: where the list stands.

    Raises:
        ConfigurationError: a target is malformed, or does not work here.
    """

    def __init__(
        self, targets: Sequence[str], interval_s: float = 5.0, scope: Scope | None = None
    ) -> None:
        scope = scope or Scope()
        self._sources = tuple(parse_target(text).open(scope) for text in targets)
        self._interval_s = interval_s
        looked_up = [source for source in self._sources if isinstance(source, LookedUpSource)]
        self._has_look_ups = bool(looked_up)
        self._look_ups = LookUps(looked_up)
        self._listeners: list[Callable[[], None]] = []

    @property
    def addresses(self) -> frozenset[str]:
        """All addresses that are known now, as `host:port`."""
        return frozenset().union(*(source.addresses for source in self._sources))

    def name_of(self, address: str) -> str | None:
        """The DNS name that the certificate of an address has; None for that of the address."""
        names = (source.name_of(address) for source in self._sources)
        return next(filter(None, names), None)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Has a listener called whenever addresses may have changed."""
        self._listeners.append(listener)

    async def look_up(self) -> None:
        """Looks up all names and files once, within a time limit."""
        await self._look_ups.run_once()
        self._notify()

    async def run(self) -> None:
        """Keeps the addresses current until cancelled. An unexpected failure is logged, and what
        failed begins again.
        """
        followers = [self._follow(source) for source in self._sources]
        await asyncio.gather(self._look_up_at_intervals(), *followers)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    async def _look_up_at_intervals(self) -> None:
        while self._has_look_ups:
            try:
                await self.look_up()
            except Exception:
                _LOGGER.exception("unexpected failure of discovery")
            await asyncio.sleep(self._interval_s)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                await source.follow(self._notify)
            except Exception:
                _LOGGER.exception("unexpected failure of discovery")
                await asyncio.sleep(self._interval_s)
            else:
                return
