"""Tool parsers of single families: texts, and the content and calls in them, for every cut."""

import pytest

from router.chat.reasoning_parsers import reasoning_parser
from router.chat.tool_parsers import tool_parser
from tests.support.chat_parsers import check_cuts, output_of

F1 = ("f", '{"a": 1}')
G = ("g", "{}")
JSON_F1 = '{"name": "f", "arguments": {"a": 1}}'
JSON_G = '{"name": "g", "arguments": {}}'

PIPED = "<|tool_call|>"
GRANITE = [
    ("Hello", "Hello", []),
    (f"{PIPED}[{JSON_F1}, {JSON_G}]", None, [F1, G]),
    (f"{PIPED} {JSON_F1} {PIPED} {JSON_G}\n", None, [F1, G]),
    (f"Hi <tool_call>[{JSON_F1}]", "Hi ", [F1]),
    (f"{PIPED}[{{'name': 'f', 'arguments': {{'a': 1}}}}] bye", "bye", [F1]),
    # Cut short or malformed.
    (f"{PIPED}[]", f"{PIPED}[]", []),
    (f'{PIPED}[{{"name": "f", "arguments": {{"a"', None, [("f", '{"a"')]),
    (f"{PIPED}[{JSON_F1}, 3]", ", 3]", [F1]),
]
PHI4_MINI = [
    (f"{PIPED}[{JSON_F1}, {JSON_G}]<|/tool_call|>", None, [F1, G]),
    (f"{PIPED}{JSON_F1}<|/tool_call|> bye", " bye", [F1]),
    (f"Hi functools[{JSON_F1}, {JSON_G}]", "Hi ", [F1, G]),
    (f"{PIPED}[{JSON_F1}]<|/tool", None, [F1]),
    ("use functools[0] and functools", "use functools[0] and functools", []),
]


