"""The commands of README.md and docs/quickstart.md on a machine without a compiler, as readers type
them. tests/unit/repository/test_page_commands.py has the other pages.
"""

import json
import re

import pytest

from baton.common.model_files.named_models import demo_model_path
from tests.support.bare_machine import bare_machine, has_make
from tests.support.containers import ROOT, NoContainersError, container_engine
from tests.support.pages import blocks, commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not has_make(), reason="the container borrows this machine's make"),
]

_PYTHON = str(ROOT / ".venv" / "bin" / "python")
_BATON = str(ROOT / ".venv" / "bin" / "baton")
_POST = """
import sys, urllib.request
url, body = sys.argv[1:]
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(url, body.encode(), headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.fixture(scope="module", autouse=True)
def engine():
    try:
        with container_engine():
            yield
    except NoContainersError as error:
        pytest.skip(str(error))


def run_as_typed(machine, words, **replaced):
    """Runs a command of a page there; returns what it prints."""
    words = [replaced.get(word, word) for word in words]
    if words[0] == "curl":  # the machine has none
        return machine.run(_PYTHON, "-c", _POST, words[1], words[-1])
    assert words[0] == "baton"
    return machine.run(_BATON, *words[1:])


def test_make_run_serves_the_commands_that_follow_it():
    client, _ = blocks("README.md", "python")
    readme, *_ = blocks("README.md", "sh")
    _, quickstart, *_ = blocks("docs/quickstart.md", "sh")
    with bare_machine("make", "run") as machine:
        printed = machine.wait_for("Ctrl-C stops everything.")
        assert re.search(r"\[\w+; tokens: \d+ prompt, \d+ cached, 64 generated; ms: ", printed)
        make_run, curl = commands(readme)
        assert make_run == ["make", "run"]
        answer = json.loads(run_as_typed(machine, curl))
        assert answer["choices"][0]["message"]["content"].strip()
        assert machine.run(_PYTHON, "-", text=client).strip()
        curl, _, complete, doctor = commands(quickstart)
        assert json.loads(run_as_typed(machine, curl))["choices"][0]["text"].strip()
        assert run_as_typed(machine, complete).strip()
        assert "compiler" in run_as_typed(machine, doctor)
        machine.interrupt()
        assert "Traceback" not in machine.output()


def test_two_decode_workers_and_what_went_on():
    *_, serve, operators = blocks("docs/quickstart.md", "sh")
    ((_, *arguments),) = commands(serve)
    with bare_machine(_BATON, *arguments) as machine:
        printed = machine.wait_for("Ctrl-C stops everything.")
        (token_file,) = re.findall(r"^token +(\S+)$", printed, re.MULTILINE)
        # The answer is drawn: without the last flag its sentence may end before its eighth word.
        complete = ("complete", "Return a list of", "--max-tokens", "8", "--ignore-eos")
        assert machine.run(_BATON, *complete).strip()
        top, trace = commands(operators)
        screen = run_as_typed(machine, top, TOKEN_FILE=token_file)
        assert len(re.findall(r"^decode +\S+ +ready ", screen, re.MULTILINE)) == 2
        assert " length " in run_as_typed(machine, trace, TOKEN_FILE=token_file)


def test_offline_use_and_help():
    _, offline = blocks("README.md", "python")
    script = offline.replace("/path/to/checkpoint", str(demo_model_path()))
    with bare_machine("sleep", "1200") as machine:
        assert machine.run(_PYTHON, "-", text=script).strip()
        assert "--decode-workers" in machine.run(_BATON, "serve", "--help")
        assert machine.run("make").startswith("help")


@pytest.mark.skipif(
    not (ROOT / ".venv" / ".smollm2").exists(), reason="the package of SmolLM2 is not installed"
)
def test_make_chat_answers_the_question_of_the_readme():
    with bare_machine("sleep", "1200") as machine:
        question = "What is the capital of France?\n"
        # The model draws its words: once in many times it answers in French, and at length, which
        # takes minutes up to its own limit of 8,192 tokens, or with a single word.
        limit = "ARGS=--max-model-len 256"
        printed = machine.run("make", "chat", limit, text=question)
        assert printed.partition("> ")[2].replace("> ", "").strip()
