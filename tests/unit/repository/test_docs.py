"""The documentation agrees with the repository: paths, links, make targets, variables."""

import re
import subprocess
from pathlib import Path

import pytest

from baton.common.flags.parser import FlagParser
from router.config.http import HttpConfig
from router.config.router import add_args, router_config_from_args
from router.config.tenants import TenantsConfig
from router.http.app import build_app
from router.tenants.tenants import Tenants
from scripts import environment_variables, generate_configuration

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
VARIABLE = re.compile(r"\bBATON_[A-Z][A-Z0-9_]*\b")
MAX_LINE_CHARS = 120
# Flags of programs that the pages name without their command.
FLAGS_OF_OTHERS = {
    "docker": {"--build-arg", "--env-file", "--pids-limit", "--profile", "--scale", "--shm-size"},
    "redis-server": {
        "--cluster-require-full-coverage",
        "--maxmemory",
        "--maxmemory-policy",
        "--maxmemory-samples",
    },
    "buf": {"--header", "--reflect-header"},
    "torchrun": {"--max-restarts"},
    "ray": {"--num-cpus"},
    "vllm": {
        *("--kv-transfer-config", "--kv-events-config"),
        *("--scheduling-policy", "--structured-outputs-config"),
    },
}


def source_files():
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    suffixes = {".py", ".sh", ".yml", ".cpp", ".h"}
    for name in listed:
        path = ROOT / name
        is_source = path.suffix in suffixes or path.name in ("Makefile", "Dockerfile")
        if is_source and path.is_file() and path != Path(__file__):
            yield path


def test_every_environment_variable_is_documented():
    used = {name for path in source_files() for name in VARIABLE.findall(path.read_text())}
    declared = {
        name
        for variable in environment_variables.VARIABLES
        for name in variable.name.split(", ")
        if name.startswith("BATON_")
    }
    assert declared <= used
    compose = generate_configuration.compose_variables()
    assert used <= declared | compose | generate_configuration.flag_variables()


def test_the_names_of_variables_are_up_to_date():
    names = generate_configuration.NAMES.read_text()
    assert names == generate_configuration.render_names(), "make docs"


def test_the_table_of_the_compose_page_has_each_variable_of_the_files_with_its_default():
    table = (ROOT / "docs" / "compose.md").read_text().split("## Variables", 1)[1].split("\n## ")[0]
    described = {}
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names, defaults = re.findall(r"`(\w+)`", cells[0]), cells[1].replace("`", "").split(", ")
        described |= dict(zip(names, defaults * (len(names) // len(defaults)), strict=True))
    assert described.keys() == generate_configuration.compose_variables()
    compose = (ROOT / "docker-compose.yml").read_text()
    stated = dict(re.findall(r"\$\{(\w+):-(\w[\w.]*|\./[\w/]+)\}", compose))
    assert len(stated) > 10
    for name, default in stated.items():
        assert described[name] == {"0": "no limit"}.get(default, default), name


def test_the_files_of_variables_set_what_the_compose_files_read():
    files = sorted((ROOT / "deploy" / "compose").glob("*.env"))
    assert len(files) >= 3
    lines = [line for file in files for line in file.read_text().splitlines() if "=" in line]
    names = {line.partition("=")[0] for line in lines if not line.startswith("#")}
    assert names <= generate_configuration.compose_variables()


def test_the_configuration_page_is_up_to_date():
    assert generate_configuration.PAGE.read_text() == generate_configuration.render(), "make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        link
        for link in links
        if not link.startswith(("http://", "https://")) and not (page.parent / link).exists()
    ]
    assert missing == []


def test_every_row_of_where_to_add_things_names_a_path():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Where to add things", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 11
    assert all(re.search(r"`\w[\w.]*/[\w./]*`", row) for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_a_page_exists(page):
    paths = [Path(path) for path in re.findall(r"`(\w[\w.-]*/[\w./-]*)`", page.read_text())]
    ours = [path for path in paths if (ROOT / path.parts[0]).is_dir()]
    assert [path for path in ours if not (ROOT / path).exists()] == []


def test_every_flag_of_the_pages_exists():
    known = set().union(*FLAGS_OF_OTHERS.values()) | {
        flag
        for _, parser in generate_configuration.command_parsers()
        for action in parser._actions  # argparse has no public list of them
        for flag in action.option_strings
    }
    for page in PAGES:
        if page.parent.name == "adr":
            continue  # decisions name flags that are gone, too
        spans = re.findall(r"`((?:baton |--)[^`\n]+)`", page.read_text())
        flags = {
            flag
            for span in spans
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", span)
        }
        assert flags <= known, f"{page.name}: {flags - known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_text_are_short(page):
    """A change of a word is then a change of a line. The page of flags is generated."""
    if page == generate_configuration.PAGE:
        return
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > MAX_LINE_CHARS] == []


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
        assert named
        assert set(named) <= targets


def test_every_http_endpoint_is_documented():
    page = (ROOT / "docs" / "http.md").read_text()
    paths = build_app((), HttpConfig(), Tenants(TenantsConfig())).openapi()["paths"]
    assert len(paths) >= 13
    assert [path for path in paths if path.replace("{model_id}", "NAME") not in page] == []


def test_the_models_of_the_http_page_are_a_valid_file(tmp_path):
    text = (ROOT / "docs" / "http.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "models.yaml").write_text(text)
    parser = FlagParser(prog="baton router")
    add_args(parser)
    config = router_config_from_args(parser.parse_args(["--models", str(tmp_path / "models.yaml")]))
    assert [model.names for model in config.models] == [("qwen3", "chat"), ("llama-3.2-1b",)]