def seek(text):
    """Returns a text with DeepSeek's tokens in place of tags such as <calls>."""
    names = {"calls": "tool calls begin", "call": "tool call begin", "sep": "tool sep"}
    names |= {"/calls": "tool calls end", "/call": "tool call end"}
    for tag, name in names.items():
        text = text.replace(f"<{tag}>", f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>")
    return text


def kimi(text):
    """Returns a text with Kimi K2's tokens in place of tags such as <calls>."""
    names = {"calls": "tool_calls_section_begin", "/calls": "tool_calls_section_end"}
    names |= {"call": "tool_call_begin", "/call": "tool_call_end"}
    for tag, name in (names | {"sep": "tool_call_argument_begin"}).items():
        text = text.replace(f"<{tag}>", f"<|{name}|>")
    return text


DEEPSEEK = [
    (seek(text), content and seek(content), calls)
    for text, content, calls in (
        ("Hello <cal", "Hello <cal", []),
        (
            '<calls><call>function<sep>f\n```json\n{"a": 1}\n```</call>\n'
            "<call>function<sep>g\n```json\n{}\n```</call></calls>",
            None,
            [F1, G],
        ),
        ('Hi <calls><call>f<sep>{"a": 1}</call><call>g<sep>{}</call></calls> bye', "Hi  bye",
         [F1, G]),
        # Tokens that models forget.
        ('<call>f<sep>{"a": 1}</call> bye', " bye", [F1]),
        ('<calls><call>function<sep>f\n{"a": 1}<call>g<sep>{}', None, [F1, G]),
        ('<calls><call>f<sep>{"a": "</call>"}</calls>', None, [("f", '{"a": "</call>"}')]),
        # Cut short.
        ("<calls>", "<calls>", []),
        ("<calls><call>function<sep>f\n```js", "<calls><call>function<sep>f\n```js", []),
        ('<calls><call>f<sep>{"a": [1', None, [("f", '{"a": [1')]),
        ('<calls><call>function<sep>f\n```json\n{"a": 1}\n``', None, [F1]),
        # Malformed.
        ("<calls><call>f {}</call></calls>", "<calls><call>f {}</call></calls>", []),
        ("<calls><call>f<sep>null</call></calls>", "<calls><call>f<sep>null</call></calls>", []),
        ('<calls><call>f<sep>{"a": !}</call>', "!}</call>", [("f", '{"a": ')]),
        ('<calls><call>f<sep>{"a": 1}</call>\n\nSo <call>', "\n\nSo <call>", [F1]),
    )
]  # fmt: skip
DEEPSEEK = [
    (text, content, [(name, seek(arguments)) for name, arguments in calls])
    for text, content, calls in DEEPSEEK
]

KIMI = [
    (kimi(text), content and kimi(content), calls)
    for text, content, calls in (
        (
            '<calls><call>functions.f:0<sep>{"a": 1}</call>'
            "<call>functions.g:1<sep>{}</call></calls>",
            None,
            [F1, G],
        ),
        ('Hi <calls> <call> functions.f:12 <sep> {"a": 1} </call> </calls> bye', "Hi  bye", [F1]),
        # Without what surrounds a name, or what is around calls.
        ('<call>f<sep>{"a": 1}</call> bye', " bye", [F1]),
        ("<call>f:g:1<sep>{}</call>", None, [("f:g", "{}")]),
        ("<call>functions.functions.g<sep>{}", None, [("functions.g", "{}")]),
        # Cut short.
        ("<calls><call>functions.f:", "<calls><call>functions.f:", []),
        # Malformed.
        ("<calls><call>functions.f:0 {}</call>", "<calls><call>functions.f:0 {}</call>", []),
        ("<calls><call><sep>{}</call></calls>", "<calls><call><sep>{}</call></calls>", []),
    )
]

GLM = [
    ("Hello <tool", "Hello <tool", []),
    (
        "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>\ny\n</arg_value>\n</tool_call>",
        None,
        [("f", '{"a": "x", "b": "\\ny\\n"}')],
    ),
    (
        "Hi<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
        "<tool_call>g</tool_call> bye",
        "Hi bye",
        [("f", '{"a": "x"}'), G],
    ),
    ("<tool_call>g\n\n</tool_call>", None, [G]),
    (
        "<tool_call>f\n<arg_key> a </arg_key> <arg_value></tool_call><arg_key></arg_value>"
        "</tool_call>",
        None,
        [("f", '{"a": "</tool_call><arg_key>"}')],
    ),
    # Cut short.
    ("<tool_call>f\n", "<tool_call>f\n", []),
    ("<tool_call>f\n<arg_key>a</arg_", None, [("f", "")]),
    ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg", None, [("f", '{"a": "x</arg')]),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>\n</tool", None,
     [("f", '{"a": "x"}')]),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>", None, [("f", '{"a": "x"}')]),
    # Malformed.
    (f"<tool_call>{JSON_F1}</tool_call>", f"<tool_call>{JSON_F1}</tool_call>", []),
    ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    (
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> y</tool_call>",
        " y</tool_call>",
        [("f", '{"a": "x"')],
    ),
]  # fmt: skip

