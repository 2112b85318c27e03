"""Models in GGUF files with several formats: their weights, tokens and bits, whole and divided."""

from contextlib import closing

import pytest
import torch

import kernels
from baton.common.security.cluster import ClusterSecurity
from engine.models.linear import PackedModule
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.runtime.weights import loader
from engine.runtime.weights.loader import load_model
from kernels import Arena, SegmentedWeight, ServedFormats, dispatch
from kernels.formats import GGML_FORMATS
from kernels.triton import quantized
from tests.support.described_models import described_model
from tests.support.paged_session import PagedSession
from tests.support.quantized_checkpoints import MIXTURES, save_quantized
from tests.support.rank_hosts import TOKEN, group_of
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

CPU = torch.device("cpu")
SERVED = kernels.served_formats(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(not SERVED.exact, reason="no kernels for quantized weights")
# Longer than the windows of the layers that have one.
PROMPT = tuple(number % 251 for number in range(70))
NUM_TOKENS = 16
STAGES = ((0, ()), (1, ()), (1, (1, 2)))
GPU_KERNELS = (
    *("served_formats", "make_weight", "make_weight_stack", "embed"),
    *("linear", "linear_gated", "expert_linear"),
)
FORMATS = [each.name for each in GGML_FORMATS.values()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns the file of a model, by its name and the format of all matrices, if it has one."""
    folder, made = tmp_path_factory.mktemp("files"), {}

    def file(name, formats=""):
        if (name, formats) not in made:
            made[name, formats] = save_quantized(folder / f"{len(made)}.gguf", name, formats)
        return made[name, formats]

    return file


@pytest.fixture(scope="module")
def expected(files):
    """Returns the tokens of `transformers` with the numbers of a file, which draws each once."""
    models = {}

    def tokens(path, prompt, num_tokens):
        if path not in models:
            models[path] = described_model(path)
        ids = [*prompt]
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids.append(models[path](torch.tensor([ids])).logits[0, -1].argmax().item())
        return ids[len(prompt) :]

    return tokens


def greedy(path, **flags):
    with closing(build_core(path, "both", **flags)) as core:
        request = engine_request("a", PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        return tokens_of(run_all(core, [request])["a"])


def load(path, dtype="bfloat16", **options):
    return load_model(str(path), dtype, "cpu", progress=False, **options)


def logits_of(model):
    session = PagedSession(model, [len(PROMPT)])
    return torch.cat([session.step([(0, part)])[0] for part in (PROMPT[:60], PROMPT[60:])])


def dense(monkeypatch):
    """Makes loaded models dense."""
    nothing = ServedFormats(frozenset(), frozenset())
    monkeypatch.setattr(kernels, "served_formats", lambda device, dtype: nothing)


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_are_those_of_transformers_with_the_numbers_of_the_file(name, files, expected):
    path = files(name)
    assert greedy(path) == expected(path, PROMPT, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_products_of_a_gpus_kernels(name, files, monkeypatch, caplog):
    """Prompts of many rows and of few. Triton's interpreter is too slow for the other kernels."""
    caplog.set_level("INFO", logger="baton.engine")
    expected = logits_of(load(files(name), "float32"))
    caplog.clear()
    for kernel_name in GPU_KERNELS:
        kernel = dispatch.KERNELS[kernel_name]
        monkeypatch.setitem(
            kernel, ("cpu", torch.float32), dispatch.TRITON.implementations[kernel_name]
        )
    monkeypatch.setattr(quantized, "MAX_FEW_ROWS", 30)
    model = load(files(name), "float32")
    assert "quantized weights: " in caplog.text
    assert "dequantized" not in caplog.text
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_have_the_bits_of_dense_weights(name, dtype, files, monkeypatch):
    quantized = logits_of(load(files(name), dtype))
    dense(monkeypatch)
    assert torch.equal(quantized, logits_of(load(files(name), dtype)))


@needs_kernels
@pytest.mark.parametrize("name", MIXTURES)
def test_weights_take_the_bytes_of_the_file(name, files, monkeypatch, caplog):
    """All but those of its header, and 2.8% more for scales of Q4_K."""
    caplog.set_level("INFO", logger="baton.engine")
    loaded = load(files(name))
    assert loaded.weight_bytes < files(name).stat().st_size * 1.03
    assert "quantized weights: " in caplog.text
    assert "dequantized" not in caplog.text
    dense(monkeypatch)
    assert load(files(name)).weight_bytes > 2 * loaded.weight_bytes
    assert "MiB" in caplog.text.split("are dequantized: ")[1]


@needs_kernels
def test_layers_of_several_formats_are_segments(files):
    modules = dict(load(files("gemma3")).model.named_modules())
    qkv = modules["layers.0.self_attn.qkv_proj"].weight
    assert isinstance(qkv, SegmentedWeight)
    sizes = [(each.num_rows, each.quantized.format.name) for each in qkv.segments]
    assert sizes == [(320, "Q5_0"), (64, "Q8_0")]
    modules = dict(load(files("llama")).model.named_modules())
    gate_up = modules["layers.1.mlp.gate_up_proj"].weight
    sizes = [(each.num_rows, each.quantized.format.name) for each in gate_up.segments]
    assert sizes == [(512, "Q4_K"), (512, "Q5_K")]


@needs_kernels
@pytest.mark.parametrize("name", MIXTURES)
def test_steps_are_recorded(name, files):
    loaded = load(files(name))
    session, model = PagedSession(loaded, [len(PROMPT)]), loaded.model
    inputs = session.inputs([(0, PROMPT)])

    def run():
        return model.logits(model(inputs.token_ids, inputs.positions, session.kv(inputs)))

    with torch.inference_mode():
        logits, step = kernels.record_step(CPU, Arena(), run)
    assert step is not None
    assert torch.equal(logits, logits_of(loaded))


@needs_kernels
def test_experts_whose_gates_have_another_format_become_dense(files, tmp_path, expected, caplog):
    caplog.set_level("INFO", logger="baton.engine")
    formats = {**MIXTURES["qwen3_moe"], "ffn_up_exps": "Q8_0"}
    path = save_quantized(tmp_path / "model.gguf", "qwen3_moe", formats)
    assert greedy(path) == expected(path, PROMPT, NUM_TOKENS)
    assert "weights in Q8_0, beside parts of one weight in other formats, are deq" in caplog.text


@needs_kernels
@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("qwen3_moe", 2)])
def test_ranks_divide_blocks_where_they_can(name, num_ranks, files, expected):
    """Half of a row is no whole block of Q4_K, so that the layers after attention are dense."""
    path = files(name)
    flags = {"tensor_parallel_size": num_ranks, "security": ClusterSecurity(token=TOKEN)}
    assert greedy(path, **flags) == expected(path, PROMPT, NUM_TOKENS)


