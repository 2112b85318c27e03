"""Contracts that import-linter does not come with: `make lint` checks them (pyproject.toml)."""

from collections.abc import Iterator

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

__all__ = ["NoCircles", "NoCirclesOfFolders", "PureByDefault"]


class NoCircles(Contract):
    """No module imports itself through others."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Finds one circle through each module that lies on one."""
        circles = {
            frozenset(chain): chain
            for module in sorted(graph.modules)
            if not graph.is_module_squashed(module)
            for imported in graph.find_modules_directly_imported_by(module) - {module}
            if (chain := graph.find_shortest_chain(imported, module, as_packages=False))
        }
        return ContractCheck(kept=not circles, metadata={"chains": list(circles.values())})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints each circle."""
        _print_chains(check)


class NoCirclesOfFolders(Contract):
    """No folder or file depends on itself through others of the same folder.

    Two folders whose modules import each other are one folder in truth, even if no module
    imports itself.
    """

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Finds one circle through each child of a folder that lies on one."""
        circles = {
            frozenset(circle): circle
            for folder in sorted(graph.modules)
            if not graph.is_module_squashed(folder)
            for circle in _circles_in(graph, folder)
        }
        return ContractCheck(kept=not circles, metadata={"chains": list(circles.values())})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints each circle."""
        _print_chains(check)


class PureByDefault(Contract):
    """Every module of some packages is pure, except those that the contract names.

    A file that is added to a package is therefore checked without any entry here.

    Attributes:
        packages: top-level packages whose modules are checked.
        exceptions: modules and packages in them that may import what is forbidden.
        forbidden: packages that a pure module must not import, directly or through others.
    """

    packages = fields.ListField(subfield=fields.StringField())
    exceptions = fields.ListField(subfield=fields.StringField())
    forbidden = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Finds how pure modules reach what is forbidden, and exceptions that need not be one."""
        chains = [
            chain for module in self._pure_modules(graph) for chain in self._chains(graph, module)
        ]
        unneeded = [
            name
            for name in self.exceptions
            if name not in graph.modules
            or not any(
                any(self._chains(graph, module)) for module in graph.modules if _is_in(module, name)
            )
        ]
        return ContractCheck(
            kept=not chains and not unneeded, metadata={"chains": chains, "unneeded": unneeded}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints how each impure module reaches what is forbidden."""
        _print_chains(check)
        for name in check.metadata["unneeded"]:
            output.print_error(f"{name} does not exist, or is pure: remove it from the exceptions")

    def _pure_modules(self, graph: ImportGraph) -> list[str]:
        return sorted(
            module
            for module in graph.modules
            if module.partition(".")[0] in self.packages
            and not any(_is_in(module, name) for name in self.exceptions)
        )

    def _chains(self, graph: ImportGraph, module: str) -> Iterator[tuple[str, ...]]:
        for name in self.forbidden:
            if name in graph.modules and (
                chain := graph.find_shortest_chain(module, name, as_packages=False)
            ):
                yield chain


def _circles_in(graph: ImportGraph, folder: str) -> Iterator[tuple[str, ...]]:
    child_of = {
        module: child
        for child in graph.find_children(folder)
        for module in (child, *graph.find_descendants(child))
    }
    imported_by: dict[str, set[str]] = {child: set() for child in child_of.values()}
    for module, child in child_of.items():
        targets = graph.find_modules_directly_imported_by(module)
        imported_by[child] |= {child_of[name] for name in targets & child_of.keys()} - {child}
    for child in sorted(imported_by):
        if chain := _shortest_way_back(imported_by, child):
            yield chain


def _shortest_way_back(edges: dict[str, set[str]], start: str) -> tuple[str, ...]:
    """Returns the nodes of the shortest circle through `start`, or nothing (breadth first)."""
    chains, seen = [(start,)], set[str]()
    for chain in chains:
        for name in sorted(edges[chain[-1]] - seen):
            if name == start:
                return (*chain, start)
            seen.add(name)
            chains.append((*chain, name))
    return ()


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _print_chains(check: ContractCheck) -> None:
    for chain in check.metadata["chains"]:
        output.print_error(" -> ".join(chain))
