"""The film of the README, from frames made by hand."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ops.demo.record import HOLD_END_S, HOLD_KILL_S, MAX_FRAMES, PLAY_S, Line, film, paced


def line(text: str) -> Line:
    return ((text, "#ffffff", "", False),)


FRAMES = [(float(at), (line("nothing & <more>"), line(f"second {at}"))) for at in range(600)]


def test_the_film_is_as_long_as_it_should_be_and_stops_where_the_process_is_killed() -> None:
    shown = paced(FRAMES, killed_at_s=301.0)
    assert len(shown) <= MAX_FRAMES + 2
    assert abs(sum(seconds for seconds, _ in shown) - (PLAY_S + HOLD_KILL_S + HOLD_END_S)) < 0.01
    held = max(shown[:-1], key=lambda frame: frame[0])
    assert held[1] == FRAMES[301][1]
    assert shown[-1] == (HOLD_END_S, FRAMES[-1][1])


def test_a_line_that_stays_is_stored_once_and_every_frame_shows_it() -> None:
    picture = film(paced(FRAMES[:20], killed_at_s=None))
    ElementTree.fromstring(picture)
    assert picture.count("nothing &amp; &lt;more&gt;") == 1
    name = re.findall(r'<g id="(l\d+)"><text [^>]*>nothing', picture)[0]
    assert picture.count(f'href="#{name}"') == picture.count('href="#') / 2 > 10
