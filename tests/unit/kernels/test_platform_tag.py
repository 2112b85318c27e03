"""The platform tag of a wheel, by what its libraries need."""

from pathlib import Path

import pytest

from kernels.library import platform_tag as tags
from kernels.library.platform_tag import Needs, platform_tag, read_needs

GNU = frozenset({"libc.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2"})


@pytest.fixture
def tag_of(monkeypatch):
    """Returns a function from what libraries need to their tag."""

    def find(*needs):
        known = {Path(str(index)): each for index, each in enumerate(needs)}
        monkeypatch.setattr(tags, "read_needs", known.__getitem__)
        return platform_tag(known)

    return find


def needs(*symbols, architecture="x86_64", libraries=GNU):
    return Needs(architecture, frozenset(libraries), frozenset(symbols))


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ((), "manylinux_2_17_x86_64"),
        (("GLIBC_2.2.5", "GLIBC_2.17", "GLIBCXX_3.4", "GCC_3.0"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.18",), "manylinux_2_28_x86_64"),
        (("GLIBC_2.29",), "manylinux_2_31_x86_64"),
        (("GLIBC_2.4", "GLIBCXX_3.4.29"), "manylinux_2_34_x86_64"),
        (("CXXABI_1.3.13",), "manylinux_2_34_x86_64"),
        (("GLIBC_2.36",), None),
        (("GLIBC_PRIVATE",), None),
        (("OPENSSL_3.0.0",), None),
    ],
)
def test_the_newest_symbol_decides(tag_of, symbols, tag):
    assert tag_of(needs(*symbols)) == tag


def test_all_libraries_count(tag_of):
    assert tag_of(needs("GLIBC_2.29"), needs("GLIBC_2.34")) == "manylinux_2_34_x86_64"
    arm = needs("GLIBC_2.17", architecture="aarch64", libraries=["ld-linux-aarch64.so.1"])
    assert tag_of(arm) == "manylinux_2_17_aarch64"
    assert tag_of(needs(), arm) is None
    assert tag_of() is None


def test_other_libraries_and_systems_have_no_tag(tag_of):
    assert tag_of(needs(libraries=[*GNU, "libgomp.so.1"])) is None
    assert tag_of(needs(libraries=["libc.musl-x86_64.so.1"])) is None
    assert tag_of(needs(architecture="")) is None


def test_a_file_that_is_no_elf_library_has_no_tag(tmp_path):
    other = tmp_path / "libother.dylib"
    other.write_bytes(b"\xcf\xfa\xed\xfe")
    assert read_needs(other).architecture == ""
    assert platform_tag([other]) is None
