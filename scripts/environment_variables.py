"""Environment variables that are no flags: their table in docs/configuration.md is made from these.

They are read in several places, some by libraries; a test compares the table with the code.
"""

from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable"]


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        used_by: the program or the part of Baton that reads it.
        default: the value without it.
        help: its meaning.
    """

    name: str
    used_by: str
    default: str
    help: str


VARIABLES = (
    Variable(
        "BATON_CPU_KERNELS",
        "workers, `LLM`",
        "auto",
        "CPU kernels to use: auto (the best that this CPU supports), the name of a variant such "
        "as avx2, torch, or triton; `baton doctor` shows the choice",
    ),
    Variable(
        "BATON_CHAT_TEMPLATES",
        "tests",
        "",
        "folder of checkpoint folders, whose chat templates are compared with transformers",
    ),
    Variable(
        "BATON_CLUSTER_TOKEN",
        "workers, router",
        "",
        "token that the processes of a cluster share, in place of --cluster-token-file",
    ),
    Variable(
        "BATON_COMMIT",
        "`baton bench`",
        "git's answer",
        "commit to write into results, for sources that were copied without .git",
    ),
    Variable(
        "BATON_RESULTS_FOLDER",
        "`make bench-record`",
        "benchmarks/results",
        "folder for its reports",
    ),
    Variable(
        "BATON_CONTAINERS",
        "scripts/prepare_containers.sh",
        "/var/tmp/baton-containers",  # noqa: S108 - a text
        "folder of the Docker engine that the script starts",
    ),
    Variable("BATON_TEST_DEVICE", "tests", "cpu", "device of the Triton tests; cuda for a GPU"),
    Variable(
        "BATON_TEST_RESULTS",
        "tests",
        "",
        "file for one line per test; `make gpu-first` sets it",
    ),
    Variable(
        "BATON_TEST_TOKENIZERS",
        "tests",
        "",
        "folder of checkpoints whose chat templates are compared with `transformers`",
    ),
    Variable("CXX", "building the CPU kernels", "the first found", "C++20 compiler"),
    Variable(
        "HF_HOME, HF_HUB_OFFLINE, HF_TOKEN",
        "workers, router, `LLM`",
        "see huggingface_hub",
        "cache folder, offline mode and token for models named by their Hub name",
    ),
    Variable(
        "NIXL_LOG_LEVEL, UCX_LOG_LEVEL",
        "`nixl://`",
        "ERROR, error",
        "log levels of the libraries",
    ),
    Variable(
        "OMP_WAIT_POLICY",
        "`baton`",
        "PASSIVE",
        "whether idle OpenMP threads sleep or spin",
    ),
    Variable(
        "OPENAI_API_KEY",
        "`baton bench serve`",
        "",
        "bearer token for http:// and https:// targets",
    ),
    Variable(
        "SSL_CERT_FILE",
        "`rediss://`",
        "the system's",
        "certificate authorities, unless the URL has ca_file",
    ),
    Variable(
        "TRITON_INTERPRET",
        "workers",
        "",
        "with 1, Triton's kernels can run on a CPU, slowly, for tests",
    ),
    Variable(
        "UCX_NET_DEVICES",
        "`nixl://`",
        "those at its start, without containers'",
        "network devices that UCX may use",
    ),
    Variable("UCX_TLS", "`nixl://`", "UCX's choice", "transports that UCX may use"),
)
