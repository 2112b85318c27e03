"""`EngineConfig`: the frozen configuration of an engine. Pure: no torch.

Field names are the command line's flags with underscores. Fields that vLLM has
too have vLLM's names.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from baton.common.flags.config_flags import flag
from baton.common.flags.values import (
    auto_or_number,
    byte_size,
    byte_size_with_unit,
    count,
    gibibytes,
    names,
)
from baton.common.model_files.named_models import default_model_name
from engine.config_checks import check_config
from engine.speculative_config import SpeculativeConfig

__all__ = [
    "AUTO",
    "DEFAULT_GPU_MEMORY_UTILIZATION",
    "DEFAULT_MAX_NUM_BATCHED_TOKENS",
    "DEFAULT_MAX_NUM_SEQS",
    "DTYPES",
    "GRAMMAR_BACKENDS",
    "KV_CACHE_DTYPES",
    "QUANTIZED_COMPUTE",
    "EngineConfig",
]

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = (
    *("none", "int8", "int8-128", "int4", "int4-128"),
    *("gguf", "gptq", "awq", "fp8", "compressed-tensors", "mxfp4"),
)
QUANTIZED_COMPUTE = ("exact", "fast")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")
KV_TRANSFER_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "int8")
GRAMMAR_BACKENDS = ("xgrammar", "llguidance")
AUTO = "auto"
"""A value that the engine chooses itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The flags of one engine, which loads a model, schedules requests and transfers KV.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    model: str = flag(
        MISSING,
        "checkpoint folder, GGUF file, demo, smollm2, gemma3-270m, or Hugging Face Hub name",
        metavar="MODEL",
        is_positional=True,
    )
    served_model_name: str | None = flag(
        None,
        "model name in requests (default: the last part of --model)",
        metavar="NAME",
        is_main=True,
    )
    dtype: str = flag(
        "auto",
        "type of weights, activations and KV; auto uses the checkpoint's",
        choices=DTYPES,
        is_main=True,
    )
    load_format: str = flag(
        "auto",
        "auto reads the checkpoint's weights; dummy makes random weights from config.json alone",
        choices=("auto", "dummy"),
    )
    quantization: str = flag(
        "none",
        "round weights while they are loaded: int8 and int4 (int8-128, int4-128: a scale per 128 "
        "inputs); the other names check how the checkpoint is quantized",
        choices=QUANTIZATIONS,
        aliases={"-q": None},
    )
    quantized_compute: str = flag(
        "auto",
        "how quantized weights are computed: exact, as if they were stored in --dtype; fast, with "
        "inputs rounded to eight bits (on a GPU of FP8 alone); auto, fast in bfloat16 and exact in "
        "other types; prefill and decode need the same",
        choices=("auto", *QUANTIZED_COMPUTE),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of KV; auto uses that of --dtype, fp8_e4m3 and int8 take about half the bytes of "
        "bfloat16",
        choices=KV_CACHE_DTYPES,
    )
    device: str = flag(
        "auto",
        "torch device; auto uses a GPU if torch finds one, else the CPU",
        metavar="DEVICE",
        is_main=True,
    )
    num_threads: int | None = flag(
        None,
        "CPU threads that compute, of each rank (default: the cores this process may use, shared "
        "among its ranks)",
    )
    tensor_parallel_size: int = flag(
        1,
        "number of processes that divide each layer among them; it never ran on GPUs",
        parse=count,
        aliases={"-tp": None},
    )
    pipeline_parallel_size: int = flag(
        1,
        "number of stages that divide the layers among them, each of --tensor-parallel-size "
        "processes; it never ran on GPUs",
        parse=count,
        aliases={"-pp": None},
    )
    distributed_executor_backend: str = flag(
        "mp",
        "what starts the processes of --tensor-parallel-size: mp, the engine (on several machines, "
        "this command on each: --nnodes); ray, the engine, as actors of a Ray cluster (needs the "
        "extra ray); external_launcher, torchrun or LeaderWorkerSet",
        choices=("mp", "ray", "external_launcher", "uni"),
    )
    nnodes: int = flag(
        1,
        "machines that --tensor-parallel-size spans, each with as many of its processes, which the "
        "command there starts",
        parse=count,
    )
    node_rank: int = flag(0, "number of this machine, from 0; the first one serves", parse=count)
    master_addr: str = flag("127.0.0.1", "address of the first machine", metavar="HOST")
    master_port: int = flag(29501, "port there at which the machines meet", parse=count)
    turns_folder: str | None = flag(
        None,
        "existing folder for lock files; CPU workers with the same folder compute in turn",
        metavar="PATH",
    )
    weights_folder: str | None = flag(
        None,
        "existing folder through which CPU workers of one machine share their weights' memory, and "
        "start without packing them again",
        metavar="PATH",
    )
    block_size: int = flag(16, "tokens per KV block")
    max_model_len: int | None = flag(
        None,
        "maximum of prompt and generated tokens together (default: the model's)",
        parse=count,
        is_main=True,
    )
    max_num_seqs: int | None = flag(
        None,
        "maximum number of sequences in one step (default: 64; 128 or 256 on larger GPUs)",
        parse=count,
        is_main=True,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "maximum number of tokens in one step (default: 2048; 4096 or 8192 on larger GPUs)",
        parse=count,
        is_main=True,
    )
    long_prefill_token_threshold: int | None = flag(
        None,
        "maximum tokens of one prompt in one step, so that short prompts get their share; 0 is off",
        parse=count,
    )
    max_num_partial_prefills: int = flag(
        1, "maximum number of partly computed prompts in a step; prompts that fit may overtake them"
    )
    max_step_ms: str | float | None = flag(
        None,
        "milliseconds that a step may take for prompts while sequences decode, here or in a worker "
        "that takes turns with this one: auto, four times as long as a step without prompts; 0, "
        "any time (default: auto on a CPU, 0 on a GPU)",
        parse=auto_or_number,
        metavar="MS",
    )
    max_num_waiting: int = flag(
        4096, "maximum number of waiting requests; further ones get RESOURCE_EXHAUSTED"
    )
    priority_ageing_s: float = flag(
        30.0, "seconds of waiting that count as one level of a request's priority"
    )
    preemption_mode: str = flag(
        "auto",
        "how a request is preempted: recompute its KV, swap it to host memory, or the faster one",
        choices=("auto", "recompute", "swap"),
    )
    swap_space: int | None = flag(
        None,
        "host memory for swapped KV, such as 4GiB (default: 4GiB on a GPU, 0 on a CPU)",
        parse=byte_size_with_unit,
        aliases={"kv-offloading-size": gibibytes},
    )
    async_scheduling: bool | None = flag(
        None, "schedule the next step while the current one computes (default: only on a GPU)"
    )
    enforce_eager: bool = flag(False, "run steps without CUDA graphs")
    attention_backend: str = flag(
        "auto",
        "what computes prompts' attention in a GPU's steps that are no CUDA graphs; auto is triton",
        choices=("auto", "triton", "flashinfer"),
    )
    speculative_config: SpeculativeConfig | None = flag(
        None,
        "draft tokens and check several in one step, as a JSON object: method (ngram, suffix, "
        "draft_model, medusa, eagle, eagle3), model, num_speculative_tokens, prompt_lookup_min, "
        "prompt_lookup_max",
        parse=str,
        metavar="JSON",
    )
    logits_processors: Sequence[str] = flag(
        (),
        "logits processors to load, separated by commas: names of installed ones, or module:Class",
    )
    logprobs_mode: str = flag(
        "raw_logprobs",
        "log-probabilities that requests get: the model's own, or those of the distribution that "
        "tokens are drawn from, after all sampling parameters",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    structured_outputs_backend: str = flag(
        "auto",
        "library for structured outputs, equal on all workers; auto uses xgrammar for what it "
        "enforces and llguidance for the rest",
        choices=("auto", *GRAMMAR_BACKENDS),
    )
    structured_outputs_max_whitespace: int = flag(
        8,
        "most characters of whitespace between two tokens of JSON, equal on all workers: 0 for "
        "none, -1 for any number",
    )
    grammar_timeout_s: float = flag(
        10.0,
        "CPU seconds for compiling one grammar, or thrice that on the clock; a request with a "
        "slower one is refused",
    )
    grammar_cache_bytes: int = flag(
        256 * 2**20, "bytes for compiled grammars that are kept, such as 256MiB", parse=byte_size
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of equal prefixes")
    gpu_memory_utilization: float = flag(
        DEFAULT_GPU_MEMORY_UTILIZATION, "share of GPU memory for weights and KV cache", is_main=True
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "bytes for the KV cache, such as 2GiB (default: on a CPU 1GiB, or what the memory limit of "
        "its container leaves)",
        parse=byte_size,
        aliases={"kv-cache-memory": None},
        is_main=True,
    )
    num_gpu_blocks_override: int | None = flag(
        None, "number of KV blocks in the pool, instead of the computed number"
    )
    num_state_slots: int | None = flag(
        None,
        "number of slots for the states of recurrent layers, instead of the computed number; each "
        "running sequence needs one, and others hold states that sequences can begin at",
        parse=count,
    )
    state_interval: int | None = flag(
        None,
        "tokens after which a running sequence keeps the state of its recurrent layers, to which "
        "it can go back; a multiple of --block-size (default: by the size of a state)",
        parse=count,
    )
    kv_connector: str | None = flag(
        None,
        "URL of the KV connector: shm://NAME, file:///path, redis://host:port/db, grpc://, "
        "nixl://, multi://URL,URL (several), faulty+URL (injects faults) or memory:// (within "
        "one process)",
        metavar="URL",
        is_main=True,
    )
    kv_publish: str = flag(
        "8",
        "when to save generated KV, if the connector finds it by key: off, finish (when a sequence "
        "ends), or a number N (also whenever N blocks are full)",
    )
    kv_load_failure_policy: str = flag(
        "recompute",
        "recompute KV that cannot be loaded, or fail the request",
        choices=("recompute", "fail"),
    )
    kv_transfer_block_size: int | None = flag(
        None,
        "tokens per KV block between tiers; must divide --block-size and be equal on all workers "
        "(default: --block-size)",
    )
    kv_transfer_dtype: str = flag(
        "auto",
        "type of KV between tiers, equal on all workers; auto uses this worker's",
        choices=KV_TRANSFER_DTYPES,
    )
    kv_transfer_head_slices: int | None = flag(
        None,
        "number of objects into which a KV block's heads are split between tiers, equal on all "
        "workers (default: --tensor-parallel-size, at most the model's KV heads)",
    )
    kv_transfer_layer_slices: int | None = flag(
        None,
        "number of objects into which a KV block's layers are split between tiers, equal on all "
        "workers; memory, shm and file save each when its layers are computed (default: "
        "--pipeline-parallel-size)",
    )
    step_timeout_s: float = flag(
        60.0,
        "a step that takes longer ends the process, unless such steps are known to take that long",
    )
    kv_transfer_timeout_s: float = flag(
        60.0, "longest wait for the result of a look-up, load or save; its blocks stay out of use"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_processors", names(self.logits_processors))
        if self.speculative_config is not None:
            given = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", given)
        threshold = self.long_prefill_token_threshold or None  # 0 is off, as in vLLM
        object.__setattr__(self, "long_prefill_token_threshold", threshold)
        check_config(self)

    @property
    def max_step_seqs(self) -> int:
        """Maximum number of sequences in one step."""
        return self.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens in one step."""
        return self.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS

    @property
    def max_running(self) -> int:
        """Maximum number of sequences that run at once; each needs a token of a step's budget."""
        return min(self.max_step_seqs, self.max_step_tokens)

    @property
    def num_lanes(self) -> int:
        """Number of parts of the decoding sequences that decode in turn, one in each step, so that
        every pipeline stage has a step to compute.
        """
        return self.pipeline_parallel_size if self.async_scheduling else 1

    @property
    def max_open_steps(self) -> int:
        """Maximum number of steps that are scheduled and not committed."""
        return max(2, self.num_lanes) if self.async_scheduling else 1

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_requests(self) -> int:
        """Maximum number of running and waiting requests."""
        return self.max_num_waiting + self.max_step_seqs

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of one sequence in a step. Each sequence of a step has room for
        as many tokens.
        """
        if self.speculative_config is None:
            return 0
        share = self.max_step_tokens // self.max_running
        return min(self.speculative_config.num_speculative_tokens, share - 1, self.max_chunk - 1)

    @property
    def max_chunk(self) -> int:
        """Maximum number of tokens of one sequence in one step."""
        return min(self.max_step_tokens, self.long_prefill_token_threshold or self.max_step_tokens)

    @property
    def transfer_block_size(self) -> int:
        """Tokens per transfer block: the unit that tiers exchange and that block keys name."""
        return self.kv_transfer_block_size or self.block_size

    @property
    def transfer_layer_slices(self) -> int:
        """Number of objects into which a KV block's layers are split between tiers."""
        return self.kv_transfer_layer_slices or self.pipeline_parallel_size

    @property
    def model_name(self) -> str:
        """The model name in requests."""
        return self.served_model_name or default_model_name(self.model)
