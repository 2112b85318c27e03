"""The README's commands on a machine without a compiler, as its readers type them."""

import json
import re
import shlex

import pytest

from baton.common.model_files.named_models import demo_model_path
from tests.support.bare_machine import bare_machine, has_make
from tests.support.containers import ROOT, NoContainersError, container_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
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


def blocks(language):
    """The code blocks of the README."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def words_of_curl():
    (block,) = (block for block in blocks("sh") if "curl" in block)
    return shlex.split(block[block.index("curl") :].replace("\\\n", " "))


def test_make_run_serves_the_commands_that_follow_it():
    client, _ = blocks("python")
    with bare_machine("make", "run") as machine:
        printed = machine.wait_for("Ctrl-C stops everything.")
        assert re.search(r"\[\w+; tokens: \d+ prompt, \d+ cached, 64 generated; ms: ", printed)
        words = words_of_curl()
        answer = json.loads(machine.run(_PYTHON, "-c", _POST, words[1], words[-1]))
        assert answer["choices"][0]["message"]["content"].strip()
        assert machine.run(_PYTHON, "-", text=client).strip()
        assert machine.run(_BATON, "complete", "Return a", "--max-tokens", "4").strip()
        doctor = machine.run(_BATON, "doctor")
        assert "compiler" in doctor
        machine.interrupt()
        assert "Traceback" not in machine.output()


def test_offline_use_and_help():
    _, offline = blocks("python")
    script = offline.replace("/path/to/checkpoint", str(demo_model_path()))
    with bare_machine("sleep", "300") as machine:
        assert machine.run(_PYTHON, "-", text=script).strip()
        assert "--decode-workers" in machine.run(_BATON, "serve", "--help")
        assert machine.run("make").startswith("help")


@pytest.mark.skipif(
    not (ROOT / ".venv" / ".smollm2").exists(), reason="the package of SmolLM2 is not installed"
)
def test_make_chat_answers_the_question_of_the_readme():
    with bare_machine("sleep", "600") as machine:
        question = "What is the capital of France?\n"
        printed = machine.run("make", "chat", text=question, timeout_s=300)
        # The model draws its words: once in many times it answers in French, and at length.
        assert len(printed.partition("> ")[2].split()) > 2
