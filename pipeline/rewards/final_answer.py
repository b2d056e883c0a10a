r"""A response's committed final answer, or why it has none.

Pure, without sympy. The rules:

1. Three forms state a final answer, in order of precedence: a box, ``\boxed{18}``; four hashes,
   ``#### 18``; the word "answer" as a label (``**Answer:** 18``) or in a sentence (``The answer is 18
   dollars.``). A form around another one states what the inner one states.
2. The last statement of the form with the highest precedence decides. Every statement after it, of any
   form, must be right too.
3. An empty, negated ("is not 18") or hedged ("I think", "probably", "about") statement is wrong. So are
   alternatives ("18 or 21"), a question, and a statement that later text takes back ("Wait, ...").
4. In a sentence, the text after a number is its unit and may contain no other number, until an aside
   begins ("because", "in", a bracket).

A response without any of these forms commits itself to nothing, whatever numbers it contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from pipeline.rewards.quantities import CURRENCY, in_words, split_quantity

TAIL_CHARS = 10_000
"""How many characters are read, from the end of a response."""
_CONTEXT_CHARS = 400
_MAX_LIST = 20
"""How many boxes of one sentence are read as one list."""


class Form(IntEnum):
    """How an answer is stated; the lowest form in a response decides."""

    BOX = 0
    HASHES = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Statement:
    """A place where a response states its answer."""

    form: Form
    start: int
    end: int
    """End of its sentence or line; text after it may take it back."""
    value: str = ""
    """The expression as written, without its unit."""
    problem: str = ""
    """Why it states no value; "" if it does."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """The values that count, all of which must be right; none if there is a problem."""

    values: tuple[str, ...] = ()
    problem: str = ""


def commitment(text: str) -> Commitment:
    """Return what the last ``TAIL_CHARS`` characters of ``text`` commit to."""
    text = text[-TAIL_CHARS:]
    statements = _without_frames(text, [*_boxes(text), *_hashes(text), *_answers(text)])
    if not statements:
        return Commitment(problem="no committed answer")
    form = min(statement.form for statement in statements)
    first = max(index for index, statement in enumerate(statements) if statement.form is form)
    counted = statements[first:]
    problem = next((statement.problem for statement in counted if statement.problem), "")
    after = text[max(statement.end for statement in counted) :]
    if problem or _TAKEN_BACK.search(after):
        return Commitment(problem=problem or "taken back")
    bare = [line.strip(" \t*_$.") for line in after.split("\n") if _BARE_LINE.fullmatch(line)]
    return Commitment(values=tuple(dict.fromkeys([*(statement.value for statement in counted), *bare])))


# -- reading one value -----------------------------------------------------------------------------

_ALTERNATIVES = re.compile(r"\b(?:or|either|versus|vs|alternatively|otherwise|else)\b|\\(?:lor|vee)\b", re.I)
_NEGATED = re.compile(
    r"\b(?:not|never|neither|nor|cannot|wrong|incorrect|false|untrue|anything but|far from|other than|except|unlike"
    r"|instead of|rather than|different from|rule out|deny|nobody|no one)\b|n['’]t\b|≠|\\neq?\b|\\(?:neg|lnot)\b",
    re.I,
)
_UNSURE = r"maybe|perhaps|probably|possibly|presumably|unsure|uncertain"
_I_THINK = r"(?:i|we) (?:\w+ )?(?:think|believe|suppose|feel|assume|reckon|suspect)"
_HEDGED = re.compile(
    rf"\b(?:{_UNSURE}|{_I_THINK}|not (?:\w+ )?(?:sure|certain|confident)|no idea"
    r"|supposedly|likely|apparently|roughly|approximately|approx|or so|give or take|plus or minus|possibilit\w+"
    r"|possible answers?|(?:one|a) candidate|candidate answers?|hypothes[ie]s|doubt|guess\w*|might|could|may be|hypothetically"
    r"|seems?|appears?|close to|somewhere|ish|hopefully"
    r"|i['’](?:d|m) (?:say|going with|thinking|inclined))\b|[0-9]ish\b|±|\\pm\b",
    re.I,
)
_VAGUE = (
    r"about|around|nearly|almost|between|at least|at most|(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower) than"
    r"|over|under|up to|below|above|within|half|twice|double|triple|one of|approximately|roughly"
)
_VAGUE_START = re.compile(rf"[\s$*_(\\]*(?:(?:{_VAGUE})\b|~)", re.I)
_RELATION = re.compile(r"[<>≤≥≈]|\\(?:leq?|geq?|lt|gt|approx|sim|simeq)\b")
_UNFINISHED = re.compile(r"\.\.\.|…|\\[lc]?dots\b|[-+]\s*$")
"""A list that goes on, or an operator without an operand."""
_OPERATED = re.compile(
    r"\b(?:minimum|maximum|minus|plus|times|divided|multiplied|squared|cubed|than (?:half|twice|that)"
    r"|too (?:many|much|few|high|low|big|small)|off by)\b",
    re.I,
)
_ASIDE = re.compile(
    r"[(=]|\b(?:because|since|which|as|so|given|where|from|when|in|after|for|per|during|every|each|if)\b", re.I
)
_UNIT_POWER = re.compile(r"[A-Za-z}](?:\s?\^\s?)?\{?[0-9²³]\}?(?![0-9])")


def flaw(value: str) -> str:
    """Return why an expression states no single value ("18 or 21", "not 18"), or ""."""
    plain = in_words(value)
    if _ALTERNATIVES.search(plain):
        return "alternatives"
    if _NEGATED.search(plain):
        return "negated"
    if _HEDGED.search(plain) or _VAGUE_START.match(plain) or _RELATION.search(plain):
        return "hedged"
    if _UNFINISHED.search(plain):
        return "not a number with its unit"
    return "a question" if "?" in plain else ""


def unit_flaw(rest: str) -> str:
    """Return why the text after a number is not its unit, or ""."""
    plain = in_words(rest)
    if problem := flaw(plain.lstrip(" ,")):
        return problem
    aside = _ASIDE.search(plain)
    unit = plain if aside is None else plain[: aside.start()]
    if _OPERATED.search(unit):
        return "not a number with its unit"
    return "several numbers" if _has_digit(_UNIT_POWER.sub("", unit)) else ""


def goes_on(rest: str) -> bool:
    r"""Return whether an expression continues after its first number: ``18x``, ``18 * 2``, but not ``18 cm``."""
    if re.match(
        r"\s*(?:[*^=×÷·!]|\\(?:cdot|times|div|pi|sqrt|frac|dfrac|pm|in)\b|[-+/:−]\s*[0-9($\\{]|[x]\s*[0-9])", rest
    ):
        return True
    letters = re.match(r"[A-Za-z]+", rest)
    if letters is not None:
        return letters.end() == 1 and letters[0] not in "mghsLlCF"
    return bool(re.match(r"[({_]|\\(?!text|mathrm|mbox|circ|%|,|;|!|:| |\)|\]|\\|quad|degree|\$)", rest))


def _has_digit(text: str) -> bool:
    return re.search(r"[0-9]", text) is not None


# -- finding statements ----------------------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{)?|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*")
_LABEL = r"\banswer[ \t*_]{0,8}[:：][ \t*_:]*|^[#*_> \t]{0,12}(?:the\s+)?(?:final\s+)?answer[#*_ \t]{0,8}$"
_SENTENCE = (
    r"\b(?:answer|final (?:result|value|total|solution|number|amount))(?:\s+(?:to|for|of)\b[^.:\n]{0,80}?)?"
    r"(?:\s+(?:therefore|thus|then|hence|indeed))?\s*(?:\b(?:is|equals|comes\s+(?:out\s+)?to)\b|=)[ \t]*:?"
)
_ANSWER = re.compile(f"{_LABEL}|{_SENTENCE}", re.I | re.M)
_SENTENCE_END = re.compile(r"\n|[!?]|\.(?=[\s*_$\])]|$)")
_BARE_LINE = re.compile(
    rf"[\s*_$]*(?:{CURRENCY})?[-+−]?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)?(?:\.[0-9]+|(?<=[0-9]))[\s*_$.]*"
)
_MATH = re.compile(r"\$\$([^$]+)\$\$|\$((?:\\.|[^$\n\\])+)\$|\\\(([^\n]+?)\\\)|\\\[([^\n]+?)\\\]")
_FILLER = re.compile(
    r"(?:[\s,:*_`\"'“”}]|\b(?:exactly|therefore|thus|hence|simply|just|indeed|then|clearly|equal to|precisely|definitely"
    r"|certainly|a total of)\b)*(?:[A-Za-z]\s*=(?!=)\s*)?",
    re.I,
)
_BELIEVED = re.compile(
    r"\b(?:if|whether|suppose|assum\w+|unless|say|says|said|think|thinks|thought|claim\w*|believe[sd]?|would be|imagine"
    r"|pretend)\b",
    re.I,
)
_STARTER = re.compile(r"(?<![^\s*_])(?:The|So|Thus|Therefore|Hence|Then|Finally|Final|My|Our|Consequently)\b")
_CLAUSE = re.compile(r"[,;:]|\b(?:so|thus|therefore|hence|then|and)\b")
_LINKS = re.compile(
    r"(?:[\s:$*_(\[{\\]+|\b(?:it|that|this|the|answer|final|result|value|is|was|be|are|been|to|equals?|we|she|he|they|gets?|have"
    r"|exactly|true|simply|just)\b)+$",
    re.I,
)
"""Text between a word and the box or hashes that it refers to."""
_GOES_ON = re.compile(
    r"(?:[:=,]|\b(?:is|be|are|equals?|not|either|or|gets?|have|obtain|gives?|answer|to|maybe|perhaps|probably))$", re.I
)
_HEDGED_BY_ME = re.compile(rf"\b(?:{_UNSURE}|{_I_THINK}|(?:i|we) (?:\w+ )?guess|not (?:\w+ )?(?:sure|certain))\b", re.I)
_VAGUE_END = re.compile(rf"(?:\b(?:{_VAGUE})|(?<!\\)~)[\s$*_({{\\]*$", re.I)
_CHOICE_END = re.compile(r"\b(?:either|or)[\s$*_(\\]*$", re.I)
_DOUBT = re.compile(
    r"\b(?:i am|i['’]m)\s+(?:\w+\s+)?(?:not (?:\w+ )?(?:sure|certain|confident)|unsure|uncertain|guessing)"
    r"|\b(?:just|only) a guess|\bmy (?:best )?guess|\bnot (?:\w+ )?(?:sure|certain)\b|\bno idea\b|\bhard to (?:say|tell)\b",
    re.I,
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|hold on|hmm+|oops|actually|scratch that|on second thought|alternatively|correction|mistake\w*|incorrect|wrong"
    r"|false|(?:might|could|may|should|must|would)(?: \w+){0,2} be|maybe|perhaps|possibly|probably|unsure|uncertain|guess\w*"
    r"|not (?:\w+ )?(?:sure|certain|confident|right|correct|true|the answer)|is not|cannot be|ignore|disregard|never ?mind"
    r"|take (?:it|that) back|let me (?:re|try|check|double|fix|correct)\w*|i meant|or (?:rather|else|maybe)|instead|no idea"
    r"|just kidding|seems (?:off|odd|strange|too))\b|\b(?:isn|wasn|can|doesn|didn|don)['’]t\b|^[\s.,;:*_$)\]\\]*(?:or|no)\b",
    re.I,
)


def _boxes(text: str) -> list[Statement]:
    """Find every box in one pass over the braces, and judge only the last, because only that one can count."""
    found: list[Statement] = []
    opened: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        if match[0].startswith(("\\boxed", "\\fbox")):
            if match[1]:
                opened.append((match.start(), match.end()))
            else:
                found.append(Statement(Form.BOX, match.start(), match.end(), problem="a box without braces"))
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            box = opened.pop()
            if box is not None and not any(opened):
                found.append(Statement(Form.BOX, box[0], match.end(), text[box[1] : match.start()].strip()))
    found += [Statement(Form.BOX, box[0], box[1], problem="a box that is not closed") for box in opened if box]
    found.sort(key=lambda box: box.start)
    if found and not found[-1].problem:
        found[-1] = _box(text, found[-1], found[-1 - _MAX_LIST : -1])
    return found


def _box(text: str, box: Statement, earlier: Sequence[Statement]) -> Statement:
    """Judge a box by its content and its sentence: the text after it, and the boxes and words before."""
    stop = _sentence_stop(text, box.end)
    rest = text[box.end : stop].lstrip(" \t$*_.)\\]")
    values, start, choice = [box.value], box.start, False
    for other in reversed(earlier):
        between = in_words(text[other.end : start])
        if _SENTENCE_END.search(between):
            break
        choice = choice or ((_ALTERNATIVES.search(between) is not None or "/" in between) and other.value != values[0])
        values.insert(0, other.value)
        start = other.start
    if not in_words(box.value).strip(" \t\n$*_.,;:{}()[]\\~-") and "\\{" not in box.value:
        problem = "an empty box"
    elif choice or re.match(r"[\s,(]*(?:or\b|/|\\lor|either\b|±|\\pm|and\b[^.\n]{0,20}[0-9])", rest, re.I):
        problem = "alternatives"
    elif re.match(r"(?:is|was)\s+(?:not|wrong|incorrect|false)|(?:isn|wasn)['’]t", rest, re.I):
        problem = "negated"
    elif _HEDGED.search(rest):
        problem = "hedged"
    else:
        problem = "a question" if text[stop : stop + 1] == "?" else _context_flaw(text, start, Form.BOX)
    return replace(box, end=stop, value=", ".join(dict.fromkeys(values)), problem=problem)


def _hashes(text: str) -> list[Statement]:
    found: list[Statement] = []
    for match in _HASHES.finditer(text):
        stop = _line_end(text, match.end())
        line = text[match.end() : stop]
        if is_heading(line, text[stop:]):
            continue
        if "####" in line or "####" in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]:
            found.append(Statement(Form.HASHES, match.start(), stop, problem="alternatives"))
        else:
            found.append(_stated(text, Form.HASHES, match.start(), match.end()))
    return found


def is_heading(line: str, after: str) -> bool:
    """Return whether a line after four hashes is a heading or contains "answer", and so states no value."""
    is_title = re.match(r"[*_]*[A-Za-z]", line) is not None and bool(after.strip()) and not flaw(line)
    return is_title or _ANSWER.match(line) is not None


def answer_places(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield for each statement with "answer": its start, the start of its value, and the end of its sentence."""
    for match in _ANSWER.finditer(text):
        # the value may be on the next line, or in a display formula
        lead = re.compile(r"[\s*_]*(?:(?:\$\$|\\\[)\s*\n\s*)?").match(text, match.end())
        begin = lead.end() if lead is not None and "\n" in lead[0] else match.end()
        yield match.start(), begin, _sentence_stop(text, begin)


