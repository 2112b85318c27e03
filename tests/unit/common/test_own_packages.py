"""Where Baton's packages lie, and that no other package takes their names."""

import tomllib
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from baton.common.own_packages import PACKAGES, add_to_path, check_names, folder_of_packages

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path):
    """The folder of an installation: `site` has `baton`, which has the other packages."""
    folder = tmp_path / "site" / "baton" / "_packages"
    folder.mkdir(parents=True)
    return folder


def test_the_packages_come_before_those_of_others_and_after_a_scripts_folder(installed, tmp_path):
    site = tmp_path / "site"
    path = ["/script", "/usr/lib/python3", str(site), str(installed)]
    add_to_path(path, folder=installed, installed={str(site)})
    assert path[:4] == ["/script", "/usr/lib/python3", str(installed), str(site)]
    add_to_path(path, folder=installed, installed={str(site)})
    assert path.count(str(installed)) == 2


def test_packages_whose_folder_is_not_on_the_path_come_last(installed, tmp_path):
    path = ["/script"]
    add_to_path(path, folder=installed, installed={str(tmp_path / "site")})
    assert path == ["/script", str(installed)]


def test_a_source_tree_comes_before_all_installed_packages(tmp_path):
    tree, user, site = (str(tmp_path / name) for name in ("tree", "user", "site"))
    path = ["/usr/lib/python3", user, site, tree]  # as an editable installation has it
    add_to_path(path, folder=Path(tree), installed={site, user})
    assert path == ["/usr/lib/python3", tree, user, site, tree]
    run_there = [tree, "/usr/lib/python3", site]
    add_to_path(run_there, folder=Path(tree), installed={site})
    assert run_there == [tree, "/usr/lib/python3", site]


def test_another_package_of_the_same_name_is_refused_by_name(installed):
    check_names()
    with pytest.raises(
        ConfigurationError, match=r"'benchmarks' lies in .*, but this process finds"
    ):
        check_names(installed)


def test_a_module_without_a_specification_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kernels", type(pytest)("kernels"))
    with pytest.raises(ConfigurationError, match=r"'kernels' lies in .* finds None"):
        check_names()


def test_the_list_of_packages_is_that_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"]} == {"baton", *PACKAGES}
    assert wheel["sources"] == {name: f"baton/_packages/{name}" for name in PACKAGES}
    assert (ROOT / "baton_llm.pth").read_text().split() == ["baton/_packages"]
    assert all((folder_of_packages() / name / "__init__.py").exists() for name in PACKAGES)
