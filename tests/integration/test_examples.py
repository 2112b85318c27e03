"""The examples send what they say."""

import importlib.util
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
