"""The baseline of step times: the scheduler before sequence groups, out of git.

`measure_former` checks that commit's packages out into a folder of its own and
runs this module there, so that `engine` is the former one.
"""

import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduling.step_loop import engine_config, measure_all, model_info

__all__ = ["FORMER_COMMIT", "measure_former"]

FORMER_COMMIT = "5458ef2"
_PACKAGES = ("baton", "engine", "kvstore")
_ROOT = Path(__file__).resolve().parents[2]
_TOKEN_ID = 7


def measure_former() -> list[dict[str, Any]]:
    """Step times of the former scheduler; none where the history lacks its commit."""
    command = ["git", "archive", FORMER_COMMIT, *_PACKAGES]
    archive = subprocess.run(command, capture_output=True, cwd=_ROOT, check=False)
    if archive.returncode != 0:
        sys.stderr.write(f"no baseline: {archive.stderr.decode().strip()}\n")
        return []
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.scheduling.former"],
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"},
            check=True,
        )
    steps: list[dict[str, Any]] = json.loads(result.stdout)
    return steps


def _new_scheduler(max_num_seqs: int, num_blocks: int) -> Any:
    return _module("engine.schedule.scheduler").Scheduler(
        engine_config(max_num_seqs),
        model_info(),
        num_blocks=num_blocks,
        namespace=b"benchmark",
        connector=None,
        clock=time.monotonic,
    )


def _execute(batch: Any) -> Any:
    token_ids = tuple([_TOKEN_ID if share.draw else None for share in batch.sequences])
    return _module("engine.batch").StepOutput(step=batch.step, token_ids=token_ids)


def _module(name: str) -> Any:
    """A module of the former commit, whose types are not this one's."""
    module = importlib.import_module(name)
    if Path(str(module.__file__)).is_relative_to(_ROOT):
        raise RuntimeError(f"{name} is this commit's")
    return module


if __name__ == "__main__":
    json.dump([case for case, _ in measure_all(_new_scheduler, _execute)], sys.stdout)
