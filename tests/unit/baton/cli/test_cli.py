"""The `baton` command: help, version, exit statuses, output."""

import argparse
import io
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import baton
from baton.cli import main
from baton.cli.sampling_args import add_sampling_args, sampling_fields_from_args
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import common_pb2
from tests.support.fake_generation import running_fake_generation

COMMANDS = {
    "serve": ("--port", "--grpc-port", "--prefill-workers", "--demo", "--max-num-seqs"),
    "router": ("--prefill", "--decode", "--model", "--port"),
    "prefill": ("--kv-connector", "--max-num-seqs", "--max-num-batched-tokens", "--port"),
    "decode": ("--kv-connector", "--gpu-memory-utilization", "--max-num-seqs", "--port"),
    "generate": ("--address", "--max-tokens", "--temperature", "--seed", "--stop", "--beam-width"),
    "chat": ("--url", "--model", "--system", "--api-key", "--temperature", "--json-schema"),
    "complete": ("--url", "--model", "--max-tokens", "--top-p"),
    "run-batch": ("--input-file", "--output-file", "--url", "--concurrency", "--model"),
    "collect-env": ("--json",),
    "tune": ("--goodput", "--num-workers", "--workload", "--max-num-seqs"),
    "bench": ("SUBCOMMAND", "serve", "split", "scheduling"),
    "doctor": ("--json", "--kv-connector"),
    "top": ("--address", "--interval", "--once", "--cluster-token-file"),
    "trace": ("REQUEST_ID", "--address", "--limit", "--cluster-token-file"),
    "health": ("HOST:PORT", "--timeout-s"),
    "completion": ("bash", "zsh", "fish"),
}


def test_version_prints_the_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"baton {baton.__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_help_with_its_flags(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: baton {command}")
    assert all(flag in text for flag in COMMANDS[command])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "baton: error: no command; see baton --help"),
        (["nonsense"], "baton: error: unknown command 'nonsense'; see baton --help"),
        (["rooter"], "baton: error: unknown command 'rooter'; did you mean router?"),
        (["generate"], "baton generate: error: the following arguments are required: PROMPT"),
        (
            ["up", "--max-num-sequences", "3"],
            "baton serve: error: unknown flag --max-num-sequences; did you mean --max-num-seqs?",
        ),
        (
            ["bench", "latency", "--inputlen=3"],
            "baton bench latency: error: unknown flag --inputlen; did you mean --input-len?",
        ),
        (["decode", "m", "--host"], "baton decode: error: --host: expected one argument"),
    ],
)
def test_a_usage_error_is_one_line_and_exits_with_2(arguments, line, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
def test_help_has_the_main_flags_and_help_all_has_all(command, capsys):
    pages = {}
    for flag in ("--help", "--help=all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        pages[flag] = capsys.readouterr().out
    minor = "--drain-timeout-s"
    assert minor not in pages["--help"]
    assert minor in pages["--help=all"]
    assert f"more flags: baton {command} --help=all" in pages["--help"]
    assert 8 <= sum(line.startswith("  --") for line in pages["--help"].splitlines()) <= 14


def test_missing_flags_are_named(capsys):
    before = signal.getsignal(signal.SIGHUP)
    assert main(["router"]) == 2
    assert signal.getsignal(signal.SIGHUP) is before
    assert capsys.readouterr().err == "baton router: error: --model and --decode are missing\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_code_for_the_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("baton ro", {"router"}),
        ("baton decode --max-num-s", {"--max-num-seqs"}),
        ("baton decode --dtype floa", {"float32", "float16"}),
        ("baton bench latency --input-l", {"--input-len"}),
    ],
)
def test_the_shell_gets_completions(line, expected, tmp_path):
    answer = tmp_path / "answer"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "from baton.cli import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert {word.strip() for word in answer.read_text().split("\n")} >= expected
    assert all(word.startswith(line.split()[-1]) for word in answer.read_text().split("\n"))


def test_generate_streams_text_to_stdout_and_figures_to_stderr(capsys):
    with running_fake_generation() as server:
        status = main(["generate", "hi", "--address", server.address, "--seed", "5", "--stop", "x"])
    captured = capsys.readouterr()
    assert status == 0
    assert captured.out == "Hello, world\n"
    assert "4 prompt, 2 cached, 3 generated" in captured.err
    assert "first token 20.0" in captured.err
    (request,) = server.requests
    assert (request.sampling.seed, list(request.stopping.stop)) == (5, ["x"])


