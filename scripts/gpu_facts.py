"""What a GPU machine is, and whether anything runs on it: the first parts of `make gpu-first`.

    python3 -m scripts.gpu_facts machine --json machine.json
    python3 -m scripts.gpu_facts collect --json collected.json

`machine` writes names, versions and tools, and launches one kernel: where that fails, nothing else
can work. `collect` imports all tests of kernels and of the device runtime, and counts them.
Exit status: 1 if the kernel cannot be launched, or a file of tests cannot be collected.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.machine import describe_gpu_machine
from benchmarks.output import write_results

__all__ = ["collect_tests", "describe", "main"]

_ROOT = Path(__file__).resolve().parents[1]
_TOOLS = ("gcc", "clang", "git", "nvcc", "nvidia-smi", "compute-sanitizer", "ncu", "cuobjdump")
_FOLDERS = ("tests/triton", "tests/gpu")
_TIMEOUT_S = 20
_LAST_CHARACTERS = 4000


def main() -> int:
    """Runs the part that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("part", choices=("machine", "collect"))
    parser.add_argument("--device", default="cuda", help="cpu for Triton's interpreter")
    parser.add_argument("--json", type=Path, required=True, help="the report")
    args = parser.parse_args()
    run = describe if args.part == "machine" else collect_tests
    report = run(args.device)
    write_results(args.json, report)
    print(report["problem"] or report["summary"])
    return int(report["problem"] is not None)


def describe(device: str) -> dict[str, Any]:
    """Returns the facts of this machine, and why no kernel can be launched, if so."""
    import torch

    from kernels.first_launch import check_launch

    began, problem = time.monotonic(), None
    try:
        check_launch(torch.device(device))
    except ConfigurationError as error:
        problem = error.message
    seconds = round(time.monotonic() - began, 2)
    return {
        "what": "the machine",
        "machine": describe_gpu_machine(device),
        "tools": {name: shutil.which(name) for name in _TOOLS},
        "CC": os.environ.get("CC"),
        "nvidia_smi": _nvidia_smi(),
        "first_launch_s": seconds,
        "summary": f"a kernel was compiled and launched in {seconds} s",
        "problem": problem,
    }


def _nvidia_smi() -> str | None:
    """Returns clocks, power and memory as the driver shows them; None without the program."""
    command = ["nvidia-smi", "-q", "-d", "CLOCK,POWER,MEMORY,PERFORMANCE,ECC,COMPUTE"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout


def collect_tests(device: str) -> dict[str, Any]:
    """Returns how many tests each file has, and what could not be collected."""
    options = ["-c", "tests/gpu.ini", "--rootdir", ".", "--collect-only", "-qq"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *_FOLDERS],
        cwd=_ROOT,
        env=os.environ | {"BATON_TEST_DEVICE": device},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {
        path: int(count)
        for path, count in re.findall(r"^(\S+\.py): (\d+)$", result.stdout, re.MULTILINE)
    }
    missing = sorted(_files() - set(counts))
    output = (result.stdout + result.stderr)[-_LAST_CHARACTERS:].strip()
    has_failed = bool(missing) or result.returncode != 0
    return {
        "what": "the tests that can be collected",
        "files": counts,
        "missing": missing,
        "summary": f"{Counter(counts).total()} tests in {len(counts)} files were collected",
        "problem": f"not collected: {', '.join(missing)}\n{output}" if has_failed else None,
    }


def _files() -> set[str]:
    return {
        str(path.relative_to(_ROOT))
        for folder in _FOLDERS
        for path in (_ROOT / folder).glob("test_*.py")
    }


if __name__ == "__main__":
    sys.exit(main())
