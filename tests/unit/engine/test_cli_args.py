"""Flags made from `EngineConfig`."""

import dataclasses
import os
import subprocess
import sys

import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags.parser import FlagParser
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig
from engine.speculative_config import SpeculativeConfig
from kvstore.registry import known_stores


def _parse(*arguments, omit=(), **overrides):
    parser = FlagParser()
    add_engine_args(parser, omit=omit)
    return engine_config_from_args(parser.parse_args(arguments), **overrides)


def _help(capsys):
    parser = FlagParser(prog="engine")
    add_engine_args(parser)
    parser.print_all_help()
    return " ".join(capsys.readouterr().out.split())


def test_the_help_names_every_connector_scheme(capsys):
    page = _help(capsys)
    stores = {scheme for scheme in known_stores() if not scheme.startswith("redis")}
    for scheme in (*stores, "redis", "grpc", "nixl", "multi"):
        assert f"{scheme}://" in page
    assert "faulty+" in page


def test_no_flags_give_the_defaults():
    assert _parse("--model", "m") == EngineConfig(model="m")


def test_every_field_can_be_given(tmp_path):
    config = EngineConfig(
        model="folder/m",
        served_model_name="name",
        dtype="bfloat16",
        load_format="dummy",
        quantization="int4-128",
        quantized_compute="fast",
        kv_cache_dtype="fp8_e4m3",
        device="cpu",
        tensor_parallel_size=3,
        pipeline_parallel_size=3,
        distributed_executor_backend="external_launcher",
        nnodes=3,
        node_rank=2,
        master_addr="10.0.0.1",
        master_port=7000,
        num_threads=3,
        turns_folder=str(tmp_path),
        weights_folder=str(tmp_path),
        block_size=8,
        max_model_len=100,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        long_prefill_token_threshold=33,
        max_num_partial_prefills=2,
        max_step_ms=12.5,
        max_num_waiting=9,
        priority_ageing_s=1.5,
        preemption_mode="swap",
        swap_space=4321,
        async_scheduling=True,
        enforce_eager=True,
        attention_backend="triton",
        speculative_config=SpeculativeConfig(method="suffix", num_speculative_tokens=3),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=1234,
        num_gpu_blocks_override=11,
        num_state_slots=12,
        state_interval=16,
        kv_connector="shm://",
        kv_publish="3",
        kv_load_failure_policy="fail",
        kv_transfer_block_size=4,
        kv_transfer_dtype="float16",
        kv_transfer_head_slices=2,
        kv_transfer_layer_slices=3,
        kv_transfer_timeout_s=7.5,
        step_timeout_s=9.5,
        logprobs_mode="processed_logprobs",
        logits_processors=("first", "module:Second"),
        structured_outputs_backend="llguidance",
        structured_outputs_max_whitespace=-1,
        grammar_timeout_s=2.5,
        grammar_cache_bytes=12345,
    )
    default = EngineConfig(model="m")
    arguments = []
    for name, value in (
        (one.name, getattr(config, one.name)) for one in dataclasses.fields(config)
    ):
        assert value != getattr(default, name), f"{name} is not exercised"
        flag = name.replace("_", "-")
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        text = f"{text}B" if name == "swap_space" else text
        by_value = {False: [f"--no-{flag}"], True: [f"--{flag}"]}
        arguments += by_value[value] if isinstance(value, bool) else [f"--{flag}", text]
    assert _parse(*arguments) == config


def test_byte_sizes_may_have_units():
    assert (
        _parse("--model", "m", "--kv-cache-memory-bytes", "512MiB").kv_cache_memory_bytes
        == 512 * 2**20
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes: 'lots' is not a byte size"),
        (["--max-step-ms", "soon"], "--max-step-ms: 'soon' is neither auto nor a number"),
        (["--block-size", "big"], "--block-size: invalid int value: 'big'"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype: invalid choice: 'int3'"),
        (
            ["--structured-outputs-backend", "outlines"],
            "--structured-outputs-backend: invalid choice",
        ),
        (["--blocksize", "4"], "unknown flag --blocksize; did you mean --block-size?"),
    ],
)
def test_a_bad_value_names_its_flag(arguments, message, capsys):
    with pytest.raises(SystemExit):
        _parse("--model", "m", *arguments)
    assert message in capsys.readouterr().err


def test_the_model_is_required():
    with pytest.raises(ConfigurationError, match=r"^--model is missing$"):
        _parse()


