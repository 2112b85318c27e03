"""Runs the public conformance suite as a third party does: in its own process and folder."""

import json
import os
import subprocess
import sys
import textwrap

__all__ = ["SUITE_DEADLINE_S", "install_stores", "run_failing_suites", "start_suite"]

SUITE_DEADLINE_S = 110
# One process runs every case, since most of a run's time is its start.
_RUN_EACH = """
import json, pytest, sys
arguments = ["-p", "kvstore.conformance.plugin", "-p", "no:cacheprovider", "-p", "no:asyncio"]
arguments += ["-W", "error", "-q", "--tb=no", "-x"]
codes = {}
for scheme, test in json.loads(sys.argv[1]).items():
    url = ["--pyargs", "kvstore.conformance", "--kv-connector", scheme + "://x", "-k", test]
    codes[scheme] = pytest.main(url + arguments)
print(json.dumps(codes))
"""


def start_suite(url, folder, *arguments, python_path=""):
    """Starts the suite in a new folder, away from this repository's pytest settings.

    Args:
        url: the store to test.
        folder: new working folder; created here.
        arguments: more arguments for pytest.
        python_path: a folder of installed packages.
    """
    folder.mkdir()
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "kvstore.conformance", "--kv-connector", url,
        "-p", "kvstore.conformance.plugin", "-p", "no:cacheprovider",
        "-p", "no:asyncio", "-W", "error", "-q", *arguments,
    ]
    # fmt: on
    return subprocess.Popen(
        command,
        cwd=folder,
        env=_with_python_path(python_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_failing_suites(failing_tests, folder, python_path):
    """Checks that each store or connector that breaks the contract fails its test.

    Args:
        failing_tests: by scheme, the test that must fail.
        folder: working folder.
        python_path: a folder of installed packages.
    """
    run = subprocess.run(
        [sys.executable, "-c", _RUN_EACH, json.dumps(failing_tests)],
        check=False,
        cwd=folder,
        env=_with_python_path(python_path),
        capture_output=True,
        text=True,
        timeout=2 * SUITE_DEADLINE_S,
    )
    assert run.returncode == 0, run.stderr
    *output, codes = run.stdout.splitlines()
    assert json.loads(codes) == dict.fromkeys(failing_tests, 1), "\n".join(output)
    for test in failing_tests.values():
        assert any(line.startswith("FAILED") and test in line for line in output), test


def _with_python_path(folder):
    """Returns this process's environment with a folder at the front of PYTHONPATH."""
    folders = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


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