def _answers(text: str) -> list[Statement]:
    return [_stated(text, Form.ANSWER, start, begin) for start, begin, _ in answer_places(text)]


def _stated(text: str, form: Form, start: int, begin: int) -> Statement:
    stop = _sentence_stop(text, begin)
    value, problem = split_value(text[begin:stop])
    if not problem:
        problem = "a question" if text[stop : stop + 1] == "?" else _context_flaw(text, start, form)
    return Statement(form, start, stop, value, problem)


def split_value(payload: str) -> tuple[str, str]:
    """Split the text after "the answer is" into its value and the problem with it."""
    filler = _FILLER.match(payload)
    payload = payload[0 if filler is None else filler.end() :].rstrip(" \t*_`\"'“”")
    if "**" in payload:
        payload = re.sub(r"(?<=\S)\*\*(?=[\s.,])", "", payload)
    if not payload.strip(" $.,;:\\{}()[]-"):
        return "", "an empty answer"
    formula = _MATH.match(payload)
    if formula is not None:
        content = next(group for group in formula.groups() if group is not None)
        if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", in_words(content)):
            return content.strip(), unit_flaw(payload[formula.end() :])
    number = None if _VAGUE_START.match(payload) else split_quantity(payload.replace("{,}", ","))
    if number is not None:
        rest = number[1].lstrip("*_`\"'”}")
        if not goes_on(rest):
            aside = _ASIDE.search(in_words(rest))
            end = len(payload) if aside is None or rest != in_words(rest) else len(payload) - len(rest) + aside.start()
            return payload[:end].rstrip(" .,*_`\"'”"), unit_flaw(rest)
    return payload.rstrip(" .*_"), ""


