r"""Normalises the markup of a mathematical answer: one spelling for LaTeX and plain text.

Removes markup that only changes the look (``\left``, ``$``, ``\text``, ``**``), but nothing that
can be an operator, a point, a sign or a separator."""

from __future__ import annotations

import re

from pipeline.rewards.quantities import GROUP, MAX_DIGITS, ascii_form, in_words, read_quantity

_MAX_DEPTH = 60
_MAX_EXPRESSION_CHARS = 1_000


class Unreadable(ValueError):
    """An answer is nested too deeply, or too long, to be read."""


# -- brackets --------------------------------------------------------------------------------------

OPENING = re.compile(r"\\\{|\\begin\{|\\langle|[({\[]")
BRACKET = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}|\\[{}]|\\[lr]angle|[()\[\]{}]")


def depths_of(text: str) -> list[int]:
    """Return the number of open brackets at each position. Raises Unreadable if there are too many."""
    found, depth, place = [0] * len(text), 0, 0
    for match in BRACKET.finditer(text):
        found[place : match.start()] = [depth] * (match.start() - place)
        opens = OPENING.match(match[0]) is not None
        depth = max(0, depth + (1 if opens else -1))
        if depth > _MAX_DEPTH:
            raise Unreadable(f"more than {_MAX_DEPTH} brackets within one another")
        found[match.start() : match.end()] = [max(depth, 1)] * len(match[0])
        place = match.end()
    found[place:] = [depth] * (len(text) - place)
    return found


# -- markup ----------------------------------------------------------------------------------------

_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\s*")
_THIN = re.compile(r"(?<=[0-9])(?:\\,|\\ |~|\{,\})\s*(?=[0-9]{3}(?![0-9]))")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|~|\\(?:q?quad|enspace|thinspace|space)(?![A-Za-z])")
_WHOLE = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|mbox|textrm|operatorname)\s*(?=\{)|(?=\{)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]")
_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|infty|alpha|beta|gcd|lcm|binom"
_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])")
_ARGUMENTS = (
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])(?!\s*\{)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9]+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s+(?=\{)"), r"\1"),
    (re.compile(r"\\frac\s+(?=\{)"), r"\\frac"),
)


def plain(text: str) -> str:
    """Return ``text`` without markup, with one spelling per command. Raises Unreadable."""
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        raise Unreadable(f"a number of more than {MAX_DIGITS:,} digits")
    depths_of(text)
    # a leading ~ means "about", not a space
    text = re.sub(r"^~(?=.)", r"\\approx ", unwrapped(ascii_form(text)))
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", _SIZES.sub("", text)).replace("\\!", "")
    text = _SPACES.sub(" ", _THIN.sub(GROUP, text)).replace("{,}", ",")
    text = re.sub(r"\\(?:mathrm|rm|textstyle)\s*\{([A-Za-z])\}", r"\1", text)
    text = re.sub(r"(?<!\\)\\([%$#&])", r"\1", text) if "\\begin" not in text else text
    for pattern, replacement in _ARGUMENTS:
        text = pattern.sub(replacement, text)
    return unwrapped(text, formulas=False)


def unwrapped(text: str, *, formulas: bool = True) -> str:
    r"""Strip what surrounds the whole text: ``**``, ``$`` (with ``formulas``), ``\text{}``, braces,
    quotation marks, and a trailing full stop."""
    before = None
    while text != before:
        before = text
        text = text.strip(" \t\r\n*`").strip("_" if text.startswith("_") else "")
        if text[-1:] in (".", ",", ";", ":") and text[-2:] != ".." and (len(text) < 2 or text[-2] != "\\"):
            text = text[:-1].rstrip()
        for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(start) : -len(end)]
            is_around = len(text) > len(start) and text.startswith(start) and text.endswith(end)
            if formulas and is_around and not inner.endswith("\\") and not _DELIMITER.search(inner):
                text = inner
        if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
        text = text.removesuffix("\\\\")
        whole = _WHOLE.match(text)
        if whole is not None and closing(text, whole.end()) == len(text) - 1:
            text = text[whole.end() + 1 : -1]
    return text


def closing(text: str, opening: int) -> int:
    """Return the position of the brace that closes the one at ``opening``, or -1."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
    return -1


# -- leaves ----------------------------------------------------------------------------------------

_MIXED = re.compile(r"(?<![0-9.}])([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\})")
_REPEATING = re.compile(r"([0-9]*\.[0-9]*)\\overline\s*\{([0-9]+)\}")
_POINT = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]*)(?![0-9.])")


ANGLE = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*\{?\s*\\circ\s*\}?")


def exact(text: str) -> str:
    """Return an expression with decimals as fractions, because the parser would round them. Returns
    "" if it is too long, has numbers side by side, or has a sign that the parser would skip."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return ""
    text = _FUNCTION.sub(r"\\\1", text).replace("**", "^").replace(GROUP, "").replace("==", "=")
    text = re.sub(r"\^\s*(-?[0-9]{2,}|-[0-9A-Za-z])", r"^{\1}", text)
    while (root := re.search(r"\\sqrt\s*\(", text)) is not None:
        depths = depths_of(text[root.end() - 1 :] + " ")
        end = next((i for i, depth in enumerate(depths) if i and depth == 0), len(depths) - 1) + root.end() - 1
        text = f"{text[: root.start()]}\\sqrt{{{text[root.end() : end - 1]}}}{text[end:]}"
    text = re.sub(r"\\(?:mathrm|mathbf|text|operatorname)\s*\{\s*([A-Za-z])\s*\}", r"\1", text)
    if re.search(r"(?<![_0-9])[0-9]+\s+[0-9.]|[0-9]\.[0-9]*\.|'|\"|;|\\[lc]?dots|\.\.|[?~]|^[^\\]*&", text):
        return ""
    text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    text = re.sub(r"\\log_\s*\{?\s*e\s*\}?", r"\\ln ", re.sub(r"\)\s*\(", r")\\cdot(", text))
    text = _MIXED.sub(r"(\1+\2)", text)
    text = _REPEATING.sub(_fraction_of_repeating, text)
    return _POINT.sub(lambda m: f"{{\\frac{{{int((m[1] + m[2]) or 0)}}}{{{10 ** len(m[2])}}}}}", text)


def _fraction_of_repeating(match: re.Match[str]) -> str:
    quantity = read_quantity(match[0])
    return match[0] if quantity is None else f"{{\\frac{{{quantity.value.numerator}}}{{{quantity.value.denominator}}}}}"


def is_text(text: str) -> bool:
    """Return whether letters are grouped into words, rather than factors of a product."""
    letters = re.sub(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+", " ", _FUNCTION.sub(" ", in_words(text)))
    runs = re.findall(r"[^\W\d_]{3,}", letters)
    return any(len(run) > 3 or re.search(r"[0-9+*/^=]", letters) is None for run in runs)
