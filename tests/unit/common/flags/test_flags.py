"""Flags of config dataclasses, from the command line, the environment and a file."""

import argparse
import json
from dataclasses import MISSING, dataclass

import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args, flag, flags_of_config
from baton.common.flags.parser import FlagParser
from baton.common.flags.sources import variable_of, without_flag_variables
from baton.common.flags.values import byte_size, count


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    name: str = flag(MISSING, "its name", is_positional=True)
    max_num_cooks: int = flag(4, "cooks at once", is_main=True)
    oven_bytes: int | None = flag(None, "oven, 100% of it", parse=byte_size)
    step_tokens: int = flag(16, "tokens", parse=count, aliases={"tokens": None})
    heat: float = flag(0.5, "heat")
    is_open: bool = flag(False, "whether guests come")
    mode: str = flag("auto", "mode", choices=("auto", "slow"))
    orders: tuple[str, ...] = flag((), "orders")
    days: tuple[str, ...] = flag(("monday",), "days")
    names: tuple[str, ...] = flag((), "further names", is_list=True)
    sign: str | None = flag(None, "sign")
    recipe: str | None = flag(None, "recipe", metavar="JSON")
    secret: int = 7

    def __post_init__(self):
        if self.max_num_cooks < 1:
            raise ConfigurationError(f"--max-num-cooks is {self.max_num_cooks}; it must be >= 1")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    port: int = flag(1, "port", name="endpoint-port")


def make_parser():
    parser = FlagParser(prog="cook")

    def add_args(parser):
        """Cooks."""
        parser.add_argument("--rate", type=float, required=True)
        parser.add_argument("--demo", action="store_true")
        parser.add_argument("--tag", action="append")
        parser.add_argument("--sizes", type=int, nargs="+", default=[1])
        add_flags(parser, Kitchen, "kitchen", omit=("secret",))
        add_flags(parser, Endpoint, "endpoint", defaults={"port": 5})

    parser.fill(add_args, add_args)
    return parser


def parse(*arguments):
    return make_parser().parse_args(["--rate", "1", *arguments])


def kitchen(*arguments):
    return config_from_args(Kitchen, parse("k", *arguments))


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        parse("k", *arguments)
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("cook: error: ")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text):
        (tmp_path / "cook.yaml").write_text(text)
        return ("--config", "cook.yaml")

    return write_file


def test_no_flags_give_the_defaults():
    assert kitchen() == Kitchen(name="k")
    assert config_from_args(Endpoint, parse("k")).port == 5
    assert config_from_args(Endpoint, parse("k"), port=6).port == 6


def test_flags_are_the_inverse_of_parsing():
    config = Kitchen(
        name="k",
        max_num_cooks=2,
        oven_bytes=2**20 + 1,
        step_tokens=4000,
        heat=0.25,
        is_open=True,
        mode="slow",
        orders=("a", "b"),
        names=("c,d", "e"),
        sign="--closed",
    )
    flags = flags_of_config(config)
    assert config_from_args(Kitchen, parse(*flags)) == config
    assert flags_of_config(Kitchen(name="k")) == ["--name", "k"]
    assert flags_of_config(config, omit=("name",)) == flags[2:]


def test_names_may_have_underscores_and_lists_commas_or_repetitions():
    config = kitchen("--max_num_cooks=3", "--step_tokens", "4k", "--orders=a_b, c", "--orders", "d")
    assert (config.max_num_cooks, config.step_tokens) == (3, 4000)
    assert config.orders == ("a_b", "c", "d")
    assert kitchen("--names", "a", "b", "--sign", "_x").names == ("a", "b")
    assert kitchen("--days", "friday").days == ("friday",)
    assert kitchen("--orders", '["a,b", "c"]').orders == ("a,b", "c")
    assert kitchen("--orders", "[::1]:5,7", "--orders", "8").orders == ("[::1]:5", "7", "8")


def test_aliases_work_and_the_help_leaves_them_out(capsys):
    assert kitchen("--tokens", "3").step_tokens == 3
    make_parser().print_all_help()
    page = capsys.readouterr().out
    assert "--tokens" not in page
    assert "oven, 100% of it" in page
    assert "tokens (default: 16)" in page


