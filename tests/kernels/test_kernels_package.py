"""The package itself: what importing it costs, its dispatch, and its name."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import baton
import kernels
from kernels import dispatch, reference

PRIMITIVES = sorted(set(reference.__all__))


@pytest.mark.parametrize("name", PRIMITIVES)
def test_dispatch_has_the_references_signature(name):
    assert name in dispatch.__all__
    dispatched = inspect.signature(getattr(kernels, name))
    assert dispatched == inspect.signature(getattr(reference, name))


def test_copies_of_blocks_are_the_devices_whatever_a_pool_is_of(monkeypatch):
    """A pool of 8-bit KV is of bytes, which nothing computes with."""
    names = ("gather_blocks", "scatter_blocks", "copy_blocks", "swap_blocks")
    module = SimpleNamespace(**{name: lambda *_, name=name: called.append(name) for name in names})
    monkeypatch.setattr(dispatch, "_modules", lambda: {("cpu", torch.float32): module})
    called = []
    pool = torch.zeros(2, 3, dtype=torch.uint8)
    kernels.gather_blocks(pool, [0], pool)
    kernels.scatter_blocks(pool, pool, [0])
    kernels.copy_blocks(pool, [(0, 1)])
    kernels.swap_blocks(pool, pool, [(0, 1)])
    assert tuple(called) == names


def packages_brought_by(code, before):
    """Top-level packages that a process has after some code and did not have before it."""
    code = (
        f"import sys, json, {before}; before = set(sys.modules); {code}; "
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    return set(json.loads(output))


def test_importing_kernels_brings_nothing_heavy_and_their_use_torch_alone():
    assert packages_brought_by("import kernels", "importlib, json, typing") == {"kernels"}
    assert packages_brought_by("import kernels; kernels.linear", "torch") <= {"baton", "kernels"}


def test_the_package_has_the_dispatchs_names_and_no_others():
    assert all(getattr(kernels, name) is getattr(dispatch, name) for name in dispatch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'liner'"):
        kernels.liner  # noqa: B018


def test_transformers_takes_our_folder_for_no_kernels_package():
    """Hugging Face has an optional package of the same name, which transformers looks for."""
    from packaging.version import Version
    from transformers.utils import import_utils, is_kernels_available

    assert Path(kernels.__file__).parent.parent == Path(baton.__file__).parent.parent
    assert not hasattr(kernels, "__version__")
    assert not is_kernels_available()
    # An installed Baton may lend our folder its own version; that must not look like theirs.
    theirs = (import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION)
    assert not Version(theirs[0]) <= Version(baton.__version__) < Version(theirs[1])
