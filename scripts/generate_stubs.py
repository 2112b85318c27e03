"""Generates `baton/v1/*_pb2*.py*` from `protos/`. With --check it only compares them."""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "baton" / "v1"


def generate(target: Path) -> None:
    """Writes the stubs of every proto file under `target`/baton/v1."""
    well_known_types = Path(grpc_tools.__file__).parent / "_proto"
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known_types}"]
    # The plugins lie beside the interpreter, whose folder may not be on PATH.
    arguments += [
        f"--plugin={plugin}={Path(sys.executable).with_name(plugin)}"
        for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    arguments += [f"--{output}_out={target}" for output in outputs]
    arguments += [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")


def main() -> None:
    """Runs `make proto`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is out of date"
    )
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path for path in (Path(folder) / "baton" / "v1").iterdir()}
        checked_in = {path.name: path for path in STUBS.glob("*_pb2*")}
        stale = [
            name
            for name in sorted(fresh.keys() | checked_in.keys())
            if name not in fresh
            or name not in checked_in
            or not filecmp.cmp(fresh[name], checked_in[name], shallow=False)
        ]
        if check:
            if stale:
                sys.exit(f"stubs are out of date, run `make proto`: {', '.join(stale)}")
            return
        for name in checked_in.keys() - fresh.keys():
            checked_in[name].unlink()
        for name, path in fresh.items():
            shutil.copyfile(path, STUBS / name)


if __name__ == "__main__":
    main()