@needs_kernels
def test_columns_that_cut_blocks_are_named(files, caplog):
    caplog.set_level("INFO", logger="baton.engine")
    with closing(
        build_core(
            files("llama"), "both", tensor_parallel_size=2, security=ClusterSecurity(token=TOKEN)
        )
    ):
        reason = "weights in Q4_K, whose blocks --tensor-parallel-size divides, are dequantized"
        assert reason in caplog.text


@needs_kernels
@pytest.mark.parametrize("name", MIXTURES)
def test_weights_are_shared_in_their_formats(name, files, tmp_path, monkeypatch):
    fills, copy = [], loader._copy_weights

    def counting(*args, **options):
        fills.append(args)
        copy(*args, **options)

    monkeypatch.setattr(loader, "_copy_weights", counting)
    options = {"weights_folder": str(tmp_path)}
    private, *shared = (load(files(name), **each) for each in ({}, options, options))
    assert len(fills) == 2
    (file,) = (each for each in tmp_path.glob("weights-*") if not each.suffix)
    assert file.stat().st_size < private.weight_bytes * 1.01 + 2**12
    for loaded in shared:
        assert loaded.shares_weights
        pairs = zip(_weights(private), _weights(loaded), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)
    dense(monkeypatch)
    load(files(name), **options)
    assert len(fills) == 3


def _weights(loaded):
    modules = (each for each in loaded.model.modules() if isinstance(each, PackedModule))
    return [tensor for module in modules for tensor in module.weight.tensors()]


@needs_kernels
def test_the_fingerprint_names_what_changes_kv(files, monkeypatch):
    """Exact weights have the KV of dense ones; fast ones have another."""
    path = files("llama")
    fingerprints = [load(path).fingerprint]
    fast = ServedFormats(SERVED.exact, SERVED.exact)
    monkeypatch.setattr(kernels, "served_formats", lambda device, dtype: fast)
    fingerprints.append(load(path, quantized_compute="fast").fingerprint)
    dense(monkeypatch)
    fingerprints += [load(path, quantized_compute=mode).fingerprint for mode in ("exact", "fast")]
    assert fingerprints[0] == fingerprints[2] == fingerprints[3] != fingerprints[1]


@needs_kernels
def test_ranks_that_cut_blocks_have_a_fingerprint_of_their_own(files, monkeypatch):
    """Half of a row is no whole block of Q4_K, and two blocks of Q8_0."""
    fast = ServedFormats(SERVED.exact, SERVED.exact)
    monkeypatch.setattr(kernels, "served_formats", lambda device, dtype: fast)

    def fingerprints(formats, mode):
        path, parts = files("llama", formats), [WHOLE_MODEL]
        parts += [ModelPart(group_of(rank, 2), *rank_stage) for rank, rank_stage in STAGES]
        return {load(path, part=part, quantized_compute=mode).fingerprint for part in parts}

    assert [len(fingerprints(*each)) for each in (("Q4_K", "fast"), ("Q4_K", "exact"))] == [2, 1]
    assert len(fingerprints("Q8_0", "fast")) == 1


CONNECTORS = ("shm", "redis", "grpc", "nixl")
SPLIT_CASES = [("llama", each) for each in FORMATS] + [(name, "") for name in MIXTURES]


@pytest.mark.sampled(one_in=4)
@pytest.mark.usefixtures("loads_are_worth_it")
@pytest.mark.parametrize(
    ("name", "formats", "connector_url"),
    [(*case, CONNECTORS[number % 4]) for number, case in enumerate(SPLIT_CASES)],
    indirect=["connector_url"],
)
def test_split_equals_whole(name, formats, connector_url, files, expected):
    path = files(name, formats)
    flags = {"block_size": 8, "kv_connector": connector_url, "kv_load_failure_policy": "fail"}
    prompts = [PROMPT[:length] for length in (1, 8, 43)]
    with (
        closing(build_core(path, "prefill", **flags)) as prefill,
        closing(build_core(path, "decode", **flags)) as decode,
    ):
        split = SplitRun(prefill, decode)
        split.run(
            [
                engine_request(str(len(prompt)), prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                for prompt in prompts
            ]
        )
    for prompt in prompts:
        outputs = split.outputs[str(len(prompt))]
        drawn = [*tokens_of(split.prefilled[str(len(prompt))]), *tokens_of(outputs)]
        assert drawn == expected(path, prompt, NUM_TOKENS)
        assert outputs[0].cached_tokens == len(prompt)
