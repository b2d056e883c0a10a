r"""Finds the equations in a text whose sides are plain arithmetic: ``12 + 5 * 2 = 22``.

Pure. A judgment must never call a right step wrong, so what cannot be read for certain does not
count as an equation. The rules:

1. A side is the longest run of numbers, operators and brackets next to the ``=``. Currency signs,
   ``\times``, ``\frac{}{}``, an ``x`` between numbers and units of one or two words are understood:
   ``3 apples + 4 apples = 7 apples``.
2. At least one side has an operator. ``x = 3`` and ``2 days = 48 hours`` state no sum.
3. Not read: a side that begins with an operator after a name (``y + 3 = 7``), powers as superscripts
   (``5²``), per cents, remainders, a number that continues (``12 million``), and differing units.
4. ``a = b + c = d`` is two equations. In a running line (``3 * 4 = 12 + 1 = 13``) each ``=`` holds if the
   next number is right.
5. A decimal is right if it is the value rounded or cut at its last digit: ``10 / 3 = 3.33``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

_MAX_EXPONENT = 64
_MAX_BITS = 4_096
_MAX_PIECES = 64
_OPERATORS = frozenset("+-*/^()")


def value_of(pieces: Sequence[str]) -> Fraction | None:
    """Return the value of an expression given in pieces, such as ``["3", "*", "(", "4", ...]``;
    None if it has none, or would need too many digits."""
    if not 0 < len(pieces) <= _MAX_PIECES:
        return None
    numbers: dict[str, Fraction] = {}
    parts: list[str] = []
    for piece in pieces:
        if piece in _OPERATORS:
            parts.append("**" if piece == "^" else piece)
        else:
            name = f"n{len(numbers)}"
            numbers[name] = Fraction(piece.replace(",", ""))
            parts.append(name)
    try:
        return _value(ast.parse(" ".join(parts), mode="eval").body, numbers)
    except (SyntaxError, ZeroDivisionError, ValueError):
        return None


def in_words(value: Fraction) -> str:
    """Write a value as people do: as a whole number, as a decimal if that is exact and short, else as a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    text = f"{float(value):.6g}"
    is_exact = below == 1 and "e" not in text and Fraction(text) == value
    return text if is_exact else f"{value.numerator}/{value.denominator}"


def _value(node: ast.expr, numbers: dict[str, Fraction]) -> Fraction:
    """Compute a node. Raises ValueError for anything but arithmetic, and for too many digits."""
    match node:
        case ast.Name(id=name):
            return numbers[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, numbers)
        case ast.BinOp(left=left, op=operator, right=right):
            found = _combined(_value(left, numbers), operator, _value(right, numbers))
            if found.numerator.bit_length() + found.denominator.bit_length() > _MAX_BITS:
                raise ValueError("too many digits")
            return found
        case _:
            raise ValueError(type(node).__name__)


def _combined(left: Fraction, operator: ast.operator, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow() if right.denominator == 1 and abs(right) <= _MAX_EXPONENT:
            return left ** int(right)
        case _:
            raise ValueError(type(operator).__name__)


_MAX_QUOTE_CHARS = 200


@dataclass(frozen=True, slots=True)
class WrongStep:
    """A step that does not hold, whatever comes after it."""

    number: int
    """Which of the response's steps, from 1."""
    said: str
    """The wrong text, word for word."""
    should_be: str

    @property
    def judgment(self) -> str:
        """``step 3 says 13, should be 12``. The guided pass finds the wrong tokens by the quotation."""
        said = " ".join(self.said.split())
        if len(said) > _MAX_QUOTE_CHARS:
            said = said[: _MAX_QUOTE_CHARS - 3] + "..."
        return " ".join((f"step {self.number} says {said},", f"should be {self.should_be}"))


MAX_CHARS = 20_000
"""How many characters are read, from the start of a response."""
_MAX_EQUATIONS = 400
_MAX_SIDE = 40
"""How many tokens of a side are read."""

_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER})|(?P<equals>==?(?!=))|(?P<word>[A-Za-z]+)|(?P<operator>[-+*/^()])|(?P<space>[^\S\n]+)|(?P<other>[\s\S])"
)
_LIST_MARK = re.compile(
    r"(?m)^[ \t]*(?:[-*+•][ \t]+|\(?[0-9]{1,2}[.)][ \t]+)+"
    r"|\b(?:step|day|week|month|part|case|problem|question|option|method)[ \t]+[0-9]+[ \t]*[-–:.)]",
    re.I,
)
_FRACTION = re.compile(r"(?<![0-9])(?<![0-9]\s)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
"""Not after a number, where it would be a mixed number rather than a factor."""
_MAX_NESTED = 8
_FILLING = "\v"
"""White space that pads a rewritten fraction to its original length."""
_TIMES = re.compile(r"(?<=[0-9)])(\s*)x(?=\s*[0-9($])")
_SAME: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|[×·∙]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\[()\[\]]|\\[,;!: ]|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\*\*(?![0-9])|(?<![0-9])\*\*"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"(?<=[0-9])\*\*(?=[0-9])"), "^"),
)
"""Different spellings of operators. Each replacement is padded to the length of what it replaces."""

