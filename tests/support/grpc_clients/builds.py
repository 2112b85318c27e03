"""Builds the client programs of other languages, each once, in `.grpc-clients` of the repository.

A program whose tools are missing is not built: `MissingToolError` names them. As a command, the
module builds all programs that it can, so that no test has to wait for a compiler:

    python -m tests.support.grpc_clients.builds
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["KINDS", "PROTOS", "MissingToolError", "command_of", "go_variables"]

ROOT = Path(__file__).parents[3]
PROTOS = ROOT / "protos"
BUILDS = ROOT / ".grpc-clients"
_SOURCES = Path(__file__).parent
_PROTO_NAMES = ("baton/v1/common.proto", "baton/v1/generation.proto")
# Where Debian has Go packages.
_GO_PATH = Path("/usr/share/gocode")
_GO_PACKAGES = {
    "golang-google-grpc-dev": "src/google.golang.org/grpc",
    # Its version 1.3 takes the messages of today's generators for others.
    "golang-github-golang-protobuf-1-5-dev": "src/github.com/golang/protobuf/proto/registry.go",
}


# Of npm, for the case that no registry answers; its own are up to 15 minutes.
_NPM_TIMEOUT_S = 180
_NPM_BOUNDS = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000")


class MissingToolError(Exception):
    """A program cannot be built here; the message names what is not installed."""


def _require(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise MissingToolError(f"{', '.join(missing)} not installed")


def _run(
    command: list[object],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> None:
    process = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if process.returncode:
        raise RuntimeError(f"{command}:\n{process.stdout}\n{process.stderr}")


def _build_node(folder: Path) -> None:
    try:
        options = ["--no-audit", "--no-fund", "--loglevel=error", *_NPM_BOUNDS]
        _run(["npm", "install", *options], folder, timeout_s=_NPM_TIMEOUT_S)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise MissingToolError(f"the packages of npm could not be installed: {error}") from None
    plugins = f"{folder / 'node_modules/.bin'}:{os.environ['PATH']}"
    _run(["npx", "buf", "generate", PROTOS], folder, {"PATH": plugins})


def go_variables(folder: Path) -> dict[str, str]:
    """The environment of Go commands that take packages from `folder/src` and from Debian, without
    a registry of modules.
    """
    return {"GO111MODULE": "off", "GOPATH": f"{folder}:{_GO_PATH}", "GOFLAGS": ""}


def _build_go(folder: Path) -> None:
    missing = [name for name, path in _GO_PACKAGES.items() if not (_GO_PATH / path).exists()]
    if missing:
        raise MissingToolError(f"{', '.join(missing)} not installed")
    package = "baton.test/client"
    shutil.copytree(_SOURCES / "go", folder / "src" / package)
    mapped = [f"M{name}={package}/batonv1" for name in _PROTO_NAMES]
    outputs = [
        argument
        for plugin in ("go", "go-grpc")
        for argument in (f"--{plugin}_out=src", *(f"--{plugin}_opt={option}" for option in mapped))
    ]
    _run(["protoc", f"-I{PROTOS}", *outputs, *_PROTO_NAMES], folder)
    _run(["go", "build", "-o", folder / "client", package], folder, go_variables(folder))


def _protoc_with(plugin: str, language: str, folder: Path) -> None:
    """Generates messages and services with one of Debian's plug-ins."""
    outputs = [f"--{language}_out=gen", "--grpc_out=gen"]
    (folder / "gen").mkdir(exist_ok=True)
    plugin_path = f"--plugin=protoc-gen-grpc={shutil.which(plugin)}"
    _run(["protoc", f"-I{PROTOS}", plugin_path, *outputs, *_PROTO_NAMES], folder)


def _build_cpp(folder: Path) -> None:
    if not Path("/usr/include/grpcpp/grpcpp.h").exists():
        raise MissingToolError("libgrpc++-dev not installed")
    _protoc_with("grpc_cpp_plugin", "cpp", folder)
    sources = [*sorted((folder / "gen").rglob("*.cc")), folder / "client.cc"]
    libraries = ["-lgrpc++", "-lgpr", "-lprotobuf", "-labsl_synchronization", "-lpthread"]
    compiler = ["c++", "-std=c++17", "-O0", "-Igen", "-o", "client"]
    _run([*compiler, *sources, *libraries], folder)


def _build_ruby(folder: Path) -> None:
    try:
        subprocess.run(["ruby", "-e", "require 'grpc'"], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        raise MissingToolError("ruby-grpc not installed") from None
    _protoc_with("grpc_ruby_plugin", "ruby", folder)


_GO_TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
# By kind: the folder of its sources, its tools, what builds it, and its command there.
_PROGRAMS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], None], list[str]]] = {
    "grpc-js": ("node", ("node", "npm"), _build_node, ["node", "grpc_js.mjs"]),
    "connect-node": ("node", ("node", "npm"), _build_node, ["node", "connect.mjs"]),
    "go": ("go", _GO_TOOLS, _build_go, ["./client"]),
    "cpp": ("cpp", ("c++", "protoc", "grpc_cpp_plugin"), _build_cpp, ["./client"]),
    "ruby": (
        "ruby",
        ("ruby", "protoc", "grpc_ruby_plugin"),
        _build_ruby,
        ["ruby", "-Igen", "client.rb"],
    ),
}
KINDS = tuple(_PROGRAMS)


def command_of(kind: str) -> tuple[list[str], Path]:
    """Builds a program unless it is built already.

    Returns:
        Its command, and the folder to run it in.

    Raises:
        MissingToolError: it cannot be built here.
    """
    name, tools, build, command = _PROGRAMS[kind]
    folder = _built(name, tools, build)
    if isinstance(folder, MissingToolError):
        raise folder
    return command, folder


@cache
def _built(
    name: str, tools: tuple[str, ...], build: Callable[[Path], None]
) -> Path | MissingToolError:
    """The folder of built sources, which are tried once in a process; or why there is none."""
    try:
        _require(*tools)
        return _build_once(name, build)
    except MissingToolError as error:
        return error


def _build_once(name: str, build: Callable[[Path], None]) -> Path:
    folder, digest = BUILDS / name, _digest(name)
    with _locked(BUILDS / f"{name}.lock"):
        stamp = folder / "built"
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(_SOURCES / name, folder)
            build(folder)
            stamp.write_text(digest)
    return folder


def _digest(name: str) -> str:
    """The digest of everything that a program is built from."""
    files = [*(_SOURCES / name).rglob("*"), *PROTOS.rglob("*.proto"), Path(__file__)]
    parts = [path.read_bytes() for path in sorted(files) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time build a program."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Builds all programs that can be built here."""
    for kind in KINDS:
        try:
            command_of(kind)
        except (MissingToolError, RuntimeError) as error:
            sys.stderr.write(f"no client of {kind}: {error}\n")


if __name__ == "__main__":
    main()
