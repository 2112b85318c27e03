"""The part of the build that hatchling cannot know: compiles the CPU kernels, and puts the protos
beside the stubs that are generated from them, where compilers for other languages find them by
`-I SITE_PACKAGES baton/v1/generation.proto`; and the line by which Python finds Baton's packages
besides `baton` (see `baton.common.own_packages`).

Runs at `pip install .`, `pip install -e .` and `pip wheel .`. The libraries go into
the wheel; an editable install finds them in the source tree. Without a compiler the
wheel is pure and the kernels fall back to torch: slower, and `baton doctor` says so. With one, the
wheel is for any Python 3, as ctypes loads the libraries, and for the systems that have the symbols
which they need (`kernels.library.platform_tag`).
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PATH_LINE = "baton_llm.pth"
_ANY = "py3-none-"


class NativeKernelsHook(BuildHookInterface):
    """Named by `[tool.hatch.build.targets.wheel.hooks.custom]` in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and enters what came of it into the wheel.

        Args:
            version: "editable" or "standard".
            build_data: hatchling's; tells it what else the wheel holds, and its tag.
        """
        root = Path(self.root)
        build, variants, platform_tag = _import_build_modules(root)
        compiler, built, records = build.find_compiler(), [], []
        for libraries in variants.library_sets(root):
            outcomes = build.build(
                libraries.source_folder,
                libraries.library_folder,
                compiler=compiler,
                variants=libraries.variants,
                report=partial(self._tell_outcome, libraries.name),
            )
            folder, names = libraries.library_folder, [outcome.variant for outcome in outcomes]
            existing = [p for name in names if (p := variants.library_path(name, folder)).exists()]
            if not existing:
                self._warn(libraries.name, libraries.without, variants.BUILD_COMMAND)
            built += existing
            records += [variants.record_path(name, folder) for name in names]
        if version == "editable":
            return
        for path in (*built, *records, root / _PATH_LINE):
            build_data["force_include"][str(path)] = path.relative_to(root).as_posix()
        protos = root / "protos"
        for path in protos.rglob("*.proto"):
            build_data["force_include"][str(path)] = path.relative_to(protos).as_posix()
        if built:
            build_data["pure_python"] = False
            platform = platform_tag.platform_tag(built)
            build_data |= {"infer_tag": True} if platform is None else {"tag": _ANY + platform}

    def _warn(self, name: str, consequence: str, command: str) -> None:
        self.app.display_warning(
            f"No native {name}: {consequence}. Install a C++20 compiler and install again, or run "
            f"`{command}`."
        )

    def _tell_outcome(self, name: str, outcome: Any) -> None:
        line = f"{name}, {outcome.variant}: {outcome.status.value}"
        if outcome.problem:
            self.app.display_warning(
                "\n".join([f"{line}: {outcome.problem}", outcome.output]).rstrip()
            )
        else:
            self.app.display_info(line)


def _import_build_modules(root: Path) -> list[Any]:
    """Three modules of `kernels.library`, from that folder, which is looked at first."""
    folder = str(root / "kernels")
    sys.path.insert(0, folder)
    try:
        names = ("build", "variants", "platform_tag")
        return [importlib.import_module(f"library.{name}") for name in names]
    finally:
        sys.path.remove(folder)
