"""The prompts of `baton bench speculation`: templates whose names and numbers differ each time."""

from collections.abc import Mapping, Sequence
from random import Random
from string import Template

from router.chat.messages import conversation_of
from router.chat.template import ChatTemplate
from router.requests.tokenizer import Tokenizer

__all__ = ["NUM_TEMPLATES", "WORKLOADS", "PromptMaker", "fill_template"]

_REPETITIVE = (
    """\
Rename the variable `total` to `$variable`, and return the whole code.

```python
def count_$noun(items, limit=$number):
    total = 0
    for item in items:
        if item.name == "$name":
            total += item.price * item.quantity
        elif item.town == "$town":
            total += item.price
    if total > limit:
        total = limit
    return total
```""",
    """\
Add a method `remove_$noun` to this class, and return the whole class.

```python
class ${Noun}Store:
    def __init__(self, owner="$name", capacity=$number):
        self.owner = owner
        self.capacity = capacity
        self.items = {}

    def add_$noun(self, key, value):
        if len(self.items) >= self.capacity:
            raise ValueError("the store is full")
        self.items[key] = value
```""",
    """\
Repeat this letter word for word, but change the day from Monday to Friday.

Dear $name,

Thank you for your order number $number. Your $noun will leave our store in $town on Monday and \
should reach you within three days. If nobody is at home, the driver will leave it with $other, \
as you have asked. Please keep this letter until the $noun has arrived.

Kind regards,
$other""",
    """\
Copy this list, and set the price of the last line to $number.

- $noun, red, small, $town: 12
- $noun, red, large, $town: 18
- $noun, blue, small, $town: 13
- $noun, blue, large, $town: 19
- $noun, green, small, $town: 14
- $noun, green, large, $town: 20""",
    """\
Change the port to $number, and return the whole JSON object.

```json
{
  "service": "$noun",
  "owner": {"name": "$name", "town": "$town"},
  "server": {"host": "$variable.example.com", "port": 8080, "timeout_s": 30},
  "logging": {"level": "info", "file": "/var/log/$noun.log", "keep_days": 14},
  "retries": {"attempts": 3, "delay_s": 2}
}
```""",
    """\
List the sentences of this report that have a number, word for word.

The town of $town has opened a new museum. It shows $number objects, and most of them were \
given by $name. Before that, the building was a school for 80 years. The director, $other, says \
that visitors like the $noun best. On the first day 450 people came. The museum is closed on \
Mondays. A ticket costs 7 euros.""",
    """\
Correct the spelling of this text, and return all of it.

$name lives in $town and colects old objects. In the hous there are $number of them, and each \
has its own label. The oldest one is a $noun that once belonged to $other. Every sumer $name \
opens the house to visitors and shows them the whole colection, from the first to the last.""",
    """\
Write each of these people as an HTML row like `<tr><td>NAME</td><td>TOWN</td><td>AGE</td></tr>`.

$name, $town, 31
$other, $town, 45
Maria, $town, 27
Peter, $town, 62
Chen, $town, 38
Amara, $town, $number""",
)

_ORDINARY = (
    "Why does the sky look blue by day and red in the evening? $name, a $job from $town, asked me "
    "this, and has about $number seconds to listen.",
    "Write a short story about $name, a $job in $town, who finds a $noun with the number $number.",
    "$name has a job interview as a $job in $town next week, after $number days without work. "
    "What advice would you give?",
    "How do I cook a dinner for $name and $other? One of us is a $job, and we have $number euros.",
    "What should we see during a weekend in a town like $town? $name is a $job and likes every "
    "$noun. We have $number euros.",
    "Explain to a $job named $name how a computer stores the number $number.",
    "Write a friendly email in which $name tells $other that the $job in $town cannot buy the "
    "$noun for $number euros.",
    "Is it better to rent or to buy a home in $town? $name is a $job and has saved $number euros.",
)

WORKLOADS: Mapping[str, Sequence[str]] = {"repetitive": _REPETITIVE, "ordinary": _ORDINARY}
"""By name, the templates. Answers to the repetitive ones copy much of the prompt."""

NUM_TEMPLATES = 8
"""Templates of each workload."""

_WORDS: Mapping[str, Sequence[str]] = {
    "town": (
        *("Lisbon", "Bergen", "Kyoto", "Quito", "Leeds", "Cork", "Ghent", "Turin", "Perth"),
        *("Oslo", "Salta", "Lagos", "Vienna", "Nairobi", "Riga", "Toledo", "Dover", "Hanoi"),
    ),
    "job": (
        *("baker", "nurse", "sailor", "teacher", "farmer", "painter", "lawyer", "driver"),
        *("gardener", "tailor", "singer", "engineer", "waiter", "doctor", "miner", "clerk"),
    ),
    "noun": (
        *("lamp", "clock", "kettle", "basket", "violin", "mirror", "bicycle", "carpet", "ladder"),
        *("barrel", "anchor", "camera", "saddle", "helmet", "wagon", "teapot", "statue", "drum"),
    ),
    "variable": (
        *("subtotal", "amount", "balance", "revenue", "weight", "score", "volume", "budget"),
        *("result", "turnover", "expense", "payment", "quota", "margin", "credit", "income"),
    ),
}
_NAMES = (
    *("Alice", "Bruno", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    *("Kofi", "Laura", "Miguel", "Nora", "Oscar", "Priya", "Quentin", "Rosa", "Samir", "Tara"),
    *("Ursula", "Victor", "Wanda", "Xavier", "Yusuf", "Zoe"),
)


class PromptMaker:
    """Makes the prompts of one model: chats if it has a chat template, else plain texts.

    Args:
        model: checkpoint folder, GGUF file, name or Hub name.
    """

    def __init__(self, model: str) -> None:
        self._tokenizer = Tokenizer.load(model)
        self._template = ChatTemplate.load(model)

    @property
    def makes_chats(self) -> bool:
        """Whether prompts are chats."""
        return self._template is not None

    def make(self, workload: str, number: int) -> tuple[int, ...]:
        """Returns the tokens of a workload's prompt of this number. Every number has another."""
        text = fill_template(workload, number)
        if self._template is None:
            return tuple(self._tokenizer.encode(f"{text}\n\n"))
        chat = conversation_of([{"role": "user", "content": text}])
        return tuple(self._tokenizer.encode(self._template.render(chat), add_special_tokens=False))


def fill_template(workload: str, number: int) -> str:
    """Returns the text of a workload's prompt of this number. The templates take turns."""
    random = Random(number)
    words = {field: random.choice(choices) for field, choices in _WORDS.items()}
    name, other = random.sample(_NAMES, 2)
    template = Template(WORKLOADS[workload][number % NUM_TEMPLATES])
    noun = words["noun"].capitalize()
    return template.substitute(words, name=name, other=other, Noun=noun, number=1000 + number)
