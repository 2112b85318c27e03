"""`baton collect-env`: its sections, and secrets that it hides."""

import json

import pytest

from baton.cli import main
from baton.cli.collect_env import collect, without_secrets
from baton.doctor import Finding, Level


@pytest.fixture(autouse=True)
def one_finding(monkeypatch):
    finding = Finding("cores", Level.OK, "2 of 2", {"affine": 2})
    monkeypatch.setattr("baton.cli.collect_env.examine", lambda: [finding])


def test_the_page_has_versions_limits_packages_and_findings(capsys, monkeypatch):
    monkeypatch.setenv("BATON_PORT", "9")
    assert main(["collect-env"]) == 0
    page = capsys.readouterr().out
    for text in ("python: 3.", "open files: ", "  grpcio: 1.", "  BATON_PORT: 9"):
        assert text in page
    assert "doctor:\n  ok      cores                2 of 2" in page


def test_json_has_the_same_facts(capsys):
    assert main(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == {"system", "limits", "packages", "environment", "doctor"}
    assert facts["doctor"][0]["facts"] == {"affine": 2}
    assert facts["packages"] == collect()["packages"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("BATON_MAX_NUM_SEQS", "8", "8"),
        ("OPENAI_API_KEY", "sk-1", "(hidden)"),
        ("HF_TOKEN", "hf_1", "(hidden)"),
        ("BATON_KV_CONNECTOR", "redis://me:p@ss@host/0", "redis://(hidden)@host/0"),
        ("BATON_KV_CONNECTOR", "redis://me:a/b,c@host", "redis://(hidden)@host"),
        (
            "BATON_KV_CONNECTOR",
            "redis://:p@a,redis://:q@b",
            "redis://(hidden)@a,redis://(hidden)@b",
        ),
        ("BATON_KV_CONNECTOR", "redis://me:pw@h:1/0?ttl_s=3", "redis://(hidden)@h:1/0?ttl_s=3"),
        ("BATON_KV_CONNECTOR", "redis://h?password=pw&x=1", "redis://h?password=(hidden)&x=1"),
        (
            "BATON_KV_CONNECTOR",
            "multi://redis+sentinel://h/s?sentinel_password=a,b,shm://a",
            "multi://redis+sentinel://h/s?sentinel_password=(hidden),shm://a",
        ),
        (
            "BATON_KV_CONNECTOR",
            "multi://shm://a,redis://u:pw@h",
            "multi://shm://a,redis://(hidden)@h",
        ),
    ],
)
def test_secrets_are_hidden(name, value, shown):
    assert without_secrets({name: value}) == {name: shown}


def test_other_variables_are_left_out():
    assert without_secrets({"HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "x"}) == {}
