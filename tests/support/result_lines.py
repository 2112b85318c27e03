"""A pytest plugin: writes a JSON line when a test begins and when it ends.

The file shows which test was running even if the process crashed or was killed. Load the plugin
with `-p tests.support.result_lines`; `BATON_TEST_RESULTS` names the file.
"""

import json
import os
from pathlib import Path

RESULTS_VARIABLE = "BATON_TEST_RESULTS"

_outcomes = {}


def pytest_collectreport(report):
    if report.failed:
        _write(test=report.nodeid, outcome="failed", seconds=0.0, message=_message(report))


def pytest_runtest_logstart(nodeid):
    _write(begins=nodeid)


def pytest_runtest_logreport(report):
    """Records the outcome: that of the first of set-up, call and teardown that did not pass."""
    known = _outcomes.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    known["seconds"] += report.duration
    if report.outcome != "passed" and known["outcome"] != "failed":
        known |= {"outcome": report.outcome, "message": _message(report)}
    if report.when == "teardown":
        _write(test=report.nodeid, **_outcomes.pop(report.nodeid))


def _message(report):
    """Returns what failed, or why the test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)


def _write(**fields):
    with Path(os.environ[RESULTS_VARIABLE]).open("a") as lines:
        lines.write(json.dumps(fields) + "\n")
