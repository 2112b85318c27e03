"""Forbids a process to read other processes' memory, as many containers do, or to see the machine's
network devices.

`python -m tests.support.confinement COMMAND...` runs a command that cannot see them, where the
kernel can forbid it.
"""

import ctypes
import os
import platform
import socket
import struct
import sys
from contextlib import suppress

__all__ = ["forbid_netlink", "forbid_process_vm_calls"]

# Numbers of process_vm_readv and process_vm_writev.
_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}
_SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
_FIRST_ARGUMENT_AT = 16  # in C's `struct seccomp_data`; its lower half
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


def forbid_process_vm_calls() -> None:
    """Makes the kernel refuse these calls of this process until it ends."""
    # A seccomp filter: compares the number of a system call and refuses the call.
    program = [(_LOAD_WORD, 0, 0, 0)]
    for number in _CALLS[platform.machine()]:
        program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL_WITH_EPERM)]
    _install([*program, (_RETURN, 0, 0, _ALLOW)])


def forbid_netlink() -> None:
    """Makes the kernel refuse netlink sockets to this process, and to those that it starts.

    Raises:
        OSError, KeyError, AttributeError: this system, or this kind of processor, has none.
    """
    _install(
        [
            (_LOAD_WORD, 0, 0, 0),
            (_JUMP_IF_EQUAL, 0, 3, _SOCKET_CALL[platform.machine()]),
            (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT),
            (_JUMP_IF_EQUAL, 0, 1, socket.AF_NETLINK),
            (_RETURN, 0, 0, _FAIL_WITH_EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )


def _install(program: list[tuple[int, int, int, int]]) -> None:
    """Installs a seccomp filter, instructions of C's `struct sock_filter`.

    Raises:
        OSError: the kernel has none.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = _Program(len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


class _Program(ctypes.Structure):
    """C's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


if __name__ == "__main__":
    with suppress(OSError, KeyError, AttributeError):
        forbid_netlink()
    os.execvp(sys.argv[1], sys.argv[1:])
