"""Runs one part, in the process that `benchmarks.gpu.run` starts for it: a JSON line on stdin
says which, how, and for how long.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.plan import FULL, SMOKE
from benchmarks.gpu.record import Record, TimeLeft
from benchmarks.model_cost import Ceilings

if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    record = Record(Path(task["record"]), TimeLeft.of(task["seconds"]))
    models = (task["model"],) if task["model"] else ()
    ceilings = Ceilings(*task["ceilings"]) if task["ceilings"] else None
    plan = SMOKE if task["smoke"] else FULL
    import_module(task["module"]).measure(plan, ceilings, record, *models)
