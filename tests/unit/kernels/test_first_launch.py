"""The first launch of a kernel: what is missing is named, and wrong numbers are refused."""

import sysconfig
from pathlib import Path

import pytest
import torch

from baton.common.errors import ConfigurationError
from kernels import first_launch
from kernels.dispatch import KERNELS
from kernels.first_launch import check_launch, find_c_compiler, missing_for_launchers

_CPU = torch.device("cpu")


@pytest.fixture
def launched_as(monkeypatch):
    """Returns a function that replaces the norm's implementation."""

    def replace(norm):
        monkeypatch.setattr(KERNELS["rms_norm"], "call", norm)

    return replace


@pytest.fixture
def gpu(monkeypatch):
    """A device that is named as a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    return torch.device("cuda", 0)


@pytest.fixture
def programs(tmp_path):
    """A folder of programs, as PATH names one, and a function that adds one."""

    def add(name):
        program = tmp_path / name
        program.touch(mode=0o755)
        return str(program)

    return tmp_path, add


def test_a_kernel_that_works_is_accepted():
    check_launch(_CPU)


@pytest.mark.parametrize("spoil", [lambda out: out + 0.01, lambda out: out * torch.nan])
def test_wrong_numbers_are_refused(launched_as, spoil):
    norm = KERNELS["rms_norm"].reference
    launched_as(lambda *args: spoil(norm(*args)))
    with pytest.raises(ConfigurationError, match="a kernel on cpu computes wrong numbers"):
        check_launch(_CPU)


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(
    launched_as, gpu, monkeypatch
):
    def fail(*args):
        raise RuntimeError("Failed to find C compiler")

    launched_as(fail)
    monkeypatch.setattr(first_launch, "find_c_compiler", lambda environment: None)
    with pytest.raises(ConfigurationError) as raised:
        check_launch(gpu)
    assert raised.value.message == (
        "no kernel can be compiled for NVIDIA H200: there is no C compiler: apt-get install gcc "
        "libc6-dev (RuntimeError: Failed to find C compiler)"
    )


def test_another_failure_is_told_with_its_cause(launched_as, gpu, monkeypatch):
    def fail(*args):
        raise RuntimeError("no kernel image is available " + "x" * 9000)

    launched_as(fail)
    monkeypatch.setattr(first_launch, "missing_for_launchers", lambda: None)
    with pytest.raises(ConfigurationError) as raised:
        check_launch(gpu)
    expected = (
        "no kernel can be launched on NVIDIA H200: RuntimeError: no kernel image is available"
    )
    assert raised.value.message.startswith(expected)
    assert len(raised.value.message) < 2000


def test_the_compiler_is_the_one_that_triton_would_take(programs):
    folder, add = programs
    environment = {"PATH": str(folder)}
    assert find_c_compiler(environment) is None
    clang = add("clang")
    assert find_c_compiler(environment) == clang
    gcc = add("gcc")
    assert find_c_compiler(environment) == gcc
    assert find_c_compiler({**environment, "CC": "clang -O2"}) == clang
    assert find_c_compiler({**environment, "CC": "icc"}) is None


def test_what_is_missing_is_named(programs, monkeypatch):
    folder, add = programs
    environment = {"PATH": str(folder)}
    assert missing_for_launchers({**environment, "CC": "icc"}) == (
        "CC is 'icc', which is no program: apt-get install gcc libc6-dev"
    )
    add("gcc")
    headers = folder / "include"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(headers)})
    assert missing_for_launchers(environment) == (
        f"there is no Python.h in {headers}: apt-get install python3-dev"
    )
    headers.mkdir()
    Path(headers, "Python.h").touch()
    assert missing_for_launchers(environment) is None