GLM4 = [
    ("Hello\nthere", "Hello\nthere", []),
    ('f\n{"a": 1}', None, [F1]),
    ('\nf\n{"a": 1}<|assistant|>\ng\n{}<|observation|>', None, [F1, G]),
    ('Hi <|assistant|>f\n{"a": 1}', "Hi ", [F1]),
    ("f\n{'a': 1}", None, [F1]),
    # Cut short.
    ("f", "f", []),
    ("f\n", "f\n", []),
    ('f\n{"a": [1', None, [("f", '{"a": [1')]),
    ('f\n{"a": 1}<|obs', None, [F1]),
    # Malformed.
    ('f {"a": 1}', 'f {"a": 1}', []),
    ('See\nf\n{"a": 1}', 'See\nf\n{"a": 1}', []),
    ('f\n{"a": 1} and more', " and more", [F1]),
]
CALLS, CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE_F = '<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>'
TEXT_F = ("f", '{"a": "x"}')
MINIMAX = [
    ("Hello <minimax", "Hello <minimax", []),
    (f"\n{CALLS}\n{INVOKE_F}\n{CALLS_END}", None, [TEXT_F]),
    (
        f'Hi\n{CALLS}{INVOKE_F}<invoke name="g"></invoke>{CALLS_END} bye',
        "Hi\n bye",
        [TEXT_F, G],
    ),
    (f'{CALLS}<invoke name="f"><parameter name="a">\n<b> </c>\n</parameter></invoke>', None,
     [("f", '{"a": "\\n<b> </c>\\n"}')]),
    # Tags that models forget.
    (f"Hi {INVOKE_F} bye", "Hi  bye", [TEXT_F]),
    # Cut short.
    (CALLS, CALLS, []),
    (f'{CALLS}<invoke name="f', f'{CALLS}<invoke name="f', []),
    (f'{CALLS}<invoke name="f">\n<para', None, [("f", "")]),
    (f'{CALLS}<invoke name="f"><parameter name="a">x</par', None, [("f", '{"a": "x</par')]),
    (f'{CALLS}<invoke name="f"><parameter name="a">x</parameter>\n</inv', None, [TEXT_F]),
    (f'{CALLS}<invoke name="f"><parameter name="a">x</parameter>', None, [TEXT_F]),
    (f"{CALLS}\n{INVOKE_F}\n</minimax", None, [TEXT_F]),
    # Malformed.
    (f"{CALLS}{JSON_F1}{CALLS_END}", f"{CALLS}{JSON_F1}{CALLS_END}", []),
    ("<invoke name=f>", "<invoke name=f>", []),
    (f'{CALLS}<invoke name="f">x</invoke>', "x</invoke>", [("f", "")]),
    (f'{CALLS}<invoke name="f"><parameter name="a" x="y">z', '<parameter name="a" x="y">z',
     [("f", "")]),
]  # fmt: skip
DSML = [
    (text.replace("<@", "<\uff5cDSML\uff5c").replace("</@", "</\uff5cDSML\uff5c"), content, calls)
    for text, content, calls in (
        (
            '<@function_calls>\n<@invoke name="f">\n<@parameter name="a" string="false">1'
            '</@parameter>\n<@parameter name="b" string="true">1</@parameter>\n</@invoke>\n'
            "</@function_calls>",
            None,
            [("f", '{"a": 1, "b": "1"}')],
        ),
        (
            'Hi<@function_calls><@invoke name="f"><@parameter name="a" string="false">[1, {}]'
            '</@parameter><@parameter name="b" string="false">x</@parameter></@invoke>'
            '<@invoke name="g">\n\n</@invoke></@function_calls>',
            "Hi",
            [("f", '{"a": [1, {}], "b": "x"}'), G],
        ),
        ('<@function_calls><@invoke name="f"><@parameter name="a">1</@parameter>', None,
         [("f", '{"a": "1"}')]),
        ('<@function_calls><@invoke name="f"><@parameter name="a" str', None, [("f", "")]),
        ('<invoke name="f">', '<invoke name="f">', []),
    )
]  # fmt: skip
SEED = [
    (
        "<seed:tool_call>\n<function=f>\n<parameter=a>x\ny</parameter>\n</function>\n"
        "</seed:tool_call>",
        None,
        [("f", '{"a": "x\\ny"}')],
    ),
    ("Hi <seed:tool_call><function=g></function></seed:tool", "Hi ", [G]),
    ("<tool_call>f</tool_call>", "<tool_call>f</tool_call>", []),
]