def test_generate_prints_each_candidate_under_its_name(capsys):
    flags = ["--n", "2", "--best-of", "3"]
    with running_fake_generation() as server:
        assert main(["generate", "hi", "--address", server.address, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == (
        "--- candidate 0: length, score -0.5000\nHello 0!\n"
        "--- candidate 1: length, score -1.5000\nHello 1!\n"
    )
    assert captured.err.count("3 generated") == 1
    sampling = server.requests[0].sampling
    assert (sampling.n, sampling.best_of) == (2, 3)
    assert not sampling.HasField("beam_search")


def test_generate_sends_the_parameters_of_beam_search(capsys):
    flags = ["--beam-width", "4", "--length-penalty", "0", "--early-stopping", "never"]
    with running_fake_generation() as server:
        assert main(["generate", "hi", "--address", server.address, *flags]) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    beam_search = server.requests[0].sampling.beam_search
    assert beam_search.beam_width == 4
    assert beam_search.HasField("length_penalty")
    assert beam_search.length_penalty == 0
    assert beam_search.early_stopping == common_pb2.EARLY_STOPPING_NEVER


def test_generate_sends_only_what_is_stated(capsys):
    with running_fake_generation() as server:
        assert main(["generate", "hi", "--address", server.address]) == 0
        assert main(["generate", "hi", "--address", server.address, "--min-tokens", "200"]) == 1
    assert "min_tokens is 200; it must be in [0, 128], max_tokens" in capsys.readouterr().err
    (request,) = server.requests
    assert request.sampling == common_pb2.SamplingParams()
    assert request.stopping == common_pb2.StoppingParams(max_tokens=128)
    assert request.text_params == common_pb2.TextParams()


def test_generate_has_a_flag_for_every_parameter():
    given = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: -1.5, 9: 2.0},
        "allowed_token_ids": [7, 8],
        "bad_words": ["no", "never"],
        "seed": 4,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "n": 1,
        "best_of": 2,
        "beam_width": 3,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "logprobs": 2,
        "prompt_logprobs": 0,
        "truncate_prompt_tokens": -1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "detokenize": False,
        "thinking_token_budget": 7,
        "extra_args": '{"a": 1}',
    }
    not_flags = {"structured_outputs", "prediction", "output_kind"}
    assert given.keys() | not_flags == set(SamplingParams.__slots__)
    parser = argparse.ArgumentParser()
    add_sampling_args(parser)
    singular = {
        "allowed_token_ids": "allowed-token-id",
        "bad_words": "bad-word",
        "stop_token_ids": "stop-token-id",
    }
    for name, value in given.items():
        flag = singular.get(name, name.replace("_", "-"))
        if isinstance(value, bool):
            flags = [f"--{flag}" if value else f"--no-{flag}"]
        elif isinstance(value, dict):
            flags = [f"--{flag}={token}={bias}" for token, bias in value.items()]
        else:
            flags = [f"--{flag}={one}" for one in (value if isinstance(value, list) else [value])]
        stated = sampling_fields_from_args(parser.parse_args(flags))
        assert stated == {"max_tokens": 128, name: value}


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (["--json-schema", "FILE"], {"json": '{"type": "integer"}'}),
        (["--json-object"], {"json_object": True}),
        (
            ["--json-object", "--disable-any-whitespace"],
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--grammar", "FILE"], {"grammar": '{"type": "integer"}'}),
        (["--structural-tag", "FILE"], {"structural_tag": '{"type": "integer"}'}),
    ],
)
def test_generate_has_a_flag_for_every_form(flags, form, tmp_path):
    path = tmp_path / "form"
    path.write_text('{"type": "integer"}')
    parser = argparse.ArgumentParser()
    add_sampling_args(parser)
    args = parser.parse_args([str(path) if flag == "FILE" else flag for flag in flags])
    assert sampling_fields_from_args(args) == {"max_tokens": 128, "structured_outputs": form}


def test_generate_reads_a_prediction_from_a_file(tmp_path):
    path = tmp_path / "text"
    path.write_text("the dog\n")
    parser = argparse.ArgumentParser()
    add_sampling_args(parser)
    stated = sampling_fields_from_args(parser.parse_args(["--prediction", str(path)]))
    assert stated == {"max_tokens": 128, "prediction": "the dog\n"}


def test_generate_sends_the_form_of_the_text(capsys):
    flags = ["--regex", "[ab]+", "--thinking-token-budget", "9", "--extra-args", '{"a": 1}']
    with running_fake_generation() as server:
        assert main(["generate", "hi", "--address", server.address, *flags]) == 0
    sampling = server.requests[0].sampling
    assert sampling.structured_outputs == common_pb2.StructuredOutputs(regex="[ab]+")
    assert (sampling.thinking_token_budget, sampling.extra_args_json) == (9, '{"a":1}')


