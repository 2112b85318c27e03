"""The logits processors that docs/sampling.md shows must work."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from baton import LLM
from baton.common.errors import InvalidArgumentError
from tests.support.checkpoints import tiny_checkpoint

_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
_GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture
def _my_processors(tmp_path, monkeypatch):
    section = _GUIDE.read_text().split("## Logits processors\n")[1]
    (tmp_path / "my_processors.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_processors", None)


@pytest.mark.usefixtures("_my_processors")
def test_the_guides_processors_do_what_they_say():
    names = ["my_processors:Cooldown", "my_processors:NoRepeatNgram"]
    llm = LLM(str(tiny_checkpoint("opt")), logits_processors=names, dtype="float32")

    def tokens_with(extra_args):
        params = {**_GREEDY, "extra_args": extra_args}
        (result,) = llm.generate(["Once upon a time"], params)
        return list(result.token_ids)

    plain = tokens_with(None)
    cooled, bigrams = tokens_with({"cooldown": 8}), tokens_with({"no_repeat_ngram_size": 2})
    for size in (0, -2, 2.0, True):
        with pytest.raises(InvalidArgumentError, match="must be an integer above 1"):
            tokens_with({"no_repeat_ngram_size": size})
    for count in (0, 1000, 8.0, True):
        with pytest.raises(InvalidArgumentError, match="must be an integer from 1 to 999"):
            tokens_with({"cooldown": count})
    llm.close()
    assert _repeats_within(plain, 8)
    assert not _repeats_within(cooled, 8)
    assert _has_pair_twice(plain)
    assert not _has_pair_twice(bigrams)
    assert len(cooled) == len(bigrams) == 48


def _repeats_within(tokens, count):
    return any(token in tokens[max(0, i - count) : i] for i, token in enumerate(tokens))


def _has_pair_twice(tokens):
    pairs = list(pairwise(tokens))
    return len(set(pairs)) < len(pairs)
