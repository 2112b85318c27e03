"""The choice of a native library, by CPU, built libraries and BATON_CPU_KERNELS."""

import itertools

import pytest

from baton.common.errors import ConfigurationError
from kernels.library import library
from kernels.library.cpu import features_of_cpuinfo, features_of_sysctl
from kernels.library.library import Library, choose
from kernels.library.variants import BUILD_COMMAND, VARIANTS, library_path, variants_for

X86_64 = variants_for("x86_64")
FEATURES = {variant.name: variant.cpu_features for variant in X86_64}


def libraries(*built, machine="x86_64", stale=(), problem=""):
    return [
        Library(
            variant,
            library_path(variant.name),
            built=variant.name in built,
            stale=variant.name in stale,
            problem="" if variant.name in built else problem,
        )
        for variant in variants_for(machine)
    ]


EVERYTHING = libraries(*FEATURES)
WITH_FEATURES = [*FEATURES][:-1]


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_the_best_variant_that_the_cpu_supports_is_chosen(name):
    selection = choose(EVERYTHING, FEATURES[name], "auto")
    assert selection.variant == name
    assert selection.path == library_path(name)
    assert selection.reason == f"this CPU has {name}"


def test_an_old_cpu_runs_the_generic_library():
    selection = choose(EVERYTHING, frozenset({"sse2"}), "auto")
    assert selection.variant == "generic"
    assert selection.reason == f"this CPU has none of {', '.join(WITH_FEATURES)}"


@pytest.mark.parametrize("missing", sorted(FEATURES["avx2"]))
def test_a_variant_needs_all_of_its_cpu_features(missing):
    assert choose(EVERYTHING, FEATURES["avx2"] - {missing}, "auto").variant == "generic"


def test_the_reason_names_a_better_library_that_was_not_built():
    some = libraries("avx2", "generic", problem="gcc 8 does not take it")
    selection = choose(some, FEATURES["avx512_bf16"], "auto")
    assert selection.variant == "avx2"
    assert selection.reason == (
        "this CPU has avx512_bf16, but its library was not built (gcc 8 does not take it); "
        "avx2 is the next best"
    )


def test_torch_is_chosen_if_no_library_was_built():
    selection = choose(libraries(problem="no compiler"), FEATURES["avx2"], "auto")
    assert (selection.variant, selection.path) == ("torch", None)
    assert selection.reason == (
        f"no library was built (no compiler): install a C++ compiler and run `{BUILD_COMMAND}`"
    )


def test_torch_is_chosen_if_the_cpu_runs_no_built_library():
    selection = choose(libraries("avx512", "avx2"), frozenset(), "auto")
    assert selection.variant == "torch"
    assert "this CPU does not run what was built (avx512, avx2)" in selection.reason


@pytest.mark.parametrize(
    ("machine", "variant"),
    [("aarch64", "neon"), ("arm64", "neon"), ("riscv64", "generic"), ("AMD64", "generic")],
)
def test_other_architectures_have_variants_that_all_their_cpus_run(machine, variant):
    selection = choose(libraries(variant, machine=machine), frozenset(), "auto")
    assert selection.variant == variant


@pytest.mark.parametrize("wish", ["avx512", "avx2", "generic"])
def test_a_variant_can_be_forced(wish):
    selection = choose(EVERYTHING, FEATURES["avx512_bf16"], wish)
    assert selection.variant == wish
    assert selection.reason == f"forced by BATON_CPU_KERNELS={wish}"


def test_torch_can_be_forced_whatever_was_built():
    stale = libraries("avx2", stale=("avx2",))
    selection = choose(stale, FEATURES["avx2"], "torch")
    assert (selection.variant, selection.path) == ("torch", None)
    assert selection.reason == "forced by BATON_CPU_KERNELS=torch"


