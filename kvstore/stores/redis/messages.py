"""Texts about errors of redis: one line with the server's name and what to do.

A plain server waits for the end of a line in what a TLS client sends, and a TLS server closes a
connection that begins with a plain command. Neither says why.
"""

import re
import socket
import ssl

from redis import RedisError
from redis import TimeoutError as RedisTimeoutError

__all__ = ["CLOSED", "describe", "is_closed", "is_refusal", "is_timeout", "other_protocol"]

CLOSED = "the server closed the connection"
_MAX_CHARS = 300
_ACL = "docs/connectors.md lists the commands that the ACL of its user must allow"
_REPEATS_ADDRESS = re.compile(r"Error .*(connecting to|reading from|writing to|while writing)")
# What servers say, in part, and what to do.
_REMEDIES = {
    "NOAUTH": "the URL needs a password, or a password_file",
    "WRONGPASS": "the user or the password is wrong",
    "invalid username-password": "the user or the password is wrong",
    "NOPERM": _ACL,
    "no permissions": _ACL,
    "unknown command": "the server lacks the command or has renamed it",
    "invalid bulk length": "raise the server's proto-max-bulk-len to 4mb or more",
    "cluster support disabled": "the server is no part of a cluster: write redis://",
    "DENIED": "the server is in protected mode: give it a password or an address to bind to",
    "OOM": "the server is full and does not evict: see its maxmemory-policy",
    "not allowed when used memory": "the server is full and does not evict: see maxmemory-policy",
}
# Signs that a server takes no writes, or not this command, while it may still be read.
_REFUSALS = (
    "MISCONF", "NOREPLICAS", "READONLY", "NOPERM", "no permissions", "unknown command",
    "can't run this command",
)  # fmt: skip


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


def is_refusal(error: RedisError) -> bool:
    """Whether an error reply says that the server does not take the command, now or at all."""
    code = getattr(error, "status_code", None) or ""
    text = f"{code} {error}"
    return any(sign in text for sign in _REFUSALS)


def is_timeout(error: BaseException) -> bool:
    """Whether nothing came in time."""
    return isinstance(error, TimeoutError | RedisTimeoutError)


def is_closed(error: BaseException) -> bool:
    """Whether the server closed the connection."""
    is_reset = isinstance(error.__context__ or error, ConnectionResetError | BrokenPipeError)
    return is_reset or CLOSED in str(error)


def describe(error: BaseException) -> str:
    """Returns the text of an error in one line, without the command that caused it.

    The first note of an error, if it has one, is the name of the server that replied with it.
    """
    text = _reason(error)
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in text), "")
    server = next(iter(getattr(error, "__notes__", ())), "")
    return f"{server}{': ' if server else ''}{text}{f' ({remedy})' if remedy else ''}"


def _reason(error: BaseException) -> str:
    if is_timeout(error):
        return "not answered in time"
    cause = error.__context__
    if _REPEATS_ADDRESS.match(str(error)) and isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = getattr(error, "status_code", None)
    text = str(error).partition(", with args beginning with")[0]  # they may be a whole script
    if code:
        text = f"{code} {text}"
    return " ".join(text.split())[:_MAX_CHARS] or type(error).__name__
