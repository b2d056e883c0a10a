"""The report and the comparison in a browser, opened from disk: the page of the dashboard in one file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pipeline.observability.comparison import compare_runs, read_runs
from pipeline.observability.comparison_page import write_comparison
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.observability.report import write_report
from pipeline.observability.samples import response_samples
from tests.pipeline.observability.rows import update_row
from tests.pipeline.observability.test_comparison import made
from tests.pipeline.observability.test_report import AUDIT, full_run, sample
from tests.web.conftest import Browser
from tests.web.test_page import CONTRASTS, card, expect, panel

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.timeout(300)
HOSTILE = "</script><!--<script>window.hacked = true</script><img src=x onerror=window.hacked=true>"
TABS = ("overview", "learning", "time", "work", "answers", "record")

DRAWN: dict[str, tuple[str, ...]] = {
    "Accuracy": ("batch", "held-out"),
    "Reward, mean of the batch": (),
    "Length of a response, tokens": ("batch", "held-out"),
    "Loss": (),
    "KL, nats per token": ("to the reference", "sampling to learner", "within the update"),
    "Entropy, nats per token": (),
    "Gradient norm, before clipping": (),
    "Clipped tokens, %": ("ratio", "dual clip", "importance weight"),
    "Policy ratio, present to old, mean": (),
    "Policy ratio, largest": (),
    "Importance weight, learner to sampler": ("ratio, mean", "weight after its bounds, mean"),
    "Learning rate": (),
    "Staleness, versions": ("oldest token", "mean"),
    "Policy versions in one response, mean": (),
    "Time of an update, seconds": ("waiting for units", "log-probs", "steps", "publishing", "checkpoint and snapshot"),
    "Share of an update in steps and log-probs, %": (),
    "Trained tokens per second": (),
    "Critic: explained variance of returns": ("each step", "moving mean"),
    "Critic: loss": (),
    "Critic: values and their targets, means": ("values", "targets"),
    "Critic: gradient norm, before clipping": (),
}
TIMES: dict[str, tuple[str, ...]] = {
    "learner: share of time, %": ("computing", "waits for input"),
    "generator: share of time, %": ("computing", "waits for credit"),
    "Tokens per second: written, scored, trained": ("learner", "generator"),
    "Groups dropped, by reason": ("no signal", "cancelled"),
    "Ready units, at the learner's claim": (),
    "Resident memory, GB": ("learner", "generator"),
    "Workers": ("learner", "generator"),
}
"""The legends of the charts, by title."""


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The address of the report of a run that has everything, a hostile response too."""
    folder = full_run(tmp_path)
    rows = [sample(2, HOSTILE, prompt=HOSTILE, answer=HOSTILE), sample(1, "it is 5", accuracy=0.0, reward=-1.0)]
    response_samples(folder).rewrite(rows)
    return write_report(folder, title="demo", detail=f"finished: {HOSTILE}", audit=AUDIT).as_uri()


def opened(browser: Browser, url: str, tab: str, **size: int | str) -> Page:
    page = browser.open(url, **size)  # pyright: ignore[reportArgumentType]
    page.wait_for_selector("main")
    go(page, tab)
    return page


def go(page: Page, tab: str) -> None:
    page.locator(f'.tabs a[href$="/{tab}"]').click()
    page.wait_for_selector(f'.tabs a[aria-current="page"][href$="/{tab}"]')


def chart(page: Page, title: str) -> Locator:
    return page.locator(".chart:visible").filter(has=page.get_by_role("heading", name=title, exact=True))


def test_the_report_opens_from_disk_with_accuracy_samples_and_incidents_and_asks_for_nothing(
    browser: Browser, report: str
) -> None:
    page = opened(browser, report, "overview")
    expect(card(page, "accuracy before")).to_contain_text("25.0 %")
    expect(card(page, "updates")).to_contain_text("3")
    expect(chart(page, "Accuracy").locator("circle.dot")).to_have_count(1)
    expect(panel(page, "Incidents")).to_contain_text("was replaced: <b>stuck")
    expect(panel(page, "Not on this page")).to_contain_text("Accuracy after training")
    expect(page.locator(".top .pill")).to_contain_text("finished")
    go(page, "answers")
    expect(page.locator(".answer", has_text="it is 5").locator(".verdict")).to_have_text("wrong")
    go(page, "work")
    balance = panel(page, "The ledger's balance")
    expect(balance).to_contain_text("it balances")
    expect(balance.locator("tbody tr", has_text="dropped: no signal").locator("td").first).to_have_text("3")
    go(page, "record")
    expect(panel(page, "Faults and restarts")).to_contain_text("ended (killed by SIGKILL)")
    expect(panel(page, "Repairs")).to_contain_text("detect 10 %, replace 20 %")
    expect(panel(page, "Starts")).to_contain_text("torch 2.12.0+cpu")
    expect(panel(page, "How it was made")).to_contain_text("EPYC")
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    assert page.locator(".tabs a", has_text=re.compile("Workers|Runs")).count() == 0, "a report has neither"