def test_two_forms_and_a_missing_file_are_refused(capsys, tmp_path):
    assert main(["generate", "hi", "--regex", "a", "--json-object"]) == 1
    assert "structured_outputs sets json_object, regex; set exactly one" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--grammar", str(tmp_path / "none")])
    assert "--grammar: cannot read" in capsys.readouterr().err


def test_a_malformed_bias_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--logit-bias", "7"])
    assert "--logit-bias: invalid ID=BIAS value: '7'" in capsys.readouterr().err


def test_generate_reads_stdin(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    with running_fake_generation() as server:
        main(["generate", "-", "--address", server.address])
    assert server.requests[0].text == "from a pipe"


def test_errors_print_one_line_and_exit_with_1(capsys):
    with running_fake_generation() as server:
        assert main(["generate", "fail", "--address", server.address]) == 1
    assert capsys.readouterr().err == "baton generate: error: no replica is left\n"


def test_an_invalid_sampling_parameter_is_named(capsys):
    assert main(["generate", "hi", "--top-p", "0"]) == 1
    assert "top_p is 0.0" in capsys.readouterr().err


def test_health_reports_an_address_without_a_server_as_unavailable(capsys):
    assert main(["health", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().out == "UNAVAILABLE\n"


@pytest.mark.parametrize("port", ["99999", "-1"])
@pytest.mark.parametrize("command", ["serve", "decode"])
def test_a_port_out_of_range_is_refused(command, port, capsys):
    assert main([command, "--model", "m", "--port", port]) == 2
    message = f"--port is {port}; it must be in [0, 65536)"
    assert capsys.readouterr().err == f"baton {command}: error: {message}\n"


@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_a_store_within_one_process_is_refused(command, capsys):
    assert main([command, "--model", "m", "--port", "0", "--kv-connector", "memory://x"]) == 2
    assert capsys.readouterr().err == (
        f"baton {command}: error: --kv-connector memory:// is shared within one process only; "
        "between processes use shm://NAME, file:///path, redis://host:port/db, grpc:// or nixl://\n"
    )


def test_generate_prints_log_probabilities_after_the_text(capsys):
    flags = ["--logprobs", "2", "--prompt-logprobs", "2"]
    with running_fake_generation() as server:
        assert main(["generate", "hi", "--address", server.address, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, world\n"
    *lines, summary = captured.err.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "prompt 3",
        "prompt 4 -1.0000 rank 4 | 9 -0.5000, 6 -1.5000, 4 -1.0000",
        "token 5 -1.2500 rank 5 | 9 -0.5000, 6 -1.5000, 5 -1.2500",
        "token 6 -1.5000 rank 6 | 9 -0.5000, 6 -1.5000",
        "token 7 -1.7500 rank 7 | 9 -0.5000, 6 -1.5000, 7 -1.7500",
    ]
    assert "3 generated" in summary


@pytest.fixture
def run_missing(monkeypatch):
    """Runs a command whose module is another one, which imports what is missing."""
    entry = baton.cli.COMMANDS["health"]

    def run(module: str) -> int:
        monkeypatch.setitem(baton.cli.COMMANDS, "health", replace(entry, module=module))
        return main(["health"])

    return run


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("a_missing_package.probe", "a_missing_package is not installed"),
        ("a_namespace.part", "a_namespace.part is not installed"),
        ("a_package.old", "the installed package a_package has no module a_package.gone"),
        ("a_broken", "the installed package a_broken.part has no module a_broken.part.gone"),
    ],
)
def test_what_is_not_installed_is_named_on_one_line(
    run_missing, module, problem, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a_namespace").mkdir()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "old.py").write_text("import a_package.gone")
    (tmp_path / "a_broken" / "part").mkdir(parents=True)
    (tmp_path / "a_broken" / "__init__.py").write_text("import a_broken.part")
    (tmp_path / "a_broken" / "part" / "__init__.py").write_text("import a_broken.part.gone")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_missing(module) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"baton health: error: {problem}; `baton doctor` names all")


def test_the_stack_of_a_missing_package_is_shown_at_the_log_level_debug(
    run_missing, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a_user.py").write_text("import a_missing_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    assert run_missing("a_user") == 1
    *stack, last = capsys.readouterr().err.splitlines()
    assert "a_user.py" in "".join(stack)
    assert last.startswith("baton health: error: a_missing_package is not installed")


def test_a_module_of_baton_that_is_missing_is_a_bug_whose_place_is_shown(run_missing):
    with pytest.raises(ModuleNotFoundError, match=r"baton\.cli\.missing"):
        run_missing("baton.cli.missing")


def test_the_doctor_has_flags_where_packages_for_calls_are_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "baton.cli.operator_calls", None)
    args = baton.cli.build_parser("doctor").parse_args(["doctor", "--json"])
    assert args.json