def test_the_model_may_be_the_first_argument():
    assert _parse("m", "--block-size", "8") == _parse("--model", "m", "--block-size", "8")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--kv-cache-memory", "2MiB"], "kv_cache_memory_bytes", 2**21),
        (["--kv-cache-memory-bytes", "2M"], "kv_cache_memory_bytes", 2**21),
        (["--swap-space", "4GiB"], "swap_space", 2**32),
        (["--swap-space", "0"], "swap_space", 0),
        (["--kv-offloading-size", "1.5"], "swap_space", 3 * 2**29),
        (["--long-prefill-token-threshold", "0"], "long_prefill_token_threshold", None),
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max_num_batched_tokens", "4K"], "max_num_batched_tokens", 4096),
        (["-tp", "1", "--pipeline-parallel-size=1", "--data-parallel-size", "1"], "device", "auto"),
        (["--revision", "v2"], "model", "m@v2"),
        (["--quantization", "none", "--no-trust-remote-code"], "quantization", "none"),
        (["-q", "awq"], "quantization", "awq"),
    ],
)
def test_flags_of_vllm_mean_the_same(arguments, field, value):
    assert getattr(_parse("m", *arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--swap-space", "4"], "--swap-space: '4' has no unit; write 4GiB, or 4B for bytes"),
        (["--kv-offloading-size", "4GiB"], "--kv-offloading-size: '4GiB' is not a number of GiB"),
        (["--quantization", "bitsandbytes"], "--quantization: invalid choice: 'bitsandbytes'"),
        (["-dp", "2"], "--data-parallel-size: '2' is not supported; it must be 1: a process has"),
        (["--download-dir", "x"], "the environment variable HF_HUB_CACHE names the folder"),
        (["--trust-remote-code"], "--trust-remote-code: Baton runs no code from checkpoints"),
    ],
)
def test_what_baton_lacks_is_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit):
        _parse("m", *arguments)
    assert message in capsys.readouterr().err


def test_ranges_are_checked_by_the_config():
    with pytest.raises(ConfigurationError, match="--block-size is 0; it must be >= 1"):
        _parse("--model", "m", "--block-size", "0")


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--grammar-timeout-s", "0", "0.0; it must be > 0 and finite"),
        ("--grammar-timeout-s", "inf", "inf; it must be"),
        ("--max-step-ms", "-1", "-1.0; it must be auto or a number from 0 to 3,600,000"),
        ("--max-step-ms", "nan", "nan; it must be auto or"),
    ],
)
def test_limits_of_times_are_checked(flag, value, limit):
    with pytest.raises(ConfigurationError, match=f"{flag} is {limit}"):
        _parse("--model", "m", flag, value)


def test_the_cache_of_grammars_may_be_empty_but_not_negative():
    assert EngineConfig(model="m", grammar_cache_bytes=0).grammar_cache_bytes == 0
    with pytest.raises(ConfigurationError, match="--grammar-cache-bytes is -1; it must be >= 0"):
        EngineConfig(model="m", grammar_cache_bytes=-1)


@pytest.mark.parametrize("size", ["0", "3", "32"])
def test_the_transfer_block_size_must_divide_the_block_size(size):
    with pytest.raises(ConfigurationError, match=f"--kv-transfer-block-size is {size}; it must be"):
        _parse("--model", "m", "--block-size", "16", "--kv-transfer-block-size", size)


@pytest.mark.parametrize("path", ["", "absent", "file", "read-only"])
@pytest.mark.parametrize("flag", ["--turns-folder", "--weights-folder"])
def test_a_shared_folder_must_be_writable(flag, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(mode=0o500)
    if path == "read-only" and os.access(tmp_path / path, os.W_OK):
        pytest.skip("this user may write everywhere")
    message = f"{flag} is '{path}'; it must be an existing folder"
    with pytest.raises(ConfigurationError, match=message):
        _parse("--model", "m", flag, path)


def test_omitted_fields_have_no_flag_and_take_overrides(capsys):
    config = _parse("--model", "m", omit=("dtype",), dtype="float32", block_size=4)
    assert (config.dtype, config.block_size) == ("float32", 4)
    with pytest.raises(SystemExit):
        _parse("--model", "m", "--dtype", "float32", omit=("dtype",))
    assert "unknown flag --dtype" in capsys.readouterr().err


def test_flags_of_other_components_are_ignored():
    parser = FlagParser()
    parser.add_argument("--port", type=int, default=1)
    add_engine_args(parser)
    assert engine_config_from_args(parser.parse_args(["--model", "m"])) == EngineConfig(model="m")


def test_the_help_has_the_meaning_and_default_of_every_flag(capsys):
    text = _help(capsys)
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["flag"].help in text
    assert "tokens per KV block (default: 16)" in text
    assert "--no-enable-prefix-caching" in text


def test_importing_cli_args_does_not_import_torch():
    code = "import sys, engine.cli_args; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
