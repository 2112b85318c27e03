"""JSON objects from users have bounds."""

import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json


def test_more_values_than_bytes_are_refused_before_the_text_is_made():
    with pytest.raises(InvalidArgumentError, match="schema has more than 100 values"):
        compact_json("schema", {"a": [0] * 1000}, 100)
    assert compact_json("schema", {"a": [0] * 40}, 100) == '{"a":[' + ",".join("0" * 40) + "]}"
