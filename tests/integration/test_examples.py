"""The examples do what they say."""

import importlib.util
import re
from pathlib import Path

from baton.v1 import common_pb2
from tests.support.fake_generation import running_fake_generation

FOLDER = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_of_structured_outputs_sends_a_request_of_each_form(capsys):
    example = load("structured_outputs")
    with running_fake_generation() as server:
        example.main(server.address)
    forms = [request.sampling.structured_outputs for request in server.requests]
    assert len(forms) == len(example.FORMS) == len(capsys.readouterr().out.splitlines())
    assert forms[0] == common_pb2.StructuredOutputs(choice=["yes", "no"])
    assert sum(form.HasField("json") for form in forms) == 3


def test_the_example_for_users_of_vllm_runs(capsys):
    example = load("from_vllm")
    example.main("demo")
    printed = capsys.readouterr().out
    assert all(repr(prompt) in printed for prompt in example.PROMPTS[:2])
    assert "How do I open a file?" in printed


def test_the_offline_example_runs(capsys):
    load("offline").main("demo")
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"'[0-9]{4}-[0-9]{2}-[0-9]{2}' \(stop", lines[1])
    assert lines[2] == "32 of 47 tokens were cached"
    assert {line.partition(":")[0] for line in lines[3:]} == {"async-0", "async-1"}
