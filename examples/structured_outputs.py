"""Structured outputs: texts of a given form, from a router.

    baton serve                                               # in another terminal
    python examples/structured_outputs.py 127.0.0.1:50051

The demo model writes texts of the right form that make little sense.
"""

import sys

from baton import Client, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["admin", "guest"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city", "unit"],
            },
        },
    }
]
# Without whitespace, most tokens between the values are forced and need no draw.
FORMS = {
    "choice": StructuredOutputs(choice=["yes", "no"]),
    "regex": StructuredOutputs(regex=r"[0-9]{3}-[0-9]{4}"),
    "grammar": StructuredOutputs(grammar='root ::= number (" + " number)*\nnumber ::= [0-9]'),
    "json": StructuredOutputs(json=PERSON, disable_any_whitespace=True),
    "response_format": StructuredOutputs.of_response_format(
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    ),
    "tool": StructuredOutputs.of_tools(
        TOOLS, {"type": "function", "function": {"name": "weather"}}
    ),
}


def main(address: str) -> None:
    """Prints a text of each form."""
    with Client(address) as client:
        for name, form in FORMS.items():
            params = {"structured_outputs": form, "max_tokens": 200, "temperature": 0.7, "seed": 3}
            result = client.generate("The answer is ", params)
            print(f"{name}: {result.text!r} ({result.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1])
