"""`other_protocol`: whether a port speaks TLS where plain Redis was tried, or the reverse.

A plain server waits for the end of a line in what a TLS client sends, and a TLS server closes a
connection that begins with a plain command. Neither says why.
"""

import socket
import ssl

__all__ = ["other_protocol"]


def other_protocol(address: str, port: int, *, is_tls: bool, seconds: float) -> str:
    """Returns advice for the URL; empty if the port does not speak the other protocol.

    Args:
        address: the server's.
        port: the server's.
        is_tls: whether TLS was tried.
        seconds: longest wait of each step.
    """
    try:
        with socket.create_connection((address, port), seconds) as connection:
            if is_tls and _answers_plain(connection):
                return "the port does not speak TLS: write redis in place of rediss"
            if not is_tls and _answers_tls(connection):
                return "the port speaks TLS: write rediss in place of redis"
    except OSError:
        return ""
    return ""


def _answers_plain(connection: socket.socket) -> bool:
    connection.sendall(b"PING\r\n")
    return connection.recv(1) in (b"+", b"-")


def _answers_tls(connection: socket.socket) -> bool:
    """Shakes hands without a look at the certificate: nothing is sent afterwards."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    return True
