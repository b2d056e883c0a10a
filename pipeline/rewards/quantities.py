r"""Reads numbers with their units exactly, as responses and data lines write them.

A number is ``42``, ``-3.50``, ``.5``, ``5.``, ``1,234`` (groups of three; also ``1{,}234``,
``1\,234`` and ``1 234``), ``3/4``, ``\frac34``, ``1 1/2`` and ``1\frac12`` (mixed), ``1e3``,
``1.2\times10^3``, ``0.\overline{3}``, or words (``twenty-two``, ``1 million``). A comma not
followed by a group of three digits separates two numbers: there are no decimal commas. Otherwise
white space never joins digits: ``1 2`` is not a number. What follows a number is its unit, unless
it can be an operator, a variable or another number."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 4_000
"""Limit for digits and for powers of ten, because longer numbers take quadratic time."""
PERCENT = "%"
GROUP = "\u2063"
"""Stands for an unambiguous thousands separator, ``{,}`` or ``\\,``."""

CURRENCY = r"(?:\\?[$£€¥₹]|(?:US|USD|EUR|GBP|Rs\.?)(?![A-Za-z]))"
_INT = rf"(?:[0-9]{{1,3}}(?:[,{GROUP}][0-9]{{3}})+(?![0-9])|[0-9]{{1,3}}(?: [0-9]{{3}})+(?![0-9/])|[0-9]+)"
_DECIMAL = rf"(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"\^\s*(?:\{\s*(?P<%s>[-+]?[0-9]+)\s*\}|(?P<%s>[-+]?[0-9]+))"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>{CURRENCY}\s*)*(?P<inner>[-+]?)\s*(?:"
    rf"(?P<mixed>{_INT})(?:\s*\\frac\{{(?P<mixed_top>[0-9]+)\}}\{{(?P<mixed_below>[0-9]+)\}}"
    r"|\s+(?:and\s+)?(?P<mixed_over>[0-9]+)\s*/\s*(?P<mixed_under>[0-9]+)(?![0-9./]))"
    rf"|\\frac\{{\s*(?P<top>[-+]?{_DECIMAL})\s*\}}\{{\s*(?P<below>[-+]?{_DECIMAL})\s*\}}"
    rf"|10\s*{_POWER % ('bare_power', 'bare_tight')}(?![0-9.])"
    r"|(?P<head>[0-9]*\.[0-9]*)(?:\\(?:overline|bar|dot)\s*\{(?P<repeat>[0-9]+)\}|\((?P<cycle>[0-9]+)\))"
    rf"|(?P<number>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]+)(?![0-9A-Za-z])"
    rf"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*{_POWER % ('power', 'tight')}(?![0-9.])"
    rf"|\s*/\s*(?P<under>{_INT})(?![0-9./]))?)"
)

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {word: value for value, word in enumerate(_SMALL)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(rf"\s*({'|'.join(_SCALES)})s?\b", re.I)
_SHARES = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4}
_SHARES |= {"fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_SHARE = re.compile(rf"(?:(?:\s+|\s*-\s*)(?:of\s+)?)?({'|'.join(_SHARES)})s?\b", re.I)
_IN_WORDS = re.compile(
    rf"(?P<minus>(?:minus|negative)\s+)?(?:an?\s+(?={'|'.join(_SCALES)}))?(?P<words>(?:{'|'.join((*_WORDS, *_SCALES))})"
    rf"(?:(?:\s+|\s*-\s*|\s+and\s+)(?:{'|'.join((*_WORDS, *_SCALES))}))*)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    value: Fraction
    unit: str = ""
    """In one spelling (``cm``, ``mi / h``, ``$``, ``%``); "" without a unit."""


class TooLong(ValueError):
    """A number has more than ``MAX_DIGITS`` digits."""


# -- units -----------------------------------------------------------------------------------------

_SPELLINGS = {
    spelling: unit
    for unit, spellings in {
        "cm": ("centimeter", "centimetre"),
        "mm": ("millimeter", "millimetre"),
        "km": ("kilometer", "kilometre"),
        "m": ("meter", "metre"),
        "kg": ("kilogram", "kilo"),
        "g": ("gram", "gramme", "gm"),
        "mg": ("milligram",),
        "l": ("liter", "litre"),
        "ml": ("milliliter", "millilitre"),
        "in": ("inch", "inche"),
        "ft": ("foot", "feet"),
        "yd": ("yard",),
        "mi": ("mile",),
        "lb": ("pound",),
        "oz": ("ounce",),
        "h": ("hour", "hr"),
        "min": ("minute",),
        "s": ("second", "sec"),
        "$": ("dollar", "usd", "us"),
        "€": ("euro", "eur"),
        "£": ("gbp",),
        "degree": ("deg",),
        PERCENT: ("percent", "pct"),
        "person": ("people",),
        "child": ("children",),
    }.items()
    for spelling in spellings
}
_SHORT = {
    *("m", "g", "h", "s", "l", "L", "C", "F", "cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "in", "lb", "lbs", "oz"),
    *("mi", "yd", "hr", "hrs", "min", "mins", "sec", "secs", "mph", "kph", "am", "pm", "USD", "st", "nd", "rd", "th"),
}
"""Units so short that any other letters in their place are variables."""
_LITTLE = {"a", "an", "on", "at", "to", "of", "by"}
_OPERATED = re.compile(
    r"\b(?:k|bn|mn|grand|minimum|maximum|minus|plus|times|divided|multiplied|squared|cubed|factorial|over|modulo|mod"
    r"|than (?:half|twice|that)|hal(?:f|ves)|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?"
    r"|too (?:many|much|few|high|low|big|small)|off by|hundreds?|thousands?|[mbtr]+illions?)\b",
    re.I,
)
"""Words that turn the number before them into another one."""
_ASIDE = re.compile(
    r"[(=]|,\s|\b(?:because|since|which|as|so|given|where|from|when|in(?=\s+[a-z])|after|for|during|every|each|if)\b",
    re.I,
)
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s?\^\s?\{?([23])\}?(?![0-9])")
_UNIT = re.compile(r"[A-Za-z$£€¥₹%°'’\"./^23\s-]*")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|operatorname|mbox|rm|textrm)\s*\{([^{}]*)\}")


def in_words(value: str) -> str:
    r"""Replace ``\text{...}`` and the like by their content."""
    return _TEXT.sub(r" \1 ", value)


def read_unit(rest: str, *, tight_letter: bool = False) -> str | None:
    """Return the unit that all of ``rest``, the text after a number, is, in its one spelling. "" if
    there is none, None if it is something else. ``tight_letter`` reads ``5m`` as a unit and not as
    a product."""
    rest = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", rest, flags=re.I)
    plain = in_words(re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b", " degree ", rest)).replace("\\%", "%")
    if rest.lstrip().startswith("."):
        return None
    letters = re.match(r"[A-Za-z]+", rest)
    if letters is not None and (letters[0] not in _SHORT or (len(letters[0]) == 1 and not tight_letter)):
        return None
    aside = _ASIDE.search(plain)
    if aside is not None and re.search(r"[0-9=]", plain[aside.start() :]) and aside[0][0] in "(=,":
        return None
    unit = _UNIT_POWER.sub(r"^\1", plain if aside is None else plain[: aside.start()]).strip(" .,")
    if _UNIT.fullmatch(unit) is None or _OPERATED.search(unit) or re.search(r"(?<!\^)[0-9]|^[-/^.]", unit):
        return None
    words = re.findall(r"[A-Za-z'’]+|[^\sA-Za-z'’]", unit)
    first = words[0] if words else ""
    if (
        first.isalpha()
        and len(first) < 3
        and not {first, first.casefold() if len(first) > 1 else first} & (_SHORT | _LITTLE)
    ):
        return None
    found = _one_spelling(words)
    return PERCENT if found.startswith(PERCENT) else found


def _one_spelling(words: list[str]) -> str:
    found: list[str] = []
    power = ""
    for word in words:
        lower = word.casefold()
        if lower in ("square", "sq", "cubic"):
            power = "3" if lower == "cubic" else "2"
        elif lower in ("per", "/"):
            found.append("/")
        elif lower in ("mph", "kph", "kmh"):
            found += ["mi" if lower == "mph" else "km", "/", "h"]
        elif lower not in (".", "-", "of", "the", "a", "an"):
            stem = lower if lower in _SPELLINGS or len(lower) < 3 else re.sub(r"s$", "", lower)
            found.append(_SPELLINGS.get(stem, stem))
            if power:
                found += ["^", power]
                power = ""
    return " ".join(found)


# -- numbers ---------------------------------------------------------------------------------------


def split_quantity(text: str) -> tuple[Quantity, str] | None:
    """Return the number at the start of ``text`` and the text after it, or None. Only a currency
    sign gives it a unit here. Raises TooLong."""
    match = _NUMBER.match(text)
    if match is None:
        return _from_words(text)
    value = _value(match)
    if value is None:
        return None
    rest = text[match.end() :]
    if (scaled := _SCALED.match(in_words(rest))) is not None:
        value *= _SCALES[scaled[1].casefold()]
        rest = in_words(rest)[scaled.end() :]
    negative = (match["sign"] == "-") != (match["inner"] == "-")
    unit = "" if match["currency"] is None else _one_spelling([match["currency"].strip(" \\")])
    return Quantity(-value if negative else value, unit), rest


def read_quantity(text: str, *, tight_letter: bool = False) -> Quantity | None:
    """Return ``text`` as a number with its unit, or None if it is anything else. Raises TooLong."""
    split = split_quantity(text)
    if split is None:
        return None
    quantity, rest = split
    unit = read_unit(rest, tight_letter=tight_letter)
    if unit is None or (unit and unit == quantity.unit):
        return None if unit is None else quantity
    if quantity.unit and unit:
        # $5 million dollars, or 5 $ an hour
        unit = unit if unit.startswith(quantity.unit) else f"{quantity.unit} {unit}"
    return Quantity(quantity.value, unit or quantity.unit)


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    if any(text is not None and len(text) > MAX_DIGITS for text in groups.values()):
        raise TooLong(f"a number of more than {MAX_DIGITS:,} digits")
    if groups["mixed"] is not None:
        top, below = groups["mixed_top"] or groups["mixed_over"], groups["mixed_below"] or groups["mixed_under"]
        return Fraction(_plain(groups["mixed"])) + Fraction(int(top), int(below)) if 0 < int(top) < int(below) else None
    if groups["top"] is not None:
        below = Fraction(_plain(groups["below"]))
        return Fraction(_plain(groups["top"])) / below if below else None
    power = groups["bare_power"] or groups["bare_tight"]
    if power is not None:
        return _scaled(Fraction(1), power)
    if groups["head"] is not None:
        head, cycle = groups["head"], groups["repeat"] or groups["cycle"]
        decimals = len(head.partition(".")[2])
        tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**decimals)
        return (Fraction(_plain(head)) if head != "." else Fraction(0)) + tail
    value = Fraction(_plain(groups["number"]))
    if groups["under"] is not None:
        below = Fraction(_plain(groups["under"]))
        return value / below if below else None
    exponent = groups["exponent"] or groups["power"] or groups["tight"]
    return value if exponent is None else _scaled(value, exponent)


def _plain(digits: str) -> str:
    return re.sub(rf"[,{GROUP} ]", "", digits)


def _scaled(value: Fraction, exponent: str) -> Fraction:
    if len(exponent) > 6 or abs(int(exponent)) > MAX_DIGITS:
        raise TooLong(f"a number of more than {MAX_DIGITS:,} digits")
    return value * Fraction(10) ** int(exponent)


def _from_words(text: str) -> tuple[Quantity, str] | None:
    text = re.sub(r"^(?:a |an )?(?=half\b)", "one ", text, flags=re.I)
    match = _IN_WORDS.match(text)
    if match is None:
        return None
    total, part = 0, 0
    for word in re.findall(r"[a-z]+", match["words"].casefold()):
        if word in _WORDS:
            part += _WORDS[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        elif word != "and":
            total, part = total + max(part, 1) * _SCALES[word], 0
    value, rest = Fraction(total + part), text[match.end() :]
    if (share := _SHARE.match(rest)) is not None:
        # three quarters
        value, rest = value / _SHARES[share[1].casefold()], rest[share.end() :]
    return Quantity(-value if match["minus"] else value), rest


# -- one alphabet ----------------------------------------------------------------------------------

_SYMBOLS = dict.fromkeys("−–‐‑﹣－", "-") | {
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "√": r"\sqrt ",
    "⁄": "/",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∖": r"\setminus ",
    "∅": r"\emptyset ",
    "∞": r"\infty ",
    "ℝ": r"\mathbb{R}",
    "π": r"\pi ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "λ": r"\lambda ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "⟨": "(",
    "⟩": ")",
    "’": "'",
    "，": ",",
    "￥": "¥",
    "\u2009": "~",
    "\u202f": "~",
    "\u00a0": "~",
}


def ascii_form(text: str) -> str:
    r"""Write mathematical signs as LaTeX, digits of any script as ASCII, ``½`` as ``\frac{1}{2}``
    and ``²`` as ``^{2}``."""
    if text.isascii():
        return text
    found: list[str] = []
    for char in text:
        if char.isascii():
            found.append(char)
        elif char in _SYMBOLS:
            found.append(_SYMBOLS[char])
        elif (digit := unicodedata.decimal(char, None)) is not None:
            found.append(str(digit))
        else:
            kind, _, parts = unicodedata.decomposition(char).partition(" ")
            plain = "".join(chr(int(part, 16)) for part in parts.split()) if parts else char
            if kind == "<fraction>":
                top, _, below = plain.partition("\u2044")
                found.append(f"\\frac{{{top}}}{{{below}}}")
            elif kind in ("<super>", "<sub>"):
                mark, plain = "^" if kind == "<super>" else "_", plain.replace("\u2212", "-")
                if found and found[-1].startswith(mark + "{"):
                    plain, mark = found.pop()[2:-1] + plain, mark
                found.append(f"{mark}{{{plain}}}")
            else:
                found.append(plain if kind in ("<wide>", "<narrow>") else char)
    return "".join(found)