def test_all_that_the_history_has_is_drawn(browser: Browser, report: str) -> None:
    page = opened(browser, report, "learning")
    for tab, charts in (("learning", DRAWN), ("time", TIMES)):
        go(page, tab)
        for title, legend in charts.items():
            found = chart(page, title)
            expect(found.locator("path.curve, path.area").first).to_be_attached()
            for name in legend:
                expect(found.locator(".legend")).to_contain_text(name)
        shown = page.locator(".chart:visible h3").all_text_contents()
        assert sorted(shown) == sorted(charts)


def test_numbers_too_large_to_draw_leave_a_gap(browser: Browser, tmp_path: Path) -> None:
    history = run_history(full_run(tmp_path) / HISTORY_NAME)
    for number, loss in ((4, 1e308), (5, -1e308), (6, 2.0)):
        history.append(replace(update_row(number), loss=loss))
    page = opened(browser, write_report(tmp_path, title="demo", detail="", audit=None).as_uri(), "learning")
    drawn = chart(page, "Loss").locator("path.curve").get_attribute("d") or ""
    assert len(re.findall("[ML]", drawn)) == 4 and re.search("[^-ML. 0-9]", drawn) is None
    assert all(len(value) < 9 for value in chart(page, "Loss").locator("text.tick").all_text_contents())


def test_a_hostile_response_is_text_in_the_report(browser: Browser, report: str) -> None:
    page = opened(browser, report, "answers")
    hostile = page.locator(".answer").filter(has=page.locator(".verdict", has_text="right")).first
    expect(hostile.locator(".response")).to_have_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


def test_the_policy_of_content_lets_no_other_script_run(browser: Browser, report: str) -> None:
    page = opened(browser, report, "overview")
    page.evaluate("() => { const made = document.createElement('script'); made.append('window.hacked = true'); "
                  "document.head.append(made); }")  # fmt: skip
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in browser.complaints)
    browser.complaints.clear()


def test_an_empty_or_torn_run_folder_has_a_page_that_says_what_is_missing(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes(b'{"kind": "update", "upd\n\xff\x00 torn')
    (tmp_path / "config.toml").write_bytes(b"[run\n\xff")
    url = write_report(tmp_path, title="demo", detail="failed", audit=None).as_uri()
    page = opened(browser, url, "overview")
    missing = panel(page, "Not on this page")
    for words in ("no update is done", "line of history.jsonl skipped, damaged", "fleet-history.jsonl", "Samples"):
        expect(missing).to_contain_text(words)
    for tab in TABS:
        go(page, tab)
    expect(panel(page, "How it was made")).to_contain_text("not known")


def test_a_comparison_lays_runs_over_one_another_with_its_statistics(
    browser: Browser, tmp_path: Path, keep: Callable[[Page, str], None]
) -> None:
    one, other = made(tmp_path / "a<b>", {0: 0.4, 10: 0.9}), made(tmp_path / "b", {0: 0.4, 10: 0.6}, rate=1.0)
    url = write_comparison(compare_runs(read_runs([one, other])), tmp_path / "page.html").as_uri()
    page = browser.open(url)
    expect(panel(page, "Is there a difference?")).to_contain_text("B is 30.0 points lower than A")
    expect(panel(page, "Settings that differ")).to_contain_text("learner.learning_rate")
    accuracy = chart(page, "Held-out accuracy")
    expect(accuracy.locator(".plot path.curve")).to_have_count(2)
    expect(accuracy.locator(".legend")).to_contain_text("a<b> 90 %")
    page.get_by_label("draw over").select_option("tokens")
    expect(accuracy.locator(".plot .tick").last).to_have_text(re.compile(r"6000"))
    keep(page, "comparison")
    page.locator("select#run").select_option("b")
    go(page, "learning")
    expect(chart(page, "Loss").locator("path.curve")).to_be_attached()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_view_of_the_report_fits_its_width_and_can_be_read(
    browser: Browser, report: str, keep: Callable[[Page, str], None], width: int, scheme: str
) -> None:
    page = opened(browser, report, "overview", width=width, height=800, scheme=scheme)
    for tab in TABS:
        go(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        assert min(page.evaluate(CONTRASTS)) >= 4.0, (tab, scheme)
        keep(page, f"report-{tab}-{width}-{scheme}")
