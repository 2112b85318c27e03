"""Values of flags from the environment and from a YAML file, as texts.

A flag `--max-num-seqs` is the environment variable `BATON_<FLAG>`, with capitals and underscores,
and the key `max-num-seqs` of the file, with dashes or underscores.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Given",
    "read_environment",
    "read_file",
    "read_list",
    "variable_of",
    "without_flag_variables",
]

_PREFIX = "BATON_"
_NULL = "tag:yaml.org,2002:null"
_MAX_DEPTH = 20
_KUBERNETES_PORT = re.compile(r"(?:tcp|udp|sctp)://")
"""How the value begins that Kubernetes gives to the variable of a service's port, such as that of
`--port` for a service named baton."""
_OTHER_VARIABLES = frozenset(
    {
        "BATON_COMMIT",
        "BATON_CPU_KERNELS",
        "BATON_TEST_DEVICE",
        "BATON_TEST_RESULTS",
    }
)
"""Variables that are not values of flags."""


@dataclass(frozen=True, slots=True)
class Given:
    """A flag's value outside of the command line.

    Attributes:
        texts: what a command line would have; a list in the file has several.
        origin: the environment variable, or the file and the line.
        is_json: whether the text is a mapping of the file, or a list of lists or mappings, as JSON.
    """

    texts: tuple[str, ...]
    origin: str
    is_json: bool = False


def variable_of(name: str) -> str:
    """Returns the environment variable of the flag `--name`."""
    return _PREFIX + name.replace("-", "_").upper()


def read_environment(name: str, environment: Mapping[str, str] = os.environ) -> Given | None:
    """Returns the value of the flag `--name`; None if it is unset, empty, or of Kubernetes."""
    text = environment.get(variable_of(name), "")
    is_unset = not text or _KUBERNETES_PORT.match(text)
    return None if is_unset else Given((text,), variable_of(name))


def without_flag_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without variables of flags.

    A process that Baton starts gets all of its flags on its command line; a variable that was
    meant for the parent, such as its port, must not set what that line leaves at the default.
    """
    return {
        name: text
        for name, text in environment.items()
        if not name.startswith(_PREFIX) or name in _OTHER_VARIABLES
    }


def read_file(path: str) -> dict[str, Given]:
    """Reads a YAML file of flags.

    Values are taken as they are written: `4k`, `no` and `1e9` stay texts, which the flags' parsers
    read. A mapping becomes the JSON that a flag such as `--speculative-config` takes. A key without
    a value is left out.

    Returns:
        by flag, without dashes in front.

    Raises:
        ValueError: the file cannot be read, is not a YAML mapping, or has a key twice; names the
            file and the line.
    """
    root = _compose(path)
    return {} if root is None else _read_mapping(path, root)


def read_list(path: str) -> list[dict[str, Given]]:
    """Reads a YAML file with a list of mappings of flags, each as `read_file` reads one.

    Raises:
        ValueError: as `read_file`; the file has no list.
    """
    root = _compose(path)
    if root is None or root.id != "sequence" or not root.value:
        raise ValueError(f"{path}: must be a list of mappings of flags to values")
    return [_read_mapping(path, entry) for entry in root.value]


def _compose(path: str) -> Any:
    """Returns the root node of a YAML file; None if the file is empty."""
    import yaml  # 40 ms, which most commands do not need

    # The one in C, which is many times faster, is not in every build of the library.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ValueError(f"{where}: {getattr(error, 'problem', error)}") from None


def _read_mapping(path: str, root: Any) -> dict[str, Given]:
    if root.id != "mapping":
        line = root.start_mark.line + 1
        raise ValueError(
            f"{path}:{line}: must be a mapping of flags to values, such as max-num-seqs: 64"
        )
    values: dict[str, Given] = {}
    seen: set[str] = set()
    for key, value in root.value:
        origin = f"{path}:{key.start_mark.line + 1}"
        name = str(key.value).replace("_", "-")
        if name in seen:
            raise ValueError(f"{origin}: {name} is set twice")
        seen.add(name)
        if value.tag != _NULL:
            values[name] = _given(value, origin, name)
    return values


def _given(node: Any, origin: str, name: str) -> Given:
    if isinstance(node.value, str):
        return Given((node.value,), origin)
    if node.id == "sequence" and all(isinstance(entry.value, str) for entry in node.value):
        return Given(tuple(entry.value for entry in node.value), origin)
    value = _json_value(node, f"{origin}: {name}")
    return Given((json.dumps(value),), origin, is_json=True)


def _json_value(node: Any, where: str, depth: int = 0) -> Any:
    """Returns a value of the file as JSON has it.

    Raises:
        ValueError: it has a key twice, a key that is no text, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:  # an alias may contain itself
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(node.value, str):
        return _json_scalar(node)
    if node.id == "sequence":
        return [_json_value(entry, where, depth + 1) for entry in node.value]
    values: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise ValueError(f"{where} has a key that is no text")
        if key.value in values:
            raise ValueError(f"{where}.{key.value} is set twice")
        values[key.value] = _json_value(value, f"{where}.{key.value}", depth + 1)
    return values


def _json_scalar(node: Any) -> Any:
    """Returns a number, a text, true, false or null. Dates and the like stay texts."""
    import yaml

    if not node.style:  # not quoted: None, or a text without characters, by the parser in C
        try:
            return json.loads(node.value)  # takes 1e-3, too, which is a text in YAML 1.1
        except ValueError:
            pass
    value = yaml.constructor.SafeConstructor().construct_object(node)
    return value if value is None or isinstance(value, (str, bool, int, float)) else node.value