_NO_UNITS = re.compile(
    r"a|an|and|as|at|but|by|each|equals|every|for|from|gives|get|gets|have|her|his|if|in|into|is|it|its|"
    r"minus|mod|modulo|more|of|on|or|our|over|per|plus|remainder|so|than|that|the|their|then|there|times|"
    r"to|we|which|with|you|your",
    re.I,
)
_GOES_ON = re.compile(
    r"hundred|hundreds|thousand|thousands|million|millions|billion|billions|trillion|trillions|dozen|"
    r"dozens|k|m|bn|mn|b|mod|modulo|remainder|r|or|point|percent|half|quarter|squared|cubed",
    re.I,
)
"""Words that change the number before them."""
_AFTER = " \t\n.,;:!?)]}\"'’”*>$`|"
_BEFORE = " \t\n([{<:;,\"'‘“*>$`|="


@dataclass(frozen=True, slots=True)
class TextPiece:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Equation:
    """An ``=`` between two sides, both of which could be read."""

    place: int
    """Position of the ``=`` in the text."""
    quoted: str
    """The equation as written."""
    holds: bool
    should_be: str
    """The value of the computed side."""


@dataclass(frozen=True, slots=True)
class _Side:
    tokens: Sequence[TextPiece]
    units: frozenset[str]
    is_sure: bool = True
    """Whether nothing after it can belong to it."""

    @property
    def pieces(self) -> list[str]:
        return [token.text for token in self.tokens]

    @property
    def has_operation(self) -> bool:
        return sum(token.kind == "number" for token in self.tokens) > 1


def first_wrong_step(found: Sequence[Equation]) -> WrongStep | None:
    """Return the first equation that does not hold, numbered among all that could be read."""
    for number, equation in enumerate(found, 1):
        if not equation.holds:
            return WrongStep(number, equation.quoted, equation.should_be)
    return None


def equations(text: str) -> list[Equation]:
    """Return the equations of ``text`` in order."""
    text = text[:MAX_CHARS]
    plain = normalised(text)
    tokens = _with_products(list(_tokens(plain)))
    places = [index for index, token in enumerate(tokens) if token.kind == "equals"][:_MAX_EQUATIONS]
    found = (_equation(text, plain, tokens, place) for place in places)
    return [equation for equation in found if equation is not None]


def agree(left: Fraction, right: Fraction, *written: str) -> bool:
    """Return whether two values are equal. A side ``written`` as a decimal may be the other one
    rounded, or cut at its last digit."""
    places = [len(text.partition(".")[2]) for text in written if "." in text]
    if left == right or not places:
        return left == right
    unit, gap = Fraction(1, 10 ** min(places)), abs(left - right)
    is_cut = len(written) == 1 and gap < unit and left * right >= 0
    return gap <= unit / 2 or (is_cut and min(abs(left), abs(right)) * 10 ** min(places) % 1 == 0)


