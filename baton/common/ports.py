"""`keep_from_others`: a chosen port stays free until the server that wants it listens there."""

import socket

__all__ = ["keep_from_others"]

_CONNECT_TIMEOUT_S = 1.0


def keep_from_others(listener: socket.socket) -> None:
    """Leaves a port in TIME_WAIT, in which Linux neither gives it to a connection nor to a server
    that asks for any port. A server that asks for this port gets it, as it sets SO_REUSEADDR.
    """
    with socket.socket(listener.family, listener.type) as client:
        client.settimeout(_CONNECT_TIMEOUT_S)
        try:
            client.connect(listener.getsockname())
        except OSError:
            return  # the port is only more likely to be taken
        listener.accept()[0].close()  # TIME_WAIT is on the side that closes first