def test_the_short_help_has_main_flags_and_hand_written_ones():
    page = make_parser().format_help()
    assert all(
        name in page for name in ("--max-num-cooks", "NAME", "--rate", "--config", "--help[=all]")
    )
    assert "--heat" not in page
    assert "cook --help=all" in page


def test_optional_numbers_take_none():
    assert kitchen("--oven-bytes", "none").oven_bytes is None
    assert kitchen("--sign", "none").sign == "none"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(monkeypatch, write):
    monkeypatch.setenv(variable_of("max-num-cooks"), "5")
    monkeypatch.setenv(variable_of("heat"), "0.125")
    monkeypatch.setenv(variable_of("mode"), "")  # empty is unset
    file = write("max_num_cooks: 6\nheat: 1\nstep-tokens: 2k\nmode: slow\nsign: no\nname: y\n")
    config = kitchen("--max-num-cooks", "7", *file)
    assert (config.max_num_cooks, config.heat, config.step_tokens) == (7, 0.125, 2000)
    assert (config.mode, config.sign, config.name) == ("slow", "no", "k")


def test_the_environment_names_the_file(monkeypatch, write):
    write("name: from-file\n")
    monkeypatch.setenv(variable_of("config"), "cook.yaml")
    assert config_from_args(Kitchen, parse()).name == "from-file"


@pytest.mark.parametrize(("text", "is_open"), [("true", True), ("off", False), ("1", True)])
def test_switches_outside_of_the_command_line(monkeypatch, write, text, is_open):
    assert kitchen(*write(f"is-open: {text}\n")).is_open is is_open
    monkeypatch.setenv(variable_of("is-open"), text)
    assert kitchen().is_open is is_open
    assert kitchen("--no-is-open").is_open is False
    monkeypatch.setenv(variable_of("demo"), text)
    assert parse("k").demo is is_open


def test_lists_outside_of_the_command_line(monkeypatch, write):
    file = write("orders: [a, b]\nnames:\n- c\n- d\nsizes: [3, 4]\ntag: [x, y]\n")
    args = parse("k", *file)
    assert config_from_args(Kitchen, args).orders == ("a", "b")
    assert config_from_args(Kitchen, args).names == ("c", "d")
    assert (args.sizes, args.tag) == ([3, 4], ["x", "y"])
    assert kitchen("--orders", "e", *file).orders == ("e",)
    monkeypatch.setenv(variable_of("orders"), "f,g")
    monkeypatch.setenv(variable_of("sizes"), "5,6")
    assert kitchen(*file).orders == ("f", "g")
    assert parse("k").sizes == [5, 6]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{method: ngram, num: 3}", {"method": "ngram", "num": 3}),
        ("\n  method: 'on'\n  a: [1, {b: null}]", {"method": "on", "a": [1, {"b": None}]}),
        ("{a: 1.5, b: 1e-3, c: true, d: off, e: ~, f: '2', g: 2026-01-02}",
         {"a": 1.5, "b": 0.001, "c": True, "d": False, "e": None, "f": "2", "g": "2026-01-02"}),
        ("[{a: 1}]", [{"a": 1}]),
        ("'{\"a\": 1}'", {"a": 1}),
    ],
)  # fmt: skip
def test_a_file_has_json_as_a_mapping(write, text, value):
    assert json.loads(kitchen(*write(f"recipe: {text}\n")).recipe) == value


