"""The architectures that GGUF files may state.

Files have the values in which models of an architecture differ, and leave out what all of them
share; `llama.cpp` has the rest in its code, and so have the modules of the architectures. A
checkpoint of `transformers` has all of it in config.json.
"""

from collections.abc import Mapping
from types import MappingProxyType

from baton.common.model_files.gguf.architecture import GgufArchitecture
from baton.common.model_files.gguf.dense_architectures import DENSE_ARCHITECTURES, OLMO3
from baton.common.model_files.gguf.expert_architectures import EXPERT_ARCHITECTURES, MIXTRAL
from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.hybrid_architectures import HYBRID_ARCHITECTURES
from baton.common.model_files.gguf.latent_architectures import LATENT_ARCHITECTURES

__all__ = ["architecture_of"]

_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        **DENSE_ARCHITECTURES,
        **EXPERT_ARCHITECTURES,
        **HYBRID_ARCHITECTURES,
        **LATENT_ARCHITECTURES,
    }
)
# By architecture and key, what files with a value of the key have instead.
_VARIANTS: Mapping[str, Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "llama": {"expert_count": MIXTRAL},
        "olmo2": {"attention.sliding_window": OLMO3},
    }
)


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file with one whole language model.

    Raises:
        ConfigurationError: the file has something else, or the architecture is not supported.
    """
    if header.metadata.get("general.type", "model") != "model":
        raise header.refuse(f"general.type {header.metadata['general.type']!r} is not supported")
    name = str(header.metadata.get("general.architecture"))
    if name not in _ARCHITECTURES:
        raise header.refuse(
            f"general.architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    for key, architecture in _VARIANTS.get(name, {}).items():
        if header.metadata.get(f"{name}.{key}"):
            return architecture
    return _ARCHITECTURES[name]