def normalised(text: str) -> str:
    """Return ``text`` with one spelling per operator; positions do not change."""
    text = _LIST_MARK.sub(lambda found: "\n" + " " * (len(found[0]) - 1), text)
    for _ in range(_MAX_NESTED):
        text = _FRACTION.sub(lambda found: f"(({found[1]})/({found[2]}))".ljust(len(found[0]), _FILLING), text)
    for pattern, sign in _SAME:
        text = pattern.sub(lambda found, sign=sign: sign.ljust(len(found[0])), text)
    return _TIMES.sub(r"\1*", text)


def _tokens(text: str) -> Iterator[TextPiece]:
    for found in _TOKEN.finditer(text):
        if (kind := found.lastgroup or "other") != "space":
            yield TextPiece(kind, found[0], found.start(), found.end())


def _with_products(tokens: list[TextPiece]) -> list[TextPiece]:
    """Insert the ``*`` of ``2(3 + 4)``."""
    made: list[TextPiece] = []
    for token in tokens:
        before = made[-1] if made else None
        if before is not None and before.end == token.start:
            opens = token.text == "(" and (before.kind == "number" or before.text == ")")
            if opens or (token.kind == "number" and before.text == ")"):
                made.append(TextPiece("operator", "*", token.start, token.start))
        made.append(token)
    return made


def _equation(text: str, plain: str, tokens: Sequence[TextPiece], equals: int) -> Equation | None:
    left, right = _left_side(plain, tokens, equals), _right_side(plain, tokens, equals)
    if left is None or right is None or not (left.has_operation or right.has_operation):
        return None
    values = value_of(left.pieces), value_of(right.pieces)
    if values[0] is None or values[1] is None:
        return None
    written = [side.tokens[-1].text for side in (left, right) if not side.has_operation]
    does_hold = agree(values[0], values[1], *written)
    if not does_hold and right.has_operation and left.has_operation:
        first = next(token.text for token in right.tokens if token.kind == "number")
        does_hold = agree(values[0], Fraction(first.replace(",", "")), first)
    units = left.units | right.units
    if not does_hold and ((left.units and len(units) > 1) or not right.is_sure):
        return None
    end = right.tokens[-1].end
    # include the padding, up to the end of the original \frac
    while plain[end : end + 1] == _FILLING:
        end += 1
    return Equation(
        place=tokens[equals].start,
        quoted=text[left.tokens[0].start : end],
        holds=does_hold,
        should_be=in_words(values[0] if left.has_operation else values[1]),
    )


def _left_side(plain: str, tokens: Sequence[TextPiece], equals: int) -> _Side | None:
    """Return the longest run of arithmetic that ends at the ``=``."""
    units: set[str] = set()
    kept: list[TextPiece] = []
    depth, index = 0, equals - 1
    while index >= 0 and len(kept) < _MAX_SIDE:
        token = tokens[index]
        if token.kind == "word":
            words = _unit(tokens, index, first=False)
            if not words:
                break
            units.add(_singular(words[-1]))
            index -= len(words)
            continue
        if token.text == "$":
            units.add("$")
            index -= 1
            continue
        if token.kind not in ("number", "operator"):
            break
        if kept and _stand_apart(token, kept[-1]):
            return None
        depth += (token.text == ")") - (token.text == "(")
        if depth < 0:
            break
        kept.append(token)
        index -= 1
    if len(kept) == _MAX_SIDE:
        return None
    kept.reverse()
    before = tokens[index] if index >= 0 else None
    if depth > 0:
        cut = max(i for i, _ in enumerate(kept) if _is_open_end(kept, i))
        before, kept = kept[cut], kept[cut + 1 :]
    if not kept or not _begins_well(plain, before, kept[0]):
        return None
    side = _Side(kept, frozenset(units))
    # a number after a word belongs to the word: "step 3 ="
    is_named = not side.has_operation and before is not None and before.kind == "word"
    return None if is_named else side


