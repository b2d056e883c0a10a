"""Claims about links and anchors of Markdown: found as a reader sees them, checked, rewritten."""

from __future__ import annotations

import pytest

from ops.docs.links import Link, anchors, links, relative, relinked, resolved, slug, title_of

PAGE = """# One `two`

See [a page](a.md#part), ![a picture](b/c.svg) and
[`code` as text](d.py), not `[code](e.md)` nor ``[more](f.md)``.

```md
[fenced](g.md)
# no heading
```

    $ indented [x](h.md)

## One two

[elsewhere](https://example.org/x) and [here](#one-two)
"""


def test_links_are_found_outside_of_code_with_their_lines() -> None:
    assert links(PAGE) == [
        Link(3, "a.md#part"), Link(3, "b/c.svg"), Link(4, "d.py"), Link(11, "h.md"),
        Link(15, "https://example.org/x"), Link(15, "#one-two"),
    ]  # fmt: skip
    assert [link.is_elsewhere for link in links(PAGE)] == [False] * 4 + [True, False]


def test_a_rewritten_page_differs_in_its_targets_alone() -> None:
    assert relinked(PAGE, lambda target: target) == PAGE
    assert relinked(PAGE, lambda _: "Z").count("](Z)") == 6
    assert "`[code](e.md)`" in relinked(PAGE, lambda _: "Z")


def test_anchors_are_those_of_headings_counted_when_they_repeat() -> None:
    assert anchors(PAGE) == {"one-two", "one-two-1"}
    assert title_of(PAGE) == "One `two`"


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Exit codes of `headrace up`", "exit-codes-of-headrace-up"),
        ("algorithm.clip_high", "algorithmclip_high"),
        ("Runs with a critic (ppo, vapo, tppo)", "runs-with-a-critic-ppo-vapo-tppo"),
        ("[A link](x.md), and more", "a-link-and-more"),
    ],
)
def test_a_headings_anchor_is_as_on_the_web(title: str, expected: str) -> None:
    assert slug(title) == expected


def test_places_are_resolved_from_the_page_that_links() -> None:
    assert resolved("ops/docs/a.md", "../../README.md") == "README.md"
    assert relative("concepts/a.md", "reference/b.md") == "../reference/b.md"
    assert relative("a.md", "reference/b.md") == "reference/b.md"
