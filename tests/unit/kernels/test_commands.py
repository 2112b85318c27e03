"""The commands of the native library have the layouts that commands.h states."""

import re
from pathlib import Path

import pytest

import kernels
from kernels.library import commands

HEADER = (Path(kernels.__file__).parent / "native" / "src" / "commands.h").read_text()
CODES = {
    name: int(code)
    for name, code in re.findall(r"k(\w+) = (\d+),", HEADER.partition("enum class Code")[2])
}


def fields_of(struct: str) -> list[tuple[str, str]]:
    """The types and names of a C++ struct's fields."""
    body = re.search(rf"^struct {struct} {{\n(.*?)^}};", HEADER, re.MULTILINE | re.DOTALL)
    assert body is not None
    return re.findall(r"^  (.+?) ?(\w+);", body[1], re.MULTILINE)


@pytest.mark.parametrize("name", sorted(CODES))
def test_a_command_has_the_fields_of_its_struct(name: str):
    constant = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
    command, kinds = getattr(commands, constant), [kind for kind, _ in fields_of(name)]
    assert command.code == CODES[name]
    letters = "".join("d" if kind == "double" else "q" for kind in kinds)
    assert re.fullmatch(rf"=q{letters}\d+x", command.layout.format)
    for index in command.pointers:
        assert kinds[index - 1].endswith("*"), f"field {index}"
    for index in command.outputs:
        assert not kinds[index - 1].startswith("const "), f"field {index}"


def test_draws_have_the_columns_of_a_draw_table():
    names = [f"{name}s" for name in kernels.DRAW_RECORD.names]
    kinds = [
        "const double*" if kind == "f" else "const int64_t*"
        for kind in (kernels.DRAW_RECORD[name].kind for name in kernels.DRAW_RECORD.names)
    ]
    declared = fields_of("DrawTokens")
    first = declared.index(("const double*", "temperatures"))
    assert declared[first : first + len(names)] == list(zip(kinds, names, strict=True))
    assert declared[first + len(names)][1] == "draw_ids"
