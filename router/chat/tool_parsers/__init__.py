"""Tool parsers: one file per format, and `tool_parser`, which finds them by name.

The names are vLLM's.
"""

from collections.abc import Mapping
from typing import Any

from baton.common.flags.plugins import load_plugin
from router.chat.tool_parsers.base import ToolParser
from router.chat.tool_parsers.deepseek import (
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    KimiK2ToolParser,
)
from router.chat.tool_parsers.gemma import FunctionGemmaToolParser, Gemma4ToolParser
from router.chat.tool_parsers.glm import Glm4ToolParser, GlmToolParser
from router.chat.tool_parsers.harmony import HarmonyToolParser
from router.chat.tool_parsers.hermes import (
    GraniteToolParser,
    HermesToolParser,
    Phi4MiniToolParser,
)
from router.chat.tool_parsers.invoke import DeepSeekV32ToolParser, MiniMaxM2ToolParser
from router.chat.tool_parsers.llama3_json import Llama3JsonToolParser
from router.chat.tool_parsers.mistral import MistralToolParser
from router.chat.tool_parsers.plain_json import ForcedCallsParser, JsonToolParser, NamedCallParser
from router.chat.tool_parsers.pythonic import (
    Lfm2ToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from router.chat.tool_parsers.qwen3_coder import Qwen3CoderToolParser, SeedOssToolParser

__all__ = ["ToolParser", "forced_tool_parser", "tool_parser"]

_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "functiongemma": FunctionGemmaToolParser,
    "gemma4": Gemma4ToolParser,
    "glm4_0414": Glm4ToolParser,
    "glm45": GlmToolParser,
    "glm47": GlmToolParser,
    "granite": GraniteToolParser,
    "granite4": HermesToolParser,
    "hermes": HermesToolParser,
    "json": JsonToolParser,
    "kimi_k2": KimiK2ToolParser,
    "lfm2": Lfm2ToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_json": Llama3JsonToolParser,
    "llama4_pythonic": PythonicToolParser,
    "minimax_m2": MiniMaxM2ToolParser,
    "mistral": MistralToolParser,
    "olmo3": Olmo3ToolParser,
    "openai": HarmonyToolParser,
    "phi4_mini_json": Phi4MiniToolParser,
    "pythonic": PythonicToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "qwen3_xml": Qwen3CoderToolParser,
    "seed_oss": SeedOssToolParser,
}


def tool_parser(name: str) -> type[ToolParser]:
    """Returns a parser's class.

    Args:
        name: of a parser in this package, of an entry point, or `module:Class`.

    Raises:
        ConfigurationError: there is none of this name, or it cannot be imported.
    """
    return load_plugin(name, ToolParser, "--tool-call-parser", "baton.tool_parsers", _PARSERS)


def forced_tool_parser(tool_choice: str | Mapping[str, Any] | None) -> ToolParser | None:
    """Returns the parser for answers whose form a `tool_choice` forces, for every model.

    Args:
        tool_choice: as in OpenAI's chat API, checked.

    Returns:
        None for a choice that forces no call.
    """
    if tool_choice == "required":
        return ForcedCallsParser()
    if isinstance(tool_choice, Mapping):
        return NamedCallParser(tool_choice["function"]["name"])
    return None
