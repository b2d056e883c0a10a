"""Exact values of plain arithmetic: numbers, ``+ - * / ^`` and brackets, no names and no calls.

A decimal is exact, so ``0.1 + 0.2`` equals ``0.3``. Powers are bounded, and so are digits: no
expression takes long, whatever a response has."""

from __future__ import annotations

import ast
from collections.abc import Sequence
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
