"""Prompts as users give them. A public path of `baton.common.request.prompts`."""

from baton.common.request.prompts import (
    ParsedPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    is_single,
    parse_prompt,
    parse_prompts,
    refuse_lora,
)

__all__ = [
    "ParsedPrompt",
    "Prompt",
    "TextPrompt",
    "TokensPrompt",
    "is_single",
    "parse_prompt",
    "parse_prompts",
    "refuse_lora",
]
