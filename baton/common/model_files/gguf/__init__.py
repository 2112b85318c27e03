"""GGUF files as models: one file has the config, the tokenizer, the chat template and the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This package reads the
description, without torch; `engine.runtime.weights.gguf_weights` reads the weights.
"""

from baton.common.model_files.gguf.file import GgufFile

__all__ = ["GgufFile"]
