"""Checks of GPUs: what their kernels are compiled with, and one launched kernel on each.

`python -m baton.doctor.gpus` is the self-test: it launches a small kernel on every GPU.
`check_kernels` runs it in a process of its own, because a kernel that fails breaks its process.
"""

import sys
from collections.abc import Iterator

from baton.common.errors import ConfigurationError
from baton.doctor import Finding, Level
from baton.doctor.native_kernels import find_self_test

__all__ = ["check_gpus", "check_launchers", "main"]

_GIB = 1 << 30


def check_gpus() -> Iterator[Finding]:
    """Reports each GPU's memory, and whether a kernel runs on all of them; nothing without GPUs."""
    import torch  # here, as the doctor runs without torch too

    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
        facts = {"name": properties.name, "memory": properties.total_memory}
        yield Finding(f"gpu {index}", Level.OK, text, facts)
    yield from check_launchers()
    yield from find_self_test("gpu kernels", "baton.doctor.gpus")


def check_launchers() -> Iterator[Finding]:
    """Reports the C compiler with which Triton makes kernels ready to be launched."""
    from kernels.first_launch import find_c_compiler, missing_for_launchers

    missing = missing_for_launchers()
    if missing is None:
        text = f"{find_c_compiler()} compiles the launchers of GPU kernels"
        yield Finding("gpu compiler", Level.OK, text)
    else:
        text = f"kernels of GPUs cannot be compiled: {missing}"
        yield Finding("gpu compiler", Level.PROBLEM, text)


def main() -> int:
    """Launches a kernel on every GPU.

    Returns:
        Exit status 0 after a line on stdout, or 1 after the reason on stderr.
    """
    import torch

    from engine.runtime.device import current
    from kernels.first_launch import check_launch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    try:
        for device in devices:
            with current(device):
                check_launch(device)
    except ConfigurationError as error:
        sys.stderr.write(" ".join(error.message.split()) + "\n")
        return 1
    print(f"a kernel was compiled and launched on each of {len(devices)} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
