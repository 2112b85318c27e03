"""The part of the build that hatchling cannot know: compiles the CPU kernels, and puts the protos
beside the stubs that are generated from them, where compilers for other languages find them by
`-I SITE_PACKAGES baton/v1/generation.proto`.

Runs at `pip install .`, `pip install -e .` and `pip wheel .`. The libraries go into
the wheel; an editable install finds them in the source tree. Without a compiler the
wheel is pure and the kernels fall back to torch: slower, and `baton doctor` says so.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernelsHook(BuildHookInterface):
    """Named by `[tool.hatch.build.targets.wheel.hooks.custom]` in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and enters what came of it into the wheel.

        Args:
            version: "editable" or "standard".
            build_data: hatchling's; tells it what else the wheel holds, and its tag.
        """
        root = Path(self.root)
        build, variants = _import_build_modules(root)
        wanted = variants.variants_for()
        outcomes = build.build(
            compiler=build.find_compiler(), variants=wanted, report=self._tell_outcome
        )
        libraries = [variants.library_path(outcome.variant) for outcome in outcomes]
        built = [library for library in libraries if library.exists()]
        if not built:
            self.app.display_warning(
                "No native CPU kernels: inference on the CPU will run on torch, which is slower. "
                "Install a C++20 compiler and install again, or run "
                "`python -m kernels.library.build`."
            )
        if version == "editable":
            return
        records = [variants.record_path(variant.name) for variant in wanted]
        for path in (*built, *records):
            build_data["force_include"][str(path)] = path.relative_to(root).as_posix()
        protos = root / "protos"
        for path in protos.rglob("*.proto"):
            build_data["force_include"][str(path)] = path.relative_to(protos).as_posix()
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def _tell_outcome(self, outcome: Any) -> None:
        line = f"CPU kernels, {outcome.variant}: {outcome.status.value}"
        if outcome.problem:
            self.app.display_warning(
                "\n".join([f"{line}: {outcome.problem}", outcome.output]).rstrip()
            )
        else:
            self.app.display_info(line)


def _import_build_modules(root: Path) -> tuple[Any, Any]:
    """`kernels.library.build` and `.variants`, from that folder, which is looked at first."""
    folder = str(root / "kernels")
    sys.path.insert(0, folder)
    try:
        return (
            importlib.import_module("library.build"),
            importlib.import_module("library.variants"),
        )
    finally:
        sys.path.remove(folder)