def _right_side(plain: str, tokens: Sequence[TextPiece], equals: int) -> _Side | None:
    """Return the longest run of arithmetic that starts at the ``=``."""
    units: set[str] = set()
    kept: list[TextPiece] = []
    depth, index, is_sure = 0, equals + 1, True
    while index < len(tokens) and len(kept) < _MAX_SIDE:
        token = tokens[index]
        if token.kind == "word":
            words = _unit(tokens, index, first=True)
            if not words:
                break
            units.add(_singular(words[-1]))
            index += len(words)
            continue
        if token.text == "$":
            units.add("$")
            index += 1
            continue
        if token.kind not in ("number", "operator"):
            break
        if kept and _stand_apart(kept[-1], token):
            # a bracket with words is an aside
            is_sure = token.text == "(" and index + 1 < len(tokens) and tokens[index + 1].kind == "word"
            break
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0:
            break
        kept.append(token)
        index += 1
    if len(kept) == _MAX_SIDE:
        return None
    while kept and (kept[-1].text in "+-*/^(" or value_of([token.text for token in kept]) is None):
        kept.pop()
    if not kept or not _ends_well(plain, kept[-1].end):
        return None
    index = equals + 1
    while index < len(tokens) and tokens[index].start < kept[-1].end:
        index += 1
    after = tokens[index] if index < len(tokens) else None
    if after is not None and after.kind == "word":
        if _GOES_ON.fullmatch(after.text) or (len(after.text) == 1 and after.text not in "aAI"):
            return None
        if not _NO_UNITS.fullmatch(after.text):
            units.add(_singular(after.text))
    return _Side(kept, frozenset(units), is_sure)


def _unit(tokens: Sequence[TextPiece], index: int, *, first: bool) -> list[str]:
    """Return the one or two words of a unit between a number and an operator or ``=``; [] if there
    is none. ``index`` is the ``first`` word, else the last."""
    for size in (1, 2):
        begin = index if first else index - size + 1
        end = begin + size
        if begin < 1 or end >= len(tokens):
            continue
        words = tokens[begin:end]
        before, after = tokens[begin - 1], tokens[end]
        is_unit = all(
            word.kind == "word"
            and len(word.text) > 1
            and not _NO_UNITS.fullmatch(word.text)
            and not _GOES_ON.fullmatch(word.text)
            for word in words
        )
        follows = before.kind == "number" or before.text == ")"
        if is_unit and follows and (after.kind == "equals" or after.text in ("+", "-", "*", "/", ")")):
            return [word.text for word in words]
    return []


def _stand_apart(left: TextPiece, right: TextPiece) -> bool:
    """Return whether two numbers, or a number and a bracket, stand next to each other without an operator."""
    return (left.kind == "number" or left.text == ")") and (right.kind == "number" or right.text == "(")


def _is_open_end(tokens: Sequence[TextPiece], index: int) -> bool:
    """Return whether the ``)`` at ``index`` has no matching ``(``."""
    if tokens[index].text != ")":
        return False
    depth = 0
    for token in reversed(tokens[: index + 1]):
        depth += (token.text == ")") - (token.text == "(")
        if depth == 0:
            return False
    return True


def _begins_well(plain: str, before: TextPiece | None, first: TextPiece) -> bool:
    """Return whether a side really begins at ``first``, and not in the middle of a name or number."""
    if first.start > 0 and plain[first.start - 1] not in _BEFORE and (before is None or before.text != "="):
        return False
    if first.text not in ("+", "-", "*", "/", "^"):
        return True
    # it must be a sign and not an operator: it touches its number, and no name comes before
    touches = plain[first.end : first.end + 1].isdigit() or plain[first.end : first.end + 1] in ("$", "(")
    after_name = before is not None and (
        before.kind == "number" or before.text in (")", "}") or (before.kind == "word" and len(before.text) == 1)
    )
    return first.text == "-" and touches and not after_name


def _ends_well(plain: str, end: int) -> bool:
    """Return whether a side really ends at ``end``: no power, per cent sign or letter touches it."""
    rest = plain[end : end + 40].lstrip(_FILLING)
    if rest[:1] and rest[0] not in _AFTER and not re.match(r"[A-Za-z]{2}|[-+*/=<]", rest):
        return False
    goes_on = re.match(r"[:.,][0-9]|\s*(?:%|and (?:(?:an?|one)\b|[0-9]+/[0-9])|\(\s*mod|[!²³√/*^±]|\\%|\\[a-z])", rest)
    return goes_on is None and re.search(r"\bremainder\b", rest, re.I) is None


def _singular(word: str) -> str:
    return word.lower().removesuffix("s")
