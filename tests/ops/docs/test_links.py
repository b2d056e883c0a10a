"""Claims about links of Markdown: found as a reader sees them, and rewritten."""

from __future__ import annotations

from ops.docs.links import Link, relative, relinked, resolved

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


def test_a_rewritten_page_differs_in_its_targets_alone() -> None:
    found: list[str] = []
    assert relinked(PAGE, lambda target: found.append(target) or target) == PAGE
    assert found == ["a.md#part", "b/c.svg", "d.py", "h.md", "https://example.org/x", "#one-two"]
    assert [Link(target).is_elsewhere for target in found] == [False] * 4 + [True, False]
    assert relinked(PAGE, lambda _: "Z").count("](Z)") == 6
    assert "`[code](e.md)`" in relinked(PAGE, lambda _: "Z")


def test_places_are_resolved_from_the_page_that_links() -> None:
    assert resolved("ops/docs/a.md", "../../README.md") == "README.md"
    assert relative("concepts/a.md", "reference/b.md") == "../reference/b.md"
    assert relative("a.md", "reference/b.md") == "reference/b.md"
