"""Runs the public conformance suite as a third party does: in its own process and folder."""

import os
import subprocess
import sys
import textwrap

__all__ = ["SUITE_DEADLINE_S", "install_stores", "start_suite", "with_python_path"]

SUITE_DEADLINE_S = 110


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
        env=with_python_path(python_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def with_python_path(folder):
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
