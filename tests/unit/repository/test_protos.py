"""The protos, as generators of other languages than Python read them."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from baton.v1 import generation_pb2

PROTOS = Path(__file__).parents[3] / "protos" / "baton" / "v1"
NAMES = sorted(path.stem for path in PROTOS.glob("*.proto"))
OPTIONS = {
    "csharp_namespace": "Baton.V1",
    "go_package": "baton/v1;batonv1",
    "java_multiple_files": True,
    "java_package": "com.baton.v1",
    "objc_class_prefix": "BXX",
    "php_metadata_namespace": r"Baton\V1\GPBMetadata",
    "php_namespace": r"Baton\V1",
    "ruby_package": "Baton::V1",
}
RESERVED = frozenset(
    [
        "class",
        "default",
        "delete",
        "export",
        "function",
        "import",
        "in",
        "namespace",
        "new",
        "operator",
        "package",
        "private",
        "public",
        "register",
        "switch",
        "template",
        "this",
        "typename",
        "union",
        "using",
        "virtual",
    ]
)
"""Words of C++, JavaScript or PHP that a message for clients might use."""


@pytest.mark.parametrize("name", NAMES)
def test_each_file_has_the_options_of_every_language(name):
    options = import_module(f"baton.v1.{name}_pb2").DESCRIPTOR.GetOptions()
    assert {option: getattr(options, option) for option in OPTIONS} == OPTIONS
    assert options.java_outer_classname == name.title().replace("_", "") + "Proto"


def test_no_field_that_clients_read_or_write_is_a_reserved_word():
    messages = list(generation_pb2.DESCRIPTOR.message_types_by_name.values())
    messages += [
        field.message_type for message in messages for field in message.fields if field.message_type
    ]
    fields = {field.name for message in messages for field in message.fields}
    assert not fields & RESERVED


@pytest.mark.skipif(shutil.which("protoc-gen-go") is None, reason="protoc-gen-go is not installed")
def test_stubs_of_go_are_generated_without_a_flag(tmp_path):
    """Its generator is the one that refuses files without an option."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS.parents[1]}"]
    files = [f"baton/v1/{name}.proto" for name in NAMES]
    result = subprocess.run(
        [*command, f"--go_out={tmp_path}", *files],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "baton" / "v1").glob("*.pb.go"))) == len(NAMES)
