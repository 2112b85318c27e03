"""Loading of logits processors, and checks of `extra_args`."""

from importlib.metadata import EntryPoint

import pytest
import torch

from baton.common.errors import ConfigurationError
from baton.common.flags import plugins
from engine.config import EngineConfig
from engine.runtime.draws.logits_processors import (
    LogitsProcessor,
    ProcessorContext,
    load_processors,
    make_processors,
)
from tests.support.logits_processors import CountPenalty, Faulty, Steer

MODULE = "tests.support.logits_processors"


@pytest.fixture
def _installed(monkeypatch):
    values = {
        "steer": f"{MODULE}:Steer",
        "count": f"{MODULE}:CountPenalty",
        "absent": "no_such_module:X",
        "wrong": "engine.config:EngineConfig",
    }
    points = [EntryPoint(name, value, "baton.logits_processors") for name, value in values.items()]

    def fake_entry_points(*, group, name=None):
        return [each for each in points if group == each.group and name in (None, each.name)]

    monkeypatch.setattr(plugins, "entry_points", fake_entry_points)


@pytest.mark.usefixtures("_installed")
def test_processors_are_found_by_entry_point_and_by_class_in_the_given_order():
    assert load_processors(()) == ()
    assert load_processors(("count", f"{MODULE}:Faulty", "steer")) == (CountPenalty, Faulty, Steer)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("other",), "unknown name 'other'; installed are absent, count, steer, wrong;"),
        (("absent",), "'absent' cannot be imported: .*no_such_module"),
        (("no_such_module:X",), "'no_such_module:X' cannot be imported"),
        ((f"{MODULE}:Missing",), "cannot be imported: .*Missing"),
        (("wrong",), "'wrong' is no LogitsProcessor class"),
        ((f"{MODULE}:FAULTS",), "is no LogitsProcessor class"),
        (("steer", "steer"), "names 'steer' twice"),
    ],
)
def test_a_bad_name_is_an_error_that_names_the_flag(names, message):
    with pytest.raises(ConfigurationError, match=f"--logits-processors.*{message}"):
        load_processors(names)


def test_none_are_installed_with_baton():
    with pytest.raises(ConfigurationError, match="installed are none; or give one as module:Class"):
        load_processors(("steer",))


class _Broken(Steer):
    def __init__(self, context: ProcessorContext) -> None:
        raise RuntimeError(f"no room for {context.vocab_size} tokens")


class _Abstract(LogitsProcessor):
    """Lacks its methods."""


def test_a_processor_that_cannot_be_created_is_an_error():
    context = ProcessorContext(9, torch.device("cpu"), max_rows=2, max_model_len=16)
    (made,) = make_processors((Steer,), context)
    assert made.context is context
    for cls, message in ((_Broken, "no room for 9 tokens"), (_Abstract, "abstract")):
        with pytest.raises(ConfigurationError, match=f"{cls.__name__} cannot.*{message}"):
            make_processors((cls,), context)


def test_the_flag_separates_names_by_commas_and_python_may_give_a_list():
    for given in ("a, b:C,", ["a", "b:C"], ("a", "b:C")):
        assert EngineConfig(model="m", logits_processors=given).logits_processors == ("a", "b:C")
    assert EngineConfig(model="m").logits_processors == ()
