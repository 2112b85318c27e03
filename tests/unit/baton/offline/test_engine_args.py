"""`EngineArgs`: vLLM's usual arguments."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from baton import EngineArgs
from baton.common.errors import ConfigurationError
from baton.common.flags.vllm_arguments import FIXED_ARGUMENTS, WITHOUT_EFFECT
from engine.config import EngineConfig

PAGE = Path(__file__).parents[4] / "docs" / "from-vllm.md"

USUAL = {
    "tokenizer": "m",
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "seed": 0,
    "gpu_memory_utilization": 0.9,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "enforce_eager": False,
    "max_model_len": None,
    "max_num_seqs": None,
    "disable_custom_all_reduce": True,
    "disable_log_stats": True,
    "download_dir": None,
    "hf_overrides": None,
    "enable_prefix_caching": None,
    "enable_chunked_prefill": True,
    "compilation_config": {},
    "load_format": "auto",
    "generation_config": "auto",
}


def test_the_usual_arguments_are_accepted_if_they_ask_for_what_baton_does():
    args = EngineArgs("m", **USUAL)
    assert args.config == EngineArgs("m", swap_space=0).config
    assert (args.model, args.seed, args.generation_config) == ("m", 0, "auto")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data_parallel_size", 2, "data_parallel_size is 2; it must be 1: a process has one"),
        ("tokenizer", "other", "tokenizer is 'other'; it must be 'm'"),
        ("trust_remote_code", True, "trust_remote_code is True; it must be False"),
        ("load_format", "bitsandbytes", "--load-format is 'bitsandbytes'"),
        ("quantization", "hqq", "--quantization is 'hqq'; it must be one of none, int8"),
        ("enable_lora", True, "adapters"),
        ("tokenizer_mode", "mistral", "it must be 'auto' or 'hf'"),
        ("swap_space", 4, "swap_space: 4 has no unit; write it like '4GiB'"),
        ("swap_space", "4", "no unit"),
        ("kv_offloading_size", float("inf"), "kv_offloading_size: 'inf' is not a number of GiB"),
        ("kv_offloading_size", float("nan"), "'nan' is not a number of GiB"),
        ("kv_offloading_size", -1, "'-1' is not a number of GiB"),
        ("kv_offloading_size", "1e308", "'1e308' is not a number of GiB"),
        ("swap_space", "4 cows", "not a byte size"),
        ("max_num_seqs", 0, "--max-num-seqs is 0"),
    ],
)
def test_other_values_are_refused_by_name(name, value, message):
    with pytest.raises(ConfigurationError, match=message):
        EngineArgs("m", **{name: value})


def test_the_page_names_arguments_that_are_refused():
    (row,) = [line for line in PAGE.read_text().splitlines() if "cannot serve, such as" in line]
    examples = re.findall(r"`(\w+)=([^`]+)`", row)
    assert len(examples) == 3
    for name, value in examples:
        with pytest.raises(ConfigurationError, match=f"^{name} is "):
            EngineArgs("m", **{name: ast.literal_eval(value)})


def test_no_argument_is_lacking_that_the_engine_has():
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not known & {*FIXED_ARGUMENTS, *WITHOUT_EFFECT}


def test_values_are_converted_to_those_of_the_engine():
    class Float16:
        def __str__(self):
            return "torch.float16"

    assert EngineArgs("m", dtype="half").config.dtype == "float16"
    assert EngineArgs("m", dtype=Float16()).config.dtype == "float16"
    assert EngineArgs("m", kv_offloading_size=0.5).config.swap_space == 2**29
    assert EngineArgs("m", load_format="safetensors").config.load_format == "auto"
    assert EngineArgs("m", kv_cache_dtype="fp8").config.kv_cache_dtype == "fp8_e4m3"
    assert EngineArgs("m", swap_space="4GiB").config.swap_space == 4 * 2**30
    assert EngineArgs("m", kv_cache_memory_bytes=4096).config.kv_cache_memory_bytes == 4096


def test_a_revision_is_part_of_the_models_name():
    args = EngineArgs("org/m", revision="v1", tokenizer_revision="v1", tokenizer="org/m")
    assert args.model == args.config.model == "org/m@v1"
    with pytest.raises(ConfigurationError, match="tokenizer_revision is 'v2'; it must be 'v1'"):
        EngineArgs("org/m", revision="v1", tokenizer_revision="v2")


def test_unknown_names_get_a_suggestion():
    with pytest.raises(TypeError, match="max_num_sequences'; did you mean 'max_num_seqs'"):
        EngineArgs("m", max_num_sequences=4)
    with pytest.raises(TypeError, match="tensor_paralel_size'; did you mean 'tensor_parallel_"):
        EngineArgs("m", tensor_paralel_size=1)
    with pytest.raises(TypeError, match=r"no argument 'xyzzy'$"):
        EngineArgs("m", xyzzy=1)
