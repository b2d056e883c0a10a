r"""What a mathematical answer is: a number with its unit, a set, an interval, a matrix, an
equation, an expression or words.

``read`` splits an answer at its brackets, commas and relations, after removing markup
(``math_markup``). Only what has no such structure left, like ``2\sqrt{x}+1``, goes to math-verify's
parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from pipeline.rewards.math_markup import (
    ANGLE,
    BRACKET,
    OPENING,
    Unreadable,
    depths_of,
    exact,
    is_text,
    plain,
    unwrapped,
)
from pipeline.rewards.quantities import GROUP, Quantity, TooLong, in_words, read_quantity, read_unit, split_quantity


@dataclass(frozen=True, slots=True)
class Items:
    r"""Values without order: ``1, 2``, ``\{1,2\}``, ``1 \pm 2``; empty for the empty set."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Ordered values between brackets: a point or an interval."""

    opening: str
    closing: str
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Region:
    r"""A union of intervals or sets: ``x > 2``, ``(0,1) \cup (2,3)``, ``\mathbb{R}``."""

    parts: tuple[Value, ...]
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]
    latex: str


@dataclass(frozen=True, slots=True)
class Equation:
    """Sides separated by ``=``."""

    sides: tuple[Value, ...]
    latex: str


@dataclass(frozen=True, slots=True)
class Written:
    """Something that equals only itself: a time, a ratio, a date, a number in another base."""

    kind: str
    parts: tuple[str, ...]
    suffix: str = ""
    """``am``, ``pm`` or the base."""


@dataclass(frozen=True, slots=True)
class Expression:
    """LaTeX for math-verify, with exact numbers, and its unit."""

    latex: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """The words, numbers and signs of a text."""

    tokens: tuple[str, ...]


Value = Quantity | Items | Bracketed | Region | Matrix | Equation | Written | Expression | Words

EMPTY = Items(())
_REALS = Region((Bracketed("(", ")", (Expression("-\\infty"), Expression("\\infty"))),))


def read(text: str, *, tight_letter: bool = False) -> Value | None:
    """Return the value of ``text``; None if it is empty. ``tight_letter`` reads ``5m`` as five
    metres. Raises Unreadable."""
    try:
        return _Reader(tight_letter).read(plain(text))
    except TooLong as error:
        raise Unreadable(str(error)) from None


# -- structure -------------------------------------------------------------------------------------

