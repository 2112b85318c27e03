"""Runs the public conformance suite as a third party does: in its own process and folder."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

__all__ = [
    "SUITE_DEADLINE_S",
    "Suites",
    "check_suite",
    "install_stores",
    "run_failing_suites",
    "run_suite",
]

SUITE_DEADLINE_S = 600
"""Ten times as long as four suites at once take on two cores."""
_PLUGINS = ("-p", "kvstore.conformance.plugin", "-p", "no:cacheprovider")
# One process runs every case, since most of a run's time is its start.
_RUN_EACH = """
import json, pytest, sys
failing_tests, *plugins = sys.argv[1:]
arguments = [*plugins, "-W", "error", "-q", "--tb=no", "-x"]
codes = {}
for scheme, test in json.loads(failing_tests).items():
    url = ["--pyargs", "kvstore.conformance", "--kv-connector", scheme + "://x", "-k", test]
    codes[scheme] = pytest.main(url + arguments)
print(json.dumps(codes))
"""


class Suites:
    """Runs suites, four at a time: they mostly wait for times to live and for leases."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(4)

    def start(self, url, folder, *arguments, python_path=""):
        """Starts the suite in a new folder, away from this repository's pytest settings.

        Args:
            url: the store or connector to test.
            folder: new working folder; created here.
            arguments: more arguments for pytest.
            python_path: a folder of installed packages.
        """
        folder.mkdir()
        arguments = ("--kv-connector", url, *arguments)
        return self._threads.submit(run_suite, folder, *arguments, python_path=python_path)

    def close(self):
        """Waits for the suites that run; the others do not begin."""
        self._threads.shutdown(cancel_futures=True)


def check_suite(started):
    """Waits for a suite and checks that it has passed; returns what it printed."""
    run = started.result()
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
    return run.stdout


def run_suite(folder, *arguments, python_path=""):
    """Runs the suite in a folder with more arguments for pytest."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvstore.conformance"]
    command += [*_PLUGINS, "-W", "error", "-q", *arguments]
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=_environment(python_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_DEADLINE_S,
    )


def run_failing_suites(failing_tests, folder, python_path):
    """Checks that each store or connector that breaks the contract fails its test.

    Args:
        failing_tests: by scheme, the test that must fail.
        folder: working folder.
        python_path: a folder of installed packages.
    """
    run = subprocess.run(
        [sys.executable, "-c", _RUN_EACH, json.dumps(failing_tests), *_PLUGINS],
        check=False,
        cwd=folder,
        env=_environment(python_path),
        capture_output=True,
        text=True,
        timeout=2 * SUITE_DEADLINE_S,
    )
    assert run.returncode == 0, run.stderr
    *output, codes = run.stdout.splitlines()
    assert json.loads(codes) == dict.fromkeys(failing_tests, 1), "\n".join(output)
    for test in failing_tests.values():
        assert any(line.startswith("FAILED") and test in line for line in output), test


def _environment(python_path):
    """Returns this process's environment with a folder at the front of PYTHONPATH, and without the
    plug-ins of pytest that this project uses, whose import would take most of a run's time.
    """
    folders = [str(python_path), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def install_stores(folder, source, class_names, group="baton.kv_stores"):
    """Installs a package that declares its stores as entry points.

    Args:
        folder: folder used as site-packages.
        source: text of the package's one module.
        class_names: class name of the store of each scheme.
        group: group of the entry points; that of connectors makes them connectors.
    """
    (folder / "third_party_stores.py").write_text(source)
    metadata = folder / "third_party_stores-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        textwrap.dedent("""\
            Metadata-Version: 2.1
            Name: third-party-stores
            Version: 1.0
            """)
    )
    points = [f"{scheme} = third_party_stores:{name}" for scheme, name in class_names.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *points, ""]))
