"""Forbids a process to read other processes' memory, as many containers do."""

import ctypes
import platform
import struct

__all__ = ["forbid_process_vm_calls"]

# Numbers of process_vm_readv and process_vm_writev.
_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


def forbid_process_vm_calls() -> None:
    """Makes the kernel refuse these calls of this process until it ends."""
    # A seccomp filter: compares the number of a system call and refuses the call.
    program = [struct.pack("HBBI", _LOAD_WORD, 0, 0, 0)]
    for number in _CALLS[platform.machine()]:
        program.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, number))
        program.append(struct.pack("HBBI", _RETURN, 0, 0, _FAIL_WITH_EPERM))
    program.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = _Program(len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) == 0


class _Program(ctypes.Structure):
    """C's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))
