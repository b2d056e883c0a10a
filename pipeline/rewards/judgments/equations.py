r"""The equations in a text whose sides are plain arithmetic: ``12 + 5 * 2 = 22``.

Pure. A judgment must not call a right step wrong, so what cannot be read for certain is no
equation. The rules:

1. A side is the longest run of numbers, operators and brackets beside the ``=``. Signs of currency,
   ``\times``, ``\frac{}{}``, an ``x`` between numbers and one or two words of a unit are read:
   ``3 apples + 4 apples = 7 apples``.
2. At least one side has an operator. ``x = 3`` and ``2 days = 48 hours`` state no sum.
3. These are not read: a side that begins with an operator after a name (``y + 3 = 7``), a power in
   signs (``5²``), a per cent, a remainder. Nor is a number that goes on (``12 million``), nor are
   units that differ.
4. ``a = b + c = d`` is two equations. A line that goes on (``3 * 4 = 12 + 1 = 13``) holds where its
   next number does.
5. A decimal holds where it is the value rounded or cut at its last digit: ``10 / 3 = 3.33``."""

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
    """Return the value of an expression in pieces, as ``["3", "*", "(", "4", ...]``; None where it
    has none, or would take too many digits."""
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
    """Return a value as people write it: whole, decimal where that is exact and short, or a
    fraction."""
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
    """A step that does not hold, whatever follows it."""

    number: int
    """Place among the response's steps, from 1."""
    said: str
    """The wrong piece, word for word."""
    should_be: str

    @property
    def judgment(self) -> str:
        """Return the judgment: ``step 3 says 13, should be 12``. The guided pass finds the
        wrong tokens by the quotation."""
        said = " ".join(self.said.split())
        if len(said) > _MAX_QUOTE_CHARS:
            said = said[: _MAX_QUOTE_CHARS - 3] + "..."
        return " ".join((f"step {self.number} says {said},", f"should be {self.should_be}"))


MAX_CHARS = 20_000
"""Characters that are read, from the begin of a response."""
_MAX_EQUATIONS = 400
_MAX_SIDE = 40
"""Tokens of one side that are read."""

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
"""Not after a number: a mixed number is not a product."""
_MAX_NESTED = 8
_FILLING = "\v"
"""White space in place of the rest of a fraction."""
_TIMES = re.compile(r"(?<=[0-9)])(\s*)x(?=\s*[0-9($])")
_SAME: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|[×·∙]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\[()\[\]]|\\[,;!: ]|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\*\*(?![0-9])|(?<![0-9])\*\*"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"(?<=[0-9])\*\*(?=[0-9])"), "^"),
)
"""Operators that are written in several ways. Each is padded to the length of what it replaces."""

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
"""Words after a number that make it another number."""
_AFTER = " \t\n.,;:!?)]}\"'’”*>$`|"
_BEFORE = " \t\n([{<:;,\"'‘“*>$`|="


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a text."""

    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Equation:
    """Two sides with an ``=`` between them, both read."""

    place: int
    """Of the ``=`` in the text."""
    quoted: str
    """The equation as it is written."""
    holds: bool
    should_be: str
    """The value of the side that is computed."""


@dataclass(frozen=True, slots=True)
class _Side:
    tokens: Sequence[TextPiece]
    units: frozenset[str]
    is_sure: bool = True
    """Whether nothing after it may belong to it."""

    @property
    def pieces(self) -> list[str]:
        return [token.text for token in self.tokens]

    @property
    def has_operation(self) -> bool:
        return sum(token.kind == "number" for token in self.tokens) > 1


def first_wrong_step(found: Sequence[Equation]) -> WrongStep | None:
    """Return the first equation that does not hold, counted among all that were read."""
    for number, equation in enumerate(found, 1):
        if not equation.holds:
            return WrongStep(number, equation.quoted, equation.should_be)
    return None


def equations(text: str) -> list[Equation]:
    """Return the equations of ``text`` in their order, each with whether it holds."""
    text = text[:MAX_CHARS]
    plain = normalised(text)
    tokens = _with_products(list(_tokens(plain)))
    places = [index for index, token in enumerate(tokens) if token.kind == "equals"][:_MAX_EQUATIONS]
    found = (_equation(text, plain, tokens, place) for place in places)
    return [equation for equation in found if equation is not None]


def agree(left: Fraction, right: Fraction, *written: str) -> bool:
    """Return whether two values are equal. A side that is ``written`` as a decimal may be the other
    one rounded, or cut at its last digit."""
    places = [len(text.partition(".")[2]) for text in written if "." in text]
    if left == right or not places:
        return left == right
    unit, gap = Fraction(1, 10 ** min(places)), abs(left - right)
    is_cut = len(written) == 1 and gap < unit and left * right >= 0
    return gap <= unit / 2 or (is_cut and min(abs(left), abs(right)) * 10 ** min(places) % 1 == 0)


def normalised(text: str) -> str:
    """Return ``text`` with one way to write each operator; places stay the same."""
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
    """Write ``2(3 + 4)`` as a product."""
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
    # the end of a \frac, which is longer as it is written
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
    # a number after a name is a part of the name
    is_named = not side.has_operation and before is not None and before.kind == "word"
    return None if is_named else side


def _right_side(plain: str, tokens: Sequence[TextPiece], equals: int) -> _Side | None:
    """Return the longest run of arithmetic that begins at the ``=``."""
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
    """Return the words of a unit, one or two between a number and an operator or ``=``; none where
    there is no unit. ``index`` is the ``first`` of them, or else the last."""
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
    """Whether two numbers, or a number and a bracket, stand beside one another."""
    return (left.kind == "number" or left.text == ")") and (right.kind == "number" or right.text == "(")


def _is_open_end(tokens: Sequence[TextPiece], index: int) -> bool:
    """Whether the ``)`` at ``index`` has no ``(`` before it."""
    if tokens[index].text != ")":
        return False
    depth = 0
    for token in reversed(tokens[: index + 1]):
        depth += (token.text == ")") - (token.text == "(")
        if depth == 0:
            return False
    return True


def _begins_well(plain: str, before: TextPiece | None, first: TextPiece) -> bool:
    """Whether a side begins where it is cut: not behind a name, nor in the middle of a number."""
    if first.start > 0 and plain[first.start - 1] not in _BEFORE and (before is None or before.text != "="):
        return False
    if first.text not in ("+", "-", "*", "/", "^"):
        return True
    # a sign, not an operator: it touches its number, and no name stands before it
    touches = plain[first.end : first.end + 1].isdigit() or plain[first.end : first.end + 1] in ("$", "(")
    after_name = before is not None and (
        before.kind == "number" or before.text in (")", "}") or (before.kind == "word" and len(before.text) == 1)
    )
    return first.text == "-" and touches and not after_name


def _ends_well(plain: str, end: int) -> bool:
    """Whether a side ends where it is cut: what touches it is no power, per cent or letter."""
    rest = plain[end : end + 40].lstrip(_FILLING)
    if rest[:1] and rest[0] not in _AFTER and not re.match(r"[A-Za-z]{2}|[-+*/=<]", rest):
        return False
    goes_on = re.match(r"[:.,][0-9]|\s*(?:%|and (?:(?:an?|one)\b|[0-9]+/[0-9])|\(\s*mod|[!²³√/*^±]|\\%|\\[a-z])", rest)
    return goes_on is None and re.search(r"\bremainder\b", rest, re.I) is None


def _singular(word: str) -> str:
    return word.lower().removesuffix("s")
