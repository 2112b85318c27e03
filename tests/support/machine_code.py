"""The machine code of kernels that were compiled for a GPU: registers, stack and instructions.

`python -m tests.support.machine_code DEVICE_NAME CASE...` prints a JSON object: case of
`tests.support.launch_cases` -> the fields of a `MachineCode` for each kernel it compiled. It must
not run in a process where `triton` interprets kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from triton.backends import nvidia

from tests.support.ahead_of_time import Compiled, compiling
from tests.support.launch_cases import CASES

__all__ = ["MachineCode", "read_machine_code"]

_TOOLS = Path(nvidia.__file__).parent / "bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class MachineCode:
    """A kernel's machine code.

    Attributes:
        kernel: name of the kernel's function.
        shared_bytes: shared memory of a program.
        registers: of a thread.
        stack_bytes: of a thread; values that found no register are there.
        instructions: names and modifiers of all instructions, in order.
    """

    kernel: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    instructions: list[str]


def read_machine_code(compiled: Compiled) -> MachineCode:
    """Reads a compiled kernel with the tools that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        usage = _USAGE.search(_run("cuobjdump", "-res-usage", file.name))
        listing = _run("nvdisasm", "-c", file.name)
    assert usage, "cuobjdump prints no registers"
    registers, stack = map(int, usage.groups())
    instructions = _INSTRUCTION.findall(listing)
    return MachineCode(compiled.name, compiled.shared_bytes, registers, stack, instructions)


def _run(tool: str, *arguments: str) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def main() -> None:
    """Compiles the cases; see the module's docstring."""
    device_name, *names = sys.argv[1:]
    codes = {}
    for name in names:
        with compiling(device_name) as kernels:
            CASES[name]()
        codes[name] = [asdict(read_machine_code(kernel)) for kernel in kernels]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