LFM = "<|tool_call_start|>"
LFM_END = "<|tool_call_end|>"
LFM2 = [
    ("Hello <|tool", "Hello <|tool", []),
    (f"{LFM}[f(a=1), g()]{LFM_END}Checking.", "Checking.", [F1, G]),
    (f"Hi {LFM}[f(a=1)]{LFM_END}\n{LFM}[g()]{LFM_END}", "Hi ", [F1, G]),
    (f"{LFM}[f(a='x', b=[1, {{'k': true}}])]{LFM_END}", None,
     [("f", '{"a": "x", "b": [1, {"k": true}]}')]),
    (f"{LFM}f(a=1){LFM_END}", None, [F1]),
    # JSON, which a prompt may ask for.
    (f"{LFM}[{JSON_F1}, {JSON_G}]{LFM_END}", None, [F1, G]),
    (f"{LFM}{JSON_F1}{LFM_END}bye", "bye", [F1]),
    # Cut short or malformed.
    (f"{LFM}[f(a=1)]", None, [F1]),
    (f"{LFM}[f(a=1)]<|tool_ca", None, [F1]),
    (f"{LFM}[f(a='x", None, [("f", '{"a": "x')]),
    (f"{LFM}[1, 2]{LFM_END}", f"{LFM}[1, 2]{LFM_END}", []),
    (f"{LFM}none{LFM_END}", f"{LFM}none{LFM_END}", []),
    (f"{LFM}[f(a=it's)]{LFM_END}", f"'s)]{LFM_END}", [("f", '{"a": it')]),
]  # fmt: skip
OLMO3 = [
    ("<function_calls>\nf(a=1)\ng()\n</function_calls>", None, [F1, G]),
    ("Hi <function_calls>f(a=1)</function_calls> bye", "Hi  bye", [F1]),
    ("<function_calls>\n[f(a=1), g()]\n</function_calls>", None, [F1, G]),
    (
        "<function_calls>\nf(a='x', b=null, c=True)",
        None,
        [("f", '{"a": "x", "b": null, "c": true}')],
    ),
    ("<function_calls>\nf(a=1)\n</func", None, [F1]),
    ("<function_calls>\nf(a=1)\nand more", "\nand more", [F1]),
    ("<function_calls>\n</function_calls>", "<function_calls>\n</function_calls>", []),
]


def gemma4(text):
    return text.replace("<s>", "<|tool_call>").replace("</s>", "<tool_call|>").replace("'", '<|"|>')


F_COMPACT = ("f", '{"a":1}')
GEMMA4 = [
    (gemma4(text), content and gemma4(content), calls)
    for text, content, calls in (
        ("Hello <|tool", "Hello <|tool", []),
        ("<s>call:f{a:1}</s><s>call:g{}</s>", None, [F_COMPACT, G]),
        ("Hi <s>call:f{a:1}</s> bye", "Hi  bye", [F_COMPACT]),
        (
            "<s>call:f{a:'x, \"y\" {[\n',b:[1,'z',-2.5],c:{k:true,'l m':None}}</s>",
            None,
            [
                (
                    "f",
                    '{"a":"x, \\"y\\" {[\\n","b":[1,"z",-2.5],"c":{"k":true,"l m":null}}',
                )
            ],
        ),
        # Strings whose quotes are missing, and usual quotes.
        ('<s>call:f{a:Paris,b:"x"}</s>', None, [("f", '{"a":"Paris","b":"x"}')]),
        # Cut short.
        ("<s>call:f", "<s>call:f", []),
        ("<s>call:f{a:'x<|", None, [("f", '{"a":"x<|')]),
        ("<s>call:f{a:1}", None, [F_COMPACT]),
        ("<s>call:f{a:1}<tool_c", None, [F_COMPACT]),
        # Malformed.
        ("<s>f{a:1}</s>", "<s>f{a:1}</s>", []),
        ("<s>call:f(1)</s>", "<s>call:f(1)</s>", []),
        ("<s>call:f{a:!}</s>", "!}</s>", [("f", '{"a":')]),
    )
]
FUNCTION_GEMMA = [
    (
        "<start_function_call>call:f{a:<escape>London, UK<escape>,b:2}<end_function_call>",
        None,
        [("f", '{"a":"London, UK","b":2}')],
    ),
    ("<start_function_call>call:f{}", None, [("f", "{}")]),
]

