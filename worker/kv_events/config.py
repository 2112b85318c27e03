"""`KvEventsConfig`: the flags of the KV events that a worker publishes. Imports no ZMQ."""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from baton.common.addresses import split_host_port
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from engine.config import EngineConfig

__all__ = ["KvEventsConfig", "listens_at"]

_TCP, _IPC = "tcp://", "ipc://"
_MAX_TOPIC_BYTES = 1024
_MAX_RANK = 65535
_PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The flags of KV events in vLLM's form.

    Raises:
        ConfigurationError: an address is bad, or a package is missing; names the flag.
    """

    kv_events_zmq: str | None = flag(
        None,
        "publish what enters and leaves the prefix cache in vLLM's form, as ZMQ messages: "
        "tcp://*:5557 and ipc:///path listen, tcp://host:5557 connects to a subscriber that "
        "listens. Whoever reads them knows all prompts. Needs the extra zmq (default: none)",
        metavar="ADDRESS",
    )
    kv_events_replay: str | None = flag(
        None,
        "answer subscribers that missed messages of --kv-events-zmq at this address, such as "
        "tcp://*:5558",
        metavar="ADDRESS",
    )
    kv_events_topic: str | None = flag(
        None,
        "topic of the messages of --kv-events-zmq (default: kv@HOSTNAME@MODEL)",
        metavar="TOPIC",
    )
    kv_events_rank: int = flag(
        0,
        "number in the messages of --kv-events-zmq that tells workers of one topic apart, vLLM's "
        "data_parallel_rank; the workers of --data-parallel-size count from it on",
    )

    def __post_init__(self) -> None:
        if self.kv_events_zmq is None:
            for name, value in self._others():
                if value:
                    raise ConfigurationError(f"{name} is set, and --kv-events-zmq is not")
            return
        _check_address("--kv-events-zmq", self.kv_events_zmq)
        if self.kv_events_replay is not None:
            _check_address("--kv-events-replay", self.kv_events_replay)
        topic = (self.kv_events_topic or "").encode(errors="surrogateescape")
        if len(topic) > _MAX_TOPIC_BYTES:
            raise ConfigurationError(
                f"--kv-events-topic has {len(topic)} bytes; at most {_MAX_TOPIC_BYTES} will do"
            )
        if not 0 <= self.kv_events_rank <= _MAX_RANK:
            raise ConfigurationError(
                f"--kv-events-rank is {self.kv_events_rank}; it must be from 0 to {_MAX_RANK}"
            )
        _check_packages()

    def check_engine(self, config: EngineConfig) -> None:
        """Refuses an engine that has nothing to publish.

        Raises:
            ConfigurationError: it does not cache prefixes; names both flags.
        """
        if self.kv_events_zmq is not None and not config.enable_prefix_caching:
            raise ConfigurationError(
                "--kv-events-zmq publishes what is in the prefix cache, which "
                "--no-enable-prefix-caching turns off; leave one of them out"
            )

    def topic(self, model: str) -> str:
        """Returns the topic of the messages.

        Args:
            model: the served model's name.
        """
        if self.kv_events_topic is not None:
            return self.kv_events_topic
        return f"kv@{socket.gethostname()}@{model}"

    def of_replica(self, number: int) -> "KvEventsConfig":
        """Returns the flags of one of several workers: their ports and their rank are those of the
        flags plus the worker's number, as in vLLM, and paths have it at their end.

        Raises:
            ConfigurationError: there is no such port, or another worker has it; names the flags.
        """
        if self.kv_events_zmq is None:
            return self
        replay = self.kv_events_replay
        if replay is not None and _num_apart(self.kv_events_zmq, replay) <= number:
            raise ConfigurationError(
                f"--kv-events-replay is {replay} and --kv-events-zmq {self.kv_events_zmq}; worker "
                f"{number} of --data-parallel-size would need a port of another one, so leave more "
                "ports between them"
            )
        return replace(
            self,
            kv_events_zmq=_numbered(self.kv_events_zmq, number),
            kv_events_replay=None if replay is None else _numbered(replay, number),
            kv_events_rank=self.kv_events_rank + number,
        )

    def _others(self) -> Sequence[tuple[str, str | int | None]]:
        return (
            ("--kv-events-replay", self.kv_events_replay),
            ("--kv-events-topic", self.kv_events_topic),
            ("--kv-events-rank", self.kv_events_rank),
        )


def listens_at(address: str) -> bool:
    """Whether the publisher listens at an address, as in vLLM, or connects to it."""
    if address.startswith(_IPC):
        return True
    host = address.removeprefix(_TCP).rpartition(":")[0]
    return host in ("*", "0.0.0.0", "[::]")


def _check_address(flag_name: str, address: str) -> None:
    is_path = address.startswith(_IPC) and len(address) > len(_IPC) and address.isprintable()
    is_host = address.startswith(_TCP) and split_host_port(address.removeprefix(_TCP)) is not None
    if not (is_path or is_host):
        raise ConfigurationError(
            f"{flag_name} is {address!r}; it must be tcp://HOST:PORT, such as tcp://*:5557, or "
            "ipc:///PATH"
        )


def _check_packages() -> None:
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise ConfigurationError(
                f"--kv-events-zmq needs {package}, which is not installed; run "
                "pip install 'baton-llm[zmq]'"
            )


def _num_apart(live: str, replay: str) -> float:
    """How far apart the ports are that a worker opens; endless if it opens one at most."""
    if live.startswith(_IPC) or replay.startswith(_IPC) or not listens_at(live):
        return math.inf
    return abs(_port(live) - _port(replay))


def _numbered(address: str, number: int) -> str:
    if number == 0:
        return address
    if address.startswith(_IPC):
        return f"{address}.{number}"
    return f"{address.rpartition(':')[0]}:{_port(address) + number}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