def test_a_required_flag_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(variable_of("rate"), "2.5")
    assert make_parser().parse_args(["k"]).rate == 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heat: hot\n", "--heat (from cook.yaml:1): invalid float value: 'hot'"),
        ("\nmode: fast\n", "--mode (from cook.yaml:2): invalid choice: 'fast'"),
        ("heet: 1\n", "cook.yaml:1: unknown flag heet; did you mean heat?"),
        ("config: x\n", "cook.yaml:1: unknown flag config; "),
        ("hedge_prefill_after_s: 1\n", "unknown flag hedge-prefill-after-s; it was removed"),
        ("heat: 1\nheat: 2\n", "cook.yaml:2: heat is set twice"),
        ("step-tokens: 1\nstep_tokens: 2\n", "cook.yaml:2: step-tokens is set twice"),
        ("heat: [1, 2]\n", "--heat (from cook.yaml:1): takes one value, not a list"),
        ("heat: {a: 1}\n", "--heat (from cook.yaml:1): must be a value or a list of values"),
        ("names: [[a]]\n", "--names (from cook.yaml:1): must be a value or a list of values"),
        ("is-open: {a: 1}\n", "(from cook.yaml:1): '{\"a\": 1}' is not on or off"),
        ("recipe: {a: {b: 1, b: 2}}\n", "cook.yaml:1: recipe.a.b is set twice"),
        ("recipe: {[a]: 1}\n", "cook.yaml:1: recipe has a key that is no text"),
        ("recipe: &r {a: *r}\n", "is nested too deeply"),
        ("is-open: maybe\n", "(from cook.yaml:1): 'maybe' is not on or off"),
        ("- heat\n", "cook.yaml:1: must be a mapping of flags to values, such as max-num-seqs: 64"),
        ("heat: [\n", "cook.yaml:2: "),
    ],
)
def test_a_bad_file_names_the_line(capsys, write, text, message):
    assert message in error_of(capsys, *write(text))


def test_a_missing_file_is_named(capsys):
    line = error_of(capsys, "--config", "/nonexistent/cook.yaml")
    assert line == "cannot read /nonexistent/cook.yaml: No such file or directory"


def test_empty_files_and_values_set_nothing(write):
    assert kitchen(*write("")) == kitchen(*write("heat:\n")) == Kitchen(name="k")


def test_bad_variables_are_named(capsys, monkeypatch):
    monkeypatch.setenv(variable_of("heat"), "hot")
    origin = variable_of("heat")
    assert error_of(capsys) == f"--heat (from {origin}): invalid float value: 'hot'"
    monkeypatch.delenv(variable_of("heat"))
    monkeypatch.setenv(variable_of("max-num-cooks"), "0")
    with pytest.raises(
        ConfigurationError, match=rf"--max-num-cooks is 0.*\(from {variable_of('max-num-cooks')}\)"
    ):
        kitchen()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-cook", "1"], "unknown flag --max-num-cook; did you mean --max-num-cooks?"),
        (["--heat"], "--heat: expected one argument"),
        (["--zzz=1"], "unknown flag --zzz; see cook --help=all"),
        (["--hedge-prefill-after-s=1"], "unknown flag --hedge-prefill-after-s; it was removed"),
        (["--oven-bytes", "big"], "--oven-bytes: 'big' is not a byte size"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_usage_errors_are_one_line(capsys, arguments, message):
    assert message in error_of(capsys, *arguments)


def test_arguments_after_two_dashes_are_positional():
    parser = FlagParser()
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--not_a_flag"]).words == ["--not_a_flag"]


def test_missing_values_are_named_together():
    with pytest.raises(ConfigurationError, match=r"^--name is missing$"):
        config_from_args(Kitchen, parse())
    with pytest.raises(ConfigurationError, match=r"^--name is missing$"):
        config_from_args(Kitchen, argparse.Namespace())


def test_child_processes_get_no_variables_of_flags():
    kept = {"PATH": "/bin", "BATON_CPU_KERNELS": "torch"}
    assert without_flag_variables({**kept, variable_of("endpoint-port"): "1"}) == kept


def test_the_process_own_arguments_are_parsed_alike(monkeypatch):
    monkeypatch.setattr("sys.argv", ["cook", "k", "--max_num_cooks", "2"])
    monkeypatch.setenv(variable_of("rate"), "3")
    args = make_parser().parse_args()
    assert (args.rate, args.max_num_cooks) == (3, 2)


def test_the_variable_of_a_kubernetes_service_is_no_flag(monkeypatch):
    monkeypatch.setenv(variable_of("endpoint-port"), "tcp://10.0.0.1:8000")
    assert config_from_args(Endpoint, parse("k")).port == 5


def test_variables_have_no_aliases_but_files_do(monkeypatch, write):
    monkeypatch.setenv(variable_of("tokens"), "3")
    assert kitchen().step_tokens == 16
    assert kitchen(*write("tokens: 4\n")).step_tokens == 4
