"""The package itself: what importing it costs, its dispatch, and its name."""

import inspect
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import baton
import kernels
from kernels import dispatch, paged_kv, reference

NAMES = sorted(dispatch.KERNELS)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_its_references_signature_and_docstring(name):
    called, reference_function = getattr(kernels, name), getattr(reference, name)
    own = inspect.signature(called, follow_wrapped=False)
    assert own == inspect.signature(reference_function)
    assert called.__doc__ == reference_function.__doc__


@pytest.mark.parametrize("backend", [dispatch.NATIVE, dispatch.TRITON], ids=["native", "triton"])
def test_implementations_have_their_references_signatures(backend):
    assert backend.implementations.keys() <= dispatch.KERNELS.keys()
    for name, function in backend.implementations.items():
        assert inspect.signature(function) == inspect.signature(getattr(reference, name))


def test_a_call_passes_all_arguments_and_the_defaults():
    def add(first, second, third=3, *, fourth, fifth=None):
        return first, second, third, fourth, fifth

    call = dispatch.Kernel(add, "second.device", "second.dtype").call
    tensor = torch.zeros(1, dtype=torch.int64)
    assert call(1, tensor, fourth=4) == (1, tensor, 3, 4, None)
    assert call(fifth=5, fourth=4, second=tensor, first=1, third=0) == (1, tensor, 0, 4, 5)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'fourth'"):
        call(1, tensor)


def test_a_device_and_type_without_implementations_use_the_reference():
    for key in (("meta", torch.float32), ("cpu", torch.int64)):
        assert dispatch.KERNELS["rms_norm"][key] is reference.rms_norm


def test_block_copies_depend_on_the_device_alone(monkeypatch):
    """A pool of 8-bit KV has a type that no kernel computes with."""
    called = []
    names = ("gather_blocks", "scatter_blocks", "copy_blocks", "swap_blocks")
    for name in names:
        record = partial(_append_name, called, name)
        monkeypatch.setitem(dispatch.KERNELS[name], ("cpu", None), record)
    pool = torch.zeros(2, 3, dtype=torch.uint8)
    kernels.gather_blocks(pool, [0], pool)
    kernels.scatter_blocks(pool, pool, [0])
    kernels.copy_blocks(pool, [(0, 1)])
    kernels.swap_blocks(pool, pool, [(0, 1)])
    assert tuple(called) == names


def _append_name(called, name, *_):
    called.append(name)


def packages_imported_by(code, before):
    """Returns the top-level packages that some code imports in a new process."""
    code = (
        f"import sys, json, {before}; before = set(sys.modules); {code}; "
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    return set(json.loads(output))


def test_importing_kernels_imports_no_other_package_and_using_them_only_torch():
    assert packages_imported_by("import kernels", "importlib, json, typing") == {"kernels"}
    assert packages_imported_by("import kernels; kernels.linear", "torch") <= {"baton", "kernels"}


def test_the_package_has_the_kernels_their_types_and_no_other_names():
    assert all(getattr(kernels, name) is dispatch.KERNELS[name].call for name in NAMES)
    assert kernels.PagedKv is paged_kv.PagedKv
    assert kernels.quantize_kv is reference.quantize_kv
    assert {*NAMES, "PagedKv", "quantize_kv", "num_threads"} <= set(kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'liner'"):
        kernels.liner  # noqa: B018


def test_transformers_does_not_mistake_our_folder_for_its_kernels_package():
    """Hugging Face has an optional package of the same name, which transformers looks for."""
    from packaging.version import Version
    from transformers.utils import import_utils, is_kernels_available

    assert Path(kernels.__file__).parent.parent == Path(baton.__file__).parent.parent
    assert not hasattr(kernels, "__version__")
    assert not is_kernels_available()
    # With Baton installed, its version may be taken for the folder's; it must be out of range.
    theirs = (import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION)
    assert not Version(theirs[0]) <= Version(baton.__version__) < Version(theirs[1])
