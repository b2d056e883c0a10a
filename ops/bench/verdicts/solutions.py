"""Solutions in GSM8K's style: a few sentences of arithmetic with calculator marks, and a number at
the end.

The solutions come from a seed, or from GSM8K's own JSONL. The templates are ours: no line of GSM8K
is in them. Their numbers have the range of GSM8K's answers: mostly below a thousand, some with
thousands, cents or per cents. As in GSM8K, not every line ends with a full stop, and the working
uses "if", "not" and "could" of other things."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Maya", "Tom", "Lena", "Omar", "Priya", "Jonas", "Ada", "Felix")


@dataclass(frozen=True, slots=True)
class Solution:
    """One worked solution."""

    working: str
    """All lines but the last one of GSM8K's form."""
    answer: str
    """A number, without currency, unit or commas."""
    unit: str
    """The counted thing; ``dollars`` for money."""

    @property
    def number(self) -> float:
        """The answer as a number."""
        return float(self.answer)


def solutions(number: int, seed: int = 0) -> list[Solution]:
    """Return ``number`` solutions, each template in turn."""
    rng = random.Random(seed)
    return [TEMPLATES[index % len(TEMPLATES)](rng) for index in range(number)]


def read_gsm8k(path: Path) -> list[Solution]:
    """Read GSM8K's lines of ``question`` and ``answer``."""
    found: list[Solution] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        working, _, answer = json.loads(line)["answer"].rpartition("####")
        found.append(
            Solution(working.strip(), answer.strip().replace(",", ""), "dollars" if "$" in working else "in all")
        )
    return found