ANALYSIS = "<|channel|>analysis<|message|>"
START = "<|start|>assistant"
FINAL = f"{START}<|channel|>final<|message|>"
CALL_F = f'{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}'
HARMONY = [
    ("", "", None, []),
    (f"{ANALYSIS}hm<|end|>{FINAL}yes<|return|>", "yes", "hm", []),
    (f"{ANALYSIS}hm<|end|>{FINAL}yes", "yes", "hm", []),
    ("<|channel|>final<|message|>yes", "yes", None, []),
    (f"{ANALYSIS}hm<|end|>{CALL_F}<|call|>", None, "hm", [F1]),
    (f"{ANALYSIS}hm<|end|>{CALL_F}", None, "hm", [F1]),
    # The recipient behind the role, at the beginning too; names without a namespace.
    (f'{START} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>', None, None,
     [F1]),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', None, None, [F1]),
    ('<|channel|>commentary to=f<|constrain|>json<|message|>{"a": 1}', None, None, [F1]),
    # Preambles, several parts of reasoning, several calls.
    (
        f"{ANALYSIS}one<|end|>{START}<|channel|>commentary<|message|>Plan.<|end|>"
        f"{START}{ANALYSIS}two<|end|>{CALL_F}<|call|>{CALL_F}<|call|>{FINAL}yes",
        "Plan.\nyes", "one\ntwo", [F1, F1],
    ),
    # Tags are text where no message begins or ends.
    (f"{FINAL}a <|end|> b <|start|>c", "a <|end|> b <|start|>c", None, []),
    (f"{ANALYSIS}a <|call|> b<|end|>", None, "a <|call|> b", []),
    ("The rest of an answer.<|return|>", "The rest of an answer.", None, []),
    # Cut short.
    ("<|chan", "<|chan", None, []),
    ("<|channel|>ana", "<|channel|>ana", None, []),
    (f"{ANALYSIS}hm<|e", None, "hm<|e", []),
    (f"{ANALYSIS}hm<|end|>{START}", START, "hm", []),
    (f"{CALL_F[:-4]}", None, None, [("f", '{"a"')]),
    (f"{CALL_F}<|ca", None, None, [F1]),
    # Malformed: text to an unknown recipient, and headers that are none.
    (f"{START}<|channel|>analysis to=python<|message|>1+1<|call|>",
     f"{START}<|channel|>analysis to=python<|message|>1+1<|call|>", None, []),
    (f"{START}<|channel|>analysis\n\nhm", f"{START}<|channel|>analysis\n\nhm", None, []),
    (f"{CALL_F[:-1]}!}}<|call|>", "!}<|call|>", None, [("f", '{"a": 1')]),
    (f"<|channel|>{'a' * 600}<|message|>", f"<|channel|>{'a' * 600}<|message|>", None, []),
]  # fmt: skip

TABLES = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK[2:4],
    "deepseek_v32": DSML,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "glm4_0414": GLM4,
    "glm45": GLM,
    "granite": GRANITE,
    "kimi_k2": KIMI,
    "lfm2": LFM2,
    "minimax_m2": MINIMAX,
    "olmo3": OLMO3,
    "phi4_mini_json": PHI4_MINI,
    "seed_oss": SEED,
}


@pytest.mark.parametrize("name", TABLES)
def test_content_and_calls(name):
    for text, content, calls in TABLES[name]:
        check_cuts(output_of(tool_parser(name)), text, (content, None, calls))


def test_calls_of_kimi_have_the_ids_that_the_model_wrote():
    parser = tool_parser("kimi_k2")()
    calls = parser.push(kimi("<call>functions.f:7<sep>{}</call><call>g<sep>{}</call>")).tool_calls
    assert [call.name for call in calls] == ["f", "g"]
    assert calls[0].id == "functions.f:7"
    assert calls[1].id.startswith("call_")


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HARMONY)
def test_messages_of_harmony(text, content, reasoning, calls):
    make = output_of(tool_parser("openai"), reasoning_parser("openai_gptoss"))
    check_cuts(make, text, (content, reasoning, calls))
