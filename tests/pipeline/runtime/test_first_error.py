"""A worker's report of its end: the first error of its tasks, and nothing that others did to it."""

from __future__ import annotations

import pytest

from pipeline.process.exit_codes import Interrupted
from pipeline.runtime.first_error import FirstError
from pipeline.runtime.registry.contract import MAX_DETAIL_CHARS
from protocol.errors import EngineDied, Fenced, LedgerUnavailable
from protocol.ids import Incarnation, Role

WHO = Incarnation(Role.GENERATOR, "generator-0", 3)


def ended_by(*errors: Exception) -> FirstError:
    first = FirstError()
    for error in errors:
        with pytest.raises(type(error)), first.noted():
            raise error
    return first


async def test_the_first_error_is_said_by_its_class_and_in_its_words() -> None:
    async def fails() -> None:
        raise EngineDied("vLLM's processes\nfailed")

    first = FirstError()
    with pytest.raises(EngineDied):
        await first.noting(fails())
    with pytest.raises(KeyError), first.noted():
        raise KeyError("a later one")
    said = first.report(WHO)
    assert said is not None and (said.who, said.error, said.message) == (WHO, "EngineDied", "vLLM's processes failed")


@pytest.mark.parametrize("error", [Fenced("newer"), LedgerUnavailable("away"), Interrupted("twice")])
def test_an_end_that_others_brought_about_is_not_said(error: Exception) -> None:
    assert ended_by(error).report(WHO) is None
    assert FirstError().report(WHO) is None


def test_a_message_that_would_steer_a_terminal_is_made_printable() -> None:
    said = ended_by(ValueError("bad \x1b[2Jverdict")).report(WHO)
    assert said is not None and "\x1b" not in said.message and "verdict" in said.message


def test_a_long_message_and_a_group_of_errors_fit_into_a_report() -> None:
    said = ended_by(ExceptionGroup("several", [ValueError("x" * 5000)])).report(WHO)
    assert said is not None and (said.error, len(said.message)) == ("ValueError", MAX_DETAIL_CHARS)
