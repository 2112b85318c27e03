"""`EndpointPickerConfig`: the flags of a router that chooses servers for a proxy."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag

__all__ = ["DEFAULT_ENDPOINT_PORT", "EndpointPickerConfig"]

DEFAULT_ENDPOINT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPickerConfig:
    """The port at which a proxy asks for servers, and the port of these.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    endpoint_picker_port: int | None = flag(
        None,
        "port on which Envoy (ext_proc) asks for the server of each request: the endpoint picker "
        "of the Gateway API Inference Extension; see docs/kubernetes.md (default: no picker)",
        metavar="PORT",
    )
    endpoint_port: int = flag(
        DEFAULT_ENDPOINT_PORT,
        "port of the HTTP servers that the endpoint picker names, each a router beside its decode "
        "worker and at the same address",
        metavar="PORT",
    )

    def __post_init__(self) -> None:
        for name in ("endpoint_picker_port", "endpoint_port"):
            port = getattr(self, name)
            if port is not None and not 0 < port < 2**16:
                shown = f"--{name.replace('_', '-')} is {port}"
                raise ConfigurationError(f"{shown}; it must be in [1, 65536)")
