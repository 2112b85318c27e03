"""Chats and chat templates of the public families, for comparisons with `transformers`."""

from pathlib import Path

from router.chat.template_source import TemplateSource, TemplateText

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
FAMILIES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a <city>: Köln & others",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
DOCUMENTS = [{"title": "Cologne", "text": "It rains."}, {"title": "Köln", "text": "Es regnet."}]
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}},
}

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " What is <b>new</b>? "}
ANSWER = {"role": "assistant", "content": "Nothing, I guess. "}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNothing."}
REASONED = {"role": "assistant", "content": "Nothing.", "reasoning_content": "Hm."}
CALLING = {"role": "assistant", "content": "", "reasoning": "A tool.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "call12345", "name": "weather"}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}

# Messages, and the other arguments of `apply_chat_template`.
CHATS = {
    "one turn": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "no generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "reasoning in the text": ([USER, THOUGHT, USER, THOUGHT], {"add_generation_prompt": False}),
    "reasoning apart": ([USER, REASONED], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "a call": ([USER, CALLING, RESULT], {"tools": TOOLS}),
    "two results": ([USER, CALLING, RESULT, RESULT], {"tools": TOOLS}),
    "documents": ([USER], {"documents": DOCUMENTS}),
    "prefill": ([USER, {"role": "assistant", "content": "I think that"}], CONTINUED),
    "prefill that ends with a space": ([USER, ANSWER], CONTINUED),
    "prefill of a user": ([USER], CONTINUED),
    "prefill with reasoning": ([USER, {"role": "assistant", "content": "<think>\nSo"}], CONTINUED),
    "thinking off": ([USER], {"enable_thinking": False}),
    "kwargs": (
        [SYSTEM, USER],
        {
            "date_string": "1 May 2026",
            "reasoning_effort": "high",
            "citation_mode": "fast",
            "bos_token": "<other>",
        },
    ),
    "two assistants": ([ANSWER, ANSWER], {}),
}


def source_of(**texts):
    """A model with the given templates."""
    named = {name: TemplateText(text, f"{name}.jinja") for name, text in texts.items()}
    return TemplateSource(named, SPECIAL_TOKENS)