def test_triton_can_be_forced_with_its_interpreter(monkeypatch):
    monkeypatch.setenv(library.INTERPRET_VARIABLE, "1")
    selection = choose(EVERYTHING, FEATURES["avx2"], "triton")
    assert (selection.variant, selection.path) == ("triton", None)
    assert selection.reason == "forced by BATON_CPU_KERNELS=triton"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_triton_is_refused_without_its_interpreter(monkeypatch, value):
    monkeypatch.delenv(library.INTERPRET_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(library.INTERPRET_VARIABLE, value)
    with pytest.raises(ConfigurationError, match=r"'triton': on a CPU that needs TRITON_INTERPRET"):
        choose(EVERYTHING, FEATURES["avx2"], "triton")


def test_triton_is_refused_if_it_is_not_installed(monkeypatch):
    monkeypatch.setenv(library.INTERPRET_VARIABLE, "1")
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="`pip install triton`"):
        choose(EVERYTHING, FEATURES["avx2"], "triton")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            "avx512_bf16",
            "BATON_CPU_KERNELS is 'avx512_bf16': this CPU lacks avx512_bf16, avx512_vnni",
        ),
        ("avx2", rf"'avx2': its library was not built \(gone\); run `{BUILD_COMMAND}`"),
        (
            "neon",
            "'neon': this machine has another architecture; it must be one of auto, torch, triton",
        ),
        (
            "AVX2",
            "'AVX2': it must be one of auto, torch, triton, avx512_bf16, avx512_vnni, avx512",
        ),
        ("avx512,avx2", "it must be one of"),
    ],
)
def test_an_unavailable_variant_is_refused(wish, message):
    some = libraries("avx512_bf16", "avx512", problem="gone")
    with pytest.raises(ConfigurationError, match=message):
        choose(some, FEATURES["avx512"], wish)


@pytest.mark.parametrize("wish", ["auto", "avx2"])
def test_a_library_of_other_sources_is_refused(wish):
    with pytest.raises(ConfigurationError, match=f"other sources .* run `{BUILD_COMMAND}`"):
        choose(libraries("avx2", "generic", stale=("avx2",)), FEATURES["avx2"], wish)


def test_a_stale_library_that_is_not_chosen_is_ignored():
    selection = choose(libraries("avx2", "generic", stale=("generic",)), FEATURES["avx2"], "auto")
    assert selection.variant == "avx2"


def test_an_empty_variable_means_auto(monkeypatch):
    monkeypatch.setenv(library.WISH_VARIABLE, "")
    monkeypatch.setattr(library, "find_libraries", lambda: libraries("generic"))
    monkeypatch.setattr(library, "cpu_features", frozenset)
    assert library.select().variant == "generic"


def test_variants_have_distinct_names_and_slower_ones_do_not_need_all_of_a_faster_one():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    assert not {"auto", "torch", "triton"} & set(names)
    for faster, slower in itertools.combinations(X86_64, 2):
        assert not faster.cpu_features <= slower.cpu_features


CPUINFO_X86 = """\
processor\t: 0
model name\t: Some CPU
flags\t\t: fpu sse2 avx2 fma
vmx flags\t: tsc_offset

processor\t: 1
flags\t\t: fpu other
"""
CPUINFO_ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16\n"


def test_features_are_read_of_the_first_core():
    assert features_of_cpuinfo(CPUINFO_X86) == {"fpu", "sse2", "avx2", "fma"}
    assert features_of_cpuinfo(CPUINFO_ARM) == {"fp", "asimd", "bf16"}
    assert features_of_cpuinfo("") == set()


def test_features_of_macos_are_translated_to_names_of_linux():
    # The output of an Intel Mac of 2015.
    text = (
        "FPU VME SSE4.2 MOVBE POPCNT AES XSAVE OSXSAVE AVX1.0 RDRAND F16C FMA "
        "SYSCALL XD LAHF LZCNT PREFETCHW RDTSCP "
        "RDWRFSGS BMI1 AVX2 SMEP BMI2 ERMS INVPCID FPU_CSDS"
    )
    assert choose(EVERYTHING, features_of_sysctl(text), "auto").variant == "avx2"