def _text(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"


def _shop(rng: random.Random) -> Solution:
    name, price, number = rng.choice(NAMES), rng.randint(2, 40), rng.randint(2, 60)
    paid = rng.randint(1, price * number - 1)
    total = price * number
    left = total - paid
    return Solution(
        f"The {number} books cost {number} * {price} = $<<{number}*{price}={total}>>{total} in all.\n"
        f"{name} has paid ${paid} of that, so ${total} - {paid} = $<<{total}-{paid}={left}>>{left} is left to pay.",
        str(left),
        "dollars",
    )


def _eggs(rng: random.Random) -> Solution:
    name, laid, eaten, price = rng.choice(NAMES), rng.randint(10, 90), rng.randint(1, 9), rng.randint(2, 9)
    sold = laid - eaten
    return Solution(
        f"{name} sells {laid} - {eaten} = <<{laid}-{eaten}={sold}>>{sold} eggs a day.\n"
        f"That makes {sold} * {price} = $<<{sold}*{price}={sold * price}>>{sold * price} every day at the market.",
        str(sold * price),
        "dollars",
    )


def _house(rng: random.Random) -> Solution:
    bought, repairs, sold = (rng.randint(40, 400) * 1000 for _ in range(3))
    cost = bought + repairs
    sold += cost
    return Solution(
        f"The house and its repairs cost {bought:,}+{repairs:,}=$<<{bought}+{repairs}={cost}>>{cost:,}.\n"
        f"So the profit is {sold:,}-{cost:,}=$<<{sold}-{cost}={sold - cost}>>{sold - cost:,}.",
        str(sold - cost),
        "dollars",
    )


def _cents(rng: random.Random) -> Solution:
    name, quarters, number = rng.choice(NAMES), rng.randint(3, 79), rng.randint(2, 19)
    price = quarters / 4
    total = price * number
    return Solution(
        f"One juice costs ${price:.2f}.\n"
        f"{name} buys {number}, which is {number} * {price:.2f} = $<<{number}*{price:.2f}={total:.2f}>>{total:.2f}.",
        f"{total:.2f}" if total % 1 else f"{total:.0f}",
        "dollars",
    )


def _percent(rng: random.Random) -> Solution:
    pupils, share = rng.choice((20, 40, 50, 60, 80, 200)), rng.choice((10, 15, 20, 25, 30, 45))
    dancing = pupils * share / 100
    return Solution(
        f"There are {pupils} x {share}/100 = <<{pupils}*{share}/100={_text(dancing)}>>{_text(dancing)} pupils who dance.\n"
        f"The others are 100% - {share}% = {100 - share}% of the class.",
        str(100 - share),
        "percent",
    )


def _road(rng: random.Random) -> Solution:
    hours, speed, back = rng.randint(2, 9), rng.randint(3, 12) * 10, rng.randint(5, 19)
    away = hours * speed
    return Solution(
        f"After {hours} hours the bus is {hours}*{speed}=<<{hours}*{speed}={away}>>{away} miles away.\n"
        f"It drives {back} miles back, so it is {away}-{back}=<<{away}-{back}={away - back}>>{away - back} miles from home.",
        str(away - back),
        "miles",
    )


def _age(rng: random.Random) -> Solution:
    older, younger, years = rng.choice(NAMES), rng.choice(NAMES), rng.randint(2, 30)
    now = rng.randint(5, 60)
    age = now + years
    return Solution(
        f"{older} is {years} years older than {younger}, who is {now}: {now} + {years} = <<{now}+{years}={age}>>{age}.\n"
        f"In 3 years that will be {age} + 3 = <<{age}+3={age + 3}>>{age + 3}.",
        str(age + 3),
        "years old",
    )


def _dozens(rng: random.Random) -> Solution:
    dozens, a_day = rng.randint(2, 30), rng.choice((2, 3, 4, 6))
    eggs = dozens * 12
    return Solution(
        f"{dozens} dozen are {dozens} * 12 = <<{dozens}*12={eggs}>>{eggs} eggs.\n"
        f"At {a_day} a day they last {eggs}/{a_day} = <<{eggs}/{a_day}={eggs // a_day}>>{eggs // a_day} days.",
        str(eggs // a_day),
        "days",
    )


def _tank(rng: random.Random) -> Solution:
    rate, minutes, spilt = rng.randint(2, 30), rng.randint(4, 50), rng.randint(1, 7)
    filled = rate * minutes
    return Solution(
        f"First find what flows in: {rate} liters/minute * {minutes} minutes = <<{rate}*{minutes}={filled}>>{filled} liters.\n"
        f"Then take away what is spilt: {filled} - {spilt} = <<{filled}-{spilt}={filled - spilt}>>{filled - spilt} liters.",
        str(filled - spilt),
        "liters",
    )


def _town(rng: random.Random) -> Solution:
    people, born, left = rng.randint(1_000, 90_000), rng.randint(10, 900), rng.randint(10, 900)
    after = people + born - left
    more = people + born
    return Solution(
        f"After the births there are {people:,} + {born} = <<{people}+{born}={more}>>{more:,} people.\n"
        f"{left} move away: {more:,} - {left} = <<{more}-{left}={after}>>{after:,}.",
        str(after),
        "people",
    )


def _sheep(rng: random.Random) -> Solution:
    first, times = rng.randint(2, 90), rng.randint(2, 9)
    second, both = times * first, first + times * first
    return Solution(
        f"If one farm has {first} sheep, the second could have "
        f"{times} * {first} = <<{times}*{first}={second}>>{second} sheep.\n"
        f"So if none of them are sold then together they have {first} + {second} = <<{first}+{second}={both}>>{both} sheep",
        str(both),
        "sheep",
    )


def _class(rng: random.Random) -> Solution:
    pupils, rest = rng.randint(10, 40), rng.randint(1, 9)
    others = pupils - rest
    return Solution(
        f"Of the class {rest} do not like cake\n"
        f"Some might guess {pupils}, but {pupils} - {rest} = <<{pupils}-{rest}={others}>>{others} others like it",
        str(others),
        "pupils",
    )


TEMPLATES: tuple[Callable[[random.Random], Solution], ...] = (
    _shop,
    _eggs,
    _house,
    _cents,
    _percent,
    _road,
    _age,
    _dozens,
    _tank,
    _town,
    _sheep,
    _class,
)
