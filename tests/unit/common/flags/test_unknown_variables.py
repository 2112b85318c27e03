"""Variables that look like Baton's and have no effect are named, and no others."""

import sys

import pytest

from baton.cli import main
from baton.common.flags.unknown_variables import unknown_variables
from rpc.server import run_process

PREFIX = "BATON_"


def environment_of(*names: str, text: str = "1") -> dict[str, str]:
    return {"PATH": "/bin", **{PREFIX + name: text for name in names}}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KV_CONECTOR", "KV_CONNECTOR"),
        ("KV_CACHE_MEMORY", "KV_CACHE_MEMORY_BYTES"),
        ("MAX_MODEL_LENGTH", "MAX_MODEL_LEN"),
        ("LOGLEVEL", "LOG_LEVEL"),
        ("NO_TURNS", "TURNS=off"),
        ("SHM_SIZ", "SHM_SIZE"),
    ],
)
def test_a_misspelled_variable_is_named_with_the_nearest_one(name, meant):
    (warning,) = unknown_variables(environment_of(name))
    reason = f"the variable {PREFIX}{name} is not read by any command"
    assert warning == f"{reason}; did you mean {PREFIX}{meant}?"


def test_a_variable_that_resembles_none_is_named_alone():
    (warning,) = unknown_variables(environment_of("XYZZY_PLUGH"))
    assert warning == f"the variable {PREFIX}XYZZY_PLUGH is not read by any command"


@pytest.mark.parametrize(
    "environment",
    [
        environment_of("MAX_NUM_SEQS", "PREFILL_WORKERS", "API_KEY"),
        environment_of("CPU_KERNELS", "CLUSTER_TOKEN", "CONFIG"),
        environment_of("MODEL_NAME", "SHM_SIZE", "PREFILL_REPLICAS"),
        environment_of("KV_CONECTOR", text=""),
        environment_of(
            *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP_ADDR"),
            *("ROUTER_SERVICE_HOST", "ROUTER_PORT_50051_TCP"),
        ),
    ],
    ids=["flags", "others", "compose", "empty", "Kubernetes"],
)
def test_what_something_reads_or_another_program_sets_is_no_warning(environment):
    assert list(unknown_variables(environment)) == []


def test_a_server_process_warns_in_its_log_and_shows_no_value(monkeypatch, caplog):
    monkeypatch.setenv(PREFIX + "DTYP", "hunter2")
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # which logging replaces

    async def run() -> None: ...

    assert run_process("baton decode", "info", "text", run) == 0
    (record,) = (one for one in caplog.records if PREFIX + "DTYP" in one.getMessage())
    assert record.levelname == "WARNING"
    assert "did you mean BATON_DTYPE?" in record.getMessage()
    assert "hunter2" not in caplog.text


def test_baton_serve_warns_once(monkeypatch, capsys):
    monkeypatch.setenv(PREFIX + "DECODE_WORKER", "2")
    assert main(["serve", "demo", "--revision", "no-hub-model"]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if PREFIX + "DECODE_WORKER" in line
    ]
    assert lines == [
        f"serve | warning: the variable {PREFIX}DECODE_WORKER is not read by any command; "
        f"did you mean {PREFIX}DECODE_WORKERS?"
    ]


def test_the_list_of_names_is_not_loaded_without_need(monkeypatch):
    monkeypatch.delitem(sys.modules, "baton.common.flags.variable_names", raising=False)
    assert list(unknown_variables({"PATH": "/bin"})) == []
    assert "baton.common.flags.variable_names" not in sys.modules
