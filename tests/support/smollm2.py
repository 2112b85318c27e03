"""SmolLM2-135M-Instruct for tests: chats, their tokens, and what `transformers` computes."""

from functools import cache

import jinja2
import torch

from baton.common.errors import ConfigurationError
from baton.common.model_files.files import open_model_files
from baton.common.model_files.named_models import smollm2_path
from tests.support.gguf_files import transformers_model

MODEL = "smollm2"
CHATS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "日本の首都はどこですか🗾",
    "Tell me a story about a fox and a dog.",
    "2, 4, 8, 16, what comes next?",
)
QUESTIONS = (
    *CHATS,
    "Who wrote Romeo and Juliet?",
    "Name three colours.",
    "What is the boiling point of water?",
    "Explain photosynthesis in one sentence.",
    "Translate 'good morning' to French.",
    "What is 12 * 12?",
    "Give me a recipe for pancakes.",
    "Écris une phrase en français.",
    "What is an operating system?",
    "List the planets of the solar system.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "How do I reverse a list in Python?",
    "Was ist die Hauptstadt von Deutschland?",
    "What does HTTP stand for?",
)
FOLLOW_UPS = ("Say that in fewer words.", "Give an example, please.", "Why? 🤔", "And then?")
NUM_TURNS = 3
TURN_TOKENS = 16


def is_installed():
    try:
        return smollm2_path().is_file()
    except ConfigurationError:
        return False


@cache
def tokenizer():
    return open_model_files(MODEL).load_tokenizer()


@cache
def reference_model():
    return transformers_model(smollm2_path(), torch.float64)


@cache
def template():
    text = open_model_files(MODEL).read_settings()["chat_template"]
    return jinja2.Environment(keep_trailing_newline=True).from_string(text)


def chat(messages):
    """The tokens of a conversation in the model's chat template."""
    text = template().render(messages=messages, add_generation_prompt=True)
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


def user(text):
    return {"role": "user", "content": text}


def reference_logits(tokens):
    with torch.inference_mode():
        return reference_model()(torch.tensor([tokens])).logits[0]