_GROUPS = re.compile(rf"(?<![0-9.,{GROUP}])[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])")
_SEPARATOR = re.compile(
    r"[,;]|\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|\\(?:lor|vee)\b|(?<=\s)(?:and|or)(?=\s)"
)
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[\])}])\s*U\s*(?=[\[({\\])")
_RELATION = re.compile(r"\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne|in)(?![A-Za-z])|<=|>=|!=|==?|<|>")
_SPELLED = {"<=": "<=", "le": "<=", "leq": "<=", "leqslant": "<=", "lt": "<"}
_SPELLED |= {">=": ">=", "ge": ">=", "geq": ">=", "geqslant": ">=", "gt": ">"}
_SPELLED |= {"ne": "!=", "neq": "!=", "==": "="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_NONE = re.compile(r"\\(?:emptyset|varnothing)|\\\{\s*\\\}|\{\s*\}|(?:the )?empty set|no solutions?", re.I)
_ALL_REALS = re.compile(r"\\(?:mathbb|mathbf)\s*\{?R\}?|\\R|(?:all )?real numbers|all reals", re.I)
_BUILDER = re.compile(r"\s*[A-Za-z]\w*\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:|\\colon)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+")
_COLON = re.compile(r"([0-9]+(?:\.[0-9]+)?)((?:\s*:\s*[0-9]+(?:\.[0-9]+)?)+)\s*([ap])?\.?\s*(?:m\.?)?", re.I)
_BASE = re.compile(r"([0-9A-F]+)\s*(?:_\s*\{?\s*([0-9]{1,2})\s*\}?|\s+base\s+([0-9]{1,2}))")
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\b\.?"
)
_DATES = (
    re.compile(rf"(?P<m>{_MONTH})\s+(?P<d>[0-9]{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<y>[0-9]{{4}}))?", re.I),
    re.compile(rf"(?P<d>[0-9]{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<m>{_MONTH}),?(?:\s+(?P<y>[0-9]{{4}}))?", re.I),
    re.compile(r"(?P<y>[0-9]{4})-(?P<m>[0-9]{2})-(?P<d>[0-9]{2})"),
)


def _encloses(text: str) -> bool:
    """Return whether the last bracket closes the first."""
    depth = 0
    for match in BRACKET.finditer(text):
        depth += 1 if OPENING.match(match[0]) else -1
        if depth <= 0:
            return match.end() == len(text)
    return False


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split at separators outside brackets; return the parts and these separators."""
    parts, marks, begin, depths = [], [], 0, depths_of(text)
    for match in separator.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[begin : match.start()].strip())
            marks.append(match[0])
            begin = match.end()
    return [*parts, text[begin:].strip()], marks


def _grouped(text: str) -> str:
    """Mark commas that are thousands separators, except in brackets, where commas separate."""
    depths = depths_of(text)
    return _GROUPS.sub(lambda m: m[0] if depths[m.start()] else m[0].replace(",", GROUP), text)


class _Reader:
    def __init__(self, tight_letter: bool) -> None:
        self._tight_letter = tight_letter

    def read(self, text: str) -> Value | None:
        text = text.strip()
        if not text.strip(" $.,;:-{}[]()\\~"):
            return EMPTY if _NONE.fullmatch(text) else None
        if _NONE.fullmatch(in_words(text).strip()):
            return EMPTY
        if _ALL_REALS.fullmatch(in_words(text).strip()):
            return _REALS
        text = _grouped(text)
        return (
            self._written(text)
            or self._matrix(text)
            or self._list(text)
            or self._union(text)
            or self._related(text)
            or self._bracketed(text)
            or self._either(text)
            or self._single(text)
        )

    def _each(self, parts: list[str]) -> tuple[Value, ...] | None:
        values = [self.read(unwrapped(part)) for part in parts]
        known = tuple(value for value in values if value is not None)
        return known if len(known) == len(values) else None

    def _written(self, text: str) -> Value | None:
        said = in_words(text).strip()
        if (match := _COLON.fullmatch(said)) is not None:
            parts = [part.strip() for part in (match[1] + match[2]).split(":")]
            return Written("colon", (parts[0].lstrip("0") or "0", *parts[1:]), (match[3] or "").casefold())
        if (match := _BASE.fullmatch(said)) is not None:
            return Written("base", (match[1].lstrip("0"),), match[2] or match[3])
        for pattern in _DATES:
            if (match := pattern.fullmatch(said)) is not None:
                month = match["m"][:3].casefold()
                number = _MONTHS.index(month) + 1 if month in _MONTHS else int(match["m"])
                return Written("date", (match["y"] or "", str(number), str(int(match["d"]))))
        return Written("slashes", tuple(said.split("/"))) if re.fullmatch(r"[0-9]+/[0-9]+/[0-9]+", said) else None

    def _matrix(self, text: str) -> Value | None:
        match = _MATRIX.fullmatch(text)
        if match is None or "\\begin" in match[2]:
            return None
        lines = [line for line in re.split(r"\\\\|\\cr\b", match[2]) if line.strip()]
        rows = [self._each(line.split("&")) for line in lines]
        return Matrix(tuple(row for row in rows if row is not None), exact(text)) if rows and None not in rows else None

    def _list(self, text: str) -> Value | None:
        parts, marks = _split(text, _SEPARATOR)
        if len(parts) == 1:
            return None
        # "and" may be part of a number: one hundred and five
        number = split_quantity(in_words(text).strip()) if set(marks) == {"and"} else None
        if number is not None and "and" not in number[1]:
            return self._single(text)
        parts = [part for part, mark in zip(parts, [*marks, ""], strict=True) if part or mark in (",", ";")]
        values = self._each(parts)
        if values is None:
            return _words(text)
        if all(isinstance(value, Region) and value.variable for value in values) and "or" in "".join(marks):
            return _joined(values)
        # flatten x = 1, 2 and 1, \pm 2
        return Items(
            tuple(item for value in values for item in (value.items if isinstance(value, Items) else (value,)))
        )

    def _union(self, text: str) -> Value | None:
        parts, _ = _split(text, _UNION)
        values = self._each(parts) if len(parts) > 1 else None
        return None if values is None else _joined(values)

    def _related(self, text: str) -> Value | None:
        parts, marks = _split(text, _RELATION)
        if not marks:
            minus = re.fullmatch(r"(.*)\\(?:setminus|backslash)\s*(.*)", text, re.DOTALL)
            if minus is not None and self.read(minus[1]) == _REALS:
                return _without(self.read(minus[2]))
            return None
        signs = [_SPELLED.get(mark.lstrip("\\"), mark.lstrip("\\")) for mark in marks]
        if signs == ["in"] and _VARIABLE.fullmatch(parts[0]):
            return self.read(parts[1])
        if set(signs) == {"="}:
            sides = self._each([part for part in parts if part])
            if sides is None or not sides:
                return None
            return sides[0] if len(sides) == 1 else Equation(sides, text)
        return self._inequality(parts, signs) or Expression(exact(text))

    def _inequality(self, parts: list[str], signs: list[str]) -> Value | None:
        r"""Read ``x > 2``, ``2 < x`` and ``1 \le x < 3``: a name with one or two bounds."""
        names = [
            place
            for place, part in enumerate(parts)
            if _VARIABLE.fullmatch(part) and part not in ("\\pi", "e", "\\infty")
        ]
        if (
            len(names) != 1
            or len(parts) > 3
            or (len(parts) == 3 and names != [1])
            or any(s not in _FLIPPED for s in signs)
        ):
            return None
        bounds: dict[str, tuple[str, Value]] = {}
        for place, part in enumerate(parts):
            if place != names[0]:
                value = self.read(part)
                sign = signs[0] if place == 0 else signs[-1]
                sign = _FLIPPED[sign] if place < names[0] else sign
                if not isinstance(value, Quantity | Expression):
                    return None
                bounds[sign[0]] = (sign, value)
        if len(bounds) != len(parts) - 1:
            return None
        name = parts[names[0]]
        if "!" in bounds:
            missing = _without(bounds["!"][1])
            return None if missing is None else Region(missing.parts, name)
        low = bounds.get(">", (">", Expression("-\\infty")))
        high = bounds.get("<", ("<", Expression("\\infty")))
        opening, closing_ = "[" if "=" in low[0] else "(", "]" if "=" in high[0] else ")"
        return Region((Bracketed(opening, closing_, (low[1], high[1])),), name)

    def _bracketed(self, text: str) -> Value | None:
        text = text.replace("\\langle", "(").replace("\\rangle", ")")
        opening, size = ("\\{", 2) if text.startswith("\\{") else (text[0], 1)
        inner = text[size:-size]
        if opening not in ("\\{", "(", "[", "{") or not re.search(r"(?:\\\}|[)\]}])$", text) or not inner.strip():
            return None
        if not _encloses(text):
            return None
        if opening in ("\\{", "{"):
            built = _BUILDER.fullmatch(inner)
            if built is not None:
                return self.read(built[1])
        # if commas with a space separate, those without one may group digits
        inner = _grouped(inner) if re.search(r",\s", inner) else inner
        parts, _ = _split(inner, re.compile(r"[,;]"))
        values = self._each(parts)
        if values is None:
            return None
        if opening in ("\\{", "{"):
            return Items(tuple(i for value in values for i in (value.items if isinstance(value, Items) else (value,))))
        if len(values) == 1 and opening == "(" and text.endswith(")"):
            return values[0]
        return Bracketed(opening, text[-1], values)

    def _either(self, text: str) -> Value | None:
        if _PLUS_MINUS.search(text) is None:
            return None
        signs = ({"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"})
        values = self._each([_PLUS_MINUS.sub(lambda m, sign=sign: sign[m[0]], text) for sign in signs])
        return None if values is None else Items(values)

    def _single(self, text: str) -> Value:
        said = in_words(text).strip()
        quantity = read_quantity(text, tight_letter=self._tight_letter) or read_quantity(
            said, tight_letter=self._tight_letter
        )
        if quantity is not None:
            return quantity
        core, unit = text, ""
        cut = re.search(r"\\(?:text|mathrm|mbox|textrm)\s*\{|(?<=[0-9})])\s*\^\s*\{?\s*\\circ|%$", text)
        if cut is not None and cut.start() > 0 and not ("circ" in cut[0] and ANGLE.search(text)):
            found = read_unit(text[cut.start() :])
            core, unit = (text[: cut.start()].strip(), found) if found is not None else (text, "")
        elif (cut := re.search(r"(?<=[0-9}!)])\s+([A-Za-z]{2,}.*)$", text)) is not None:
            found = read_unit(cut[0])
            core, unit = (text[: cut.start()], found) if found else (text, "")
        if unit and (value := read_quantity(core)) is not None:
            return Quantity(value.value, unit)
        return _words(text) if is_text(core) else Expression(exact(core), unit)


def _joined(values: tuple[Value, ...]) -> Region:
    names = {value.variable for value in values if isinstance(value, Region)}
    parts = tuple(part for value in values for part in (value.parts if isinstance(value, Region) else (value,)))
    return Region(parts, names.pop() if len(names) == 1 else "")


def _value_of(quantity: Quantity) -> Fraction:
    return quantity.value


def _without(value: Value | None) -> Region | None:
    """Return the real numbers except these few."""
    points = value.items if isinstance(value, Items) else (value,)
    numbers = [point for point in points if isinstance(point, Quantity)]
    if not numbers or len(numbers) != len(points):
        return None
    ends: list[Value] = [*sorted(numbers, key=_value_of)]
    bounds = [Expression("-\\infty"), *ends, Expression("\\infty")]
    return Region(tuple(Bracketed("(", ")", pair) for pair in pairwise(bounds)))


def _words(text: str) -> Words:
    said = in_words(text.replace(GROUP, ",")).casefold()
    found = re.findall(r"\\?[a-z]+|[^\W\d_]+|[0-9]+(?:[.,][0-9]+)*|[^\s\w.,;:!?'\"()$-]|-(?=[0-9])", said)
    # plural and singular are the same: no solutions, no solution
    return Words(tuple(re.sub(r"(?<=[a-z]{3})s$", "", word) for word in found if word != "the"))