_OF_THE_FRAME = frozenset({"negated", "hedged"})


def _without_frames(text: str, statements: list[Statement]) -> list[Statement]:
    r"""Leave out a statement that only wraps another one, such as the sentence of ``The answer is
    \boxed{18}``. A wrapper with its own number or a "not" stays, with its problem."""
    ordered = sorted(statements, key=lambda statement: (statement.start, statement.form))
    kept: list[Statement] = []
    for index, outer in enumerate(ordered):
        inner = next((s for s in ordered[index + 1 : index + 3] if outer.start < s.start <= outer.end), None)
        if inner is None or outer.form is Form.BOX:
            kept.append(outer)
        elif _has_digit(text[outer.start : inner.start]):
            kept.append(replace(outer, problem=outer.problem or "several numbers"))
        elif problem := flaw(text[outer.start : inner.start]) or (
            outer.problem if outer.problem in _OF_THE_FRAME else ""
        ):
            kept.append(replace(outer, problem=problem))
    return kept


def _context_flaw(text: str, start: int, form: Form) -> str:
    """Judge the text before a statement in its sentence, and doubts in the sentence before."""
    begin = _sentence_start(text, start)
    before = text[begin:start]
    # a display formula continues the line above
    if form is Form.BOX and not before.strip(" \t$*_\\[(#>-"):
        above = text[:begin].rstrip(" \t\n$*_\\[(")
        if _GOES_ON.search(above[-20:]):
            before = above[_sentence_start(above, len(above)) :]
    before = before[-_CONTEXT_CHARS:]
    if form is Form.ANSWER:
        # a line of working may lack a full stop, so a capital letter also starts a sentence
        starters = [match.start() for match in _STARTER.finditer(before)] or [0]
        near = "" if text[start].isupper() else before[starters[-1] :]
        is_negated = _stands_alone(_NEGATED, _CLAUSE.split(near)[-1])
        is_hedged = _stands_alone(_HEDGED, near) or _stands_alone(_BELIEVED, re.split("[,;:]", near)[-1])
    else:
        # "not" and "could" in the working may be about other things, so only the last word counts
        near = _LINKS.sub("", before[-_CONTEXT_CHARS // 2 :])
        is_negated = _ends_with(_NEGATED, near)
        is_hedged = _ends_with(_HEDGED, near) or _ends_with(_BELIEVED, near)
    if is_negated:
        return "negated"
    if is_hedged or _HEDGED_BY_ME.search(before) or (form is Form.BOX and _VAGUE_END.search(before)):
        return "hedged"
    if _CHOICE_END.search(before):
        return "alternatives"
    previous = text[:begin].rstrip(" \t\n.")
    doubt = _DOUBT.search(previous[_sentence_start(previous, len(previous)) :][-_CONTEXT_CHARS:])
    return "" if doubt is None else "hedged"


def _stands_alone(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether ``pattern`` occurs in ``text`` with no number after it, which it could refer to instead."""
    ends = [match.end() for match in pattern.finditer(text)]
    return bool(ends) and not _has_digit(text[ends[-1] :])


def _ends_with(pattern: re.Pattern[str], text: str) -> bool:
    return any(match.end() == len(text) for match in pattern.finditer(text))


def _sentence_start(text: str, place: int) -> int:
    """Return where the sentence around ``place`` starts; a line break ends a sentence."""
    start = max(0, place - _CONTEXT_CHARS)
    for match in _SENTENCE_END.finditer(text, start, place):
        start = match.end()
    return start


def _sentence_stop(text: str, place: int) -> int:
    match = _SENTENCE_END.search(text, place)
    return len(text) if match is None else match.start()


def _line_end(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end
