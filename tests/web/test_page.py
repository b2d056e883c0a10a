"""The dashboard in a browser, before a real run: it shows, acts, and runs nothing of a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.operator.web.served import SHOWN
from tests.web.conftest import HOSTILE_WORKER, NUM_HELD, Browser, Dashboard, num_updates, show, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.timeout(600)
TABS = ("overview", "learning", "time", "work", "workers", "answers", "record", "runs")
NUMBER = re.compile(r"\d")


def expect(locator: Locator) -> Any:
    from playwright.sync_api import expect as playwright_expect  # pyright: ignore[reportMissingImports]

    return playwright_expect(locator)


def panel(page: Page, title: str) -> Locator:
    return page.locator("main .panel:visible").filter(has=page.get_by_role("heading", name=title, exact=True))


def card(page: Page, title: str) -> Locator:
    return page.locator(".card").filter(has=page.locator(".card-title").get_by_text(title, exact=True))


def generators(page: Page) -> Locator:
    return page.locator(".node.role-generator")


def test_the_overview_shows_the_pipeline_alive(page: Page) -> None:
    for role in ("generator", "reward", "reference", "learner"):
        expect(page.locator(f".node.role-{role} .number")).to_have_text(re.compile(r"^\d+ of \d+$"))
        expect(page.locator(f".node.role-{role} .now")).not_to_be_empty()
    expect(page.locator(".links .link")).to_have_count(7)
    expect(page.locator(".links .label").first).to_have_text(re.compile("."))
    expect(page.locator(".sentence")).to_contain_text(re.compile(r" is at | waits for "))
    expect(page.locator(".lanes li").filter(has_text="ready")).to_be_visible()
    expect(page.locator(".story li")).to_have_count(12)
    assert all(text != "–" for text in page.locator(".story b").all_text_contents())
    expect(page.locator("main .chart:visible path.curve").first).to_be_attached()
    expect(panel(page, "Incidents").locator("li")).not_to_have_count(0)


def test_the_picture_moves_without_a_reload(page: Page) -> None:
    before = page.locator(".story li").nth(2).inner_text()
    expect(page.locator(".story li").nth(2)).not_to_have_text(before)
    expect(page.locator(".live")).to_have_attribute("data-state", "live")


def test_a_run_is_called_live_once_its_figures_have_come(page: Page) -> None:
    live = page.locator(".live")
    expect(live).to_have_attribute("data-state", "live")
    page.evaluate(
        "() => { window.states = []; const live = document.querySelector('.live');"
        "new MutationObserver(() => states.push(live.dataset.state))"
        ".observe(live, { attributes: true, attributeFilter: ['data-state'] }); }"
    )
    show(page, "large", "overview")
    expect(live).to_have_attribute("data-state", "live")
    until(lambda: page.evaluate("states.length") >= 2, 60.0)
    assert page.evaluate("states") == ["reading", "live"]


def test_every_learning_curve_has_a_line(page: Page) -> None:
    show(page, "live", "learning")
    for title in (
        "Accuracy",
        "Reward, mean of the batch",
        "Length of a response, tokens",
        "Loss",
        "Staleness, versions",
    ):
        chart = page.locator(".chart:visible").filter(has=page.get_by_role("heading", name=title, exact=True))
        expect(chart.locator("path.curve").first).to_be_attached()
    accuracy = page.locator(".chart:visible .plot").first
    accuracy.focus()
    accuracy.press("ArrowLeft")
    expect(page.locator(".readout:visible")).to_contain_text(re.compile(r"update \d+"))


def test_work_has_balance_drops_histograms_queues_and_groups(page: Page) -> None:
    show(page, "live", "work")
    balance = panel(page, "The ledger's balance")
    expect(balance.locator(".note")).to_contain_text("it balances")
    expect(balance.locator("tbody tr").first).to_contain_text("admitted")
    expect(balance.locator("tbody tr").last.locator("td").first).to_have_text("0")
    expect(panel(page, "Dropped against trained").locator("tbody tr").first).to_contain_text("trained")
    for chart in panel(page, "Histograms").locator(".chart").all():
        expect(chart.locator("rect.bar").first).to_be_attached()
    expect(panel(page, "Queues and mailboxes").locator("tbody tr").first).to_be_visible()
    expect(panel(page, "Oldest open groups").locator(".note")).to_contain_text("members each")


def test_a_state_of_work_has_one_colour_in_every_picture(page: Page) -> None:
    show(page, "live", "work")
    balance = panel(page, "The ledger's balance").locator(".entry")
    staleness = panel(page, "Histograms").locator(".chart").filter(has_text="Staleness").locator(".entry")
    expect(balance.first).to_be_visible()
    expect(staleness.first).to_be_visible()
    of_shares, of_bars = (
        {_name(one): one.locator(".swatch").get_attribute("class") for one in of.all()} for of in (balance, staleness)
    )
    both = of_shares.keys() & of_bars.keys()
    assert "trained" in both
    assert any(name.startswith("dropped") for name in both)
    assert {name: of_shares[name] for name in both} == {name: of_bars[name] for name in both}


def _name(entry: Locator) -> str:
    return re.sub(r"\s[\d.,]+\s?%$", "", entry.inner_text().strip())


def test_workers_have_state_waits_and_logs(page: Page) -> None:
    show(page, "live", "workers")
    rows = panel(page, "Workers").locator("tbody tr")
    expect(page.locator('tr[data-key="learner"]')).to_contain_text("live")
    expect(page.locator('tr[data-key="generator-0"]')).to_contain_text(NUMBER)
    expect(panel(page, "Why it waits").locator(".chain").first).to_be_visible()
    rows.get_by_role("button", name="reward-0").click()
    log = page.locator("pre.log:visible").first
    expect(log).to_contain_text("reward-0")
    expect(log).not_to_contain_text("generator-0")


def test_answers_are_coloured_by_version_advantage_and_log_prob(page: Page) -> None:
    show(page, "live", "answers")
    answer = page.locator(".answer").first
    expect(answer.locator(".verdict")).to_have_text(re.compile("right|wrong"))
    expect(answer).to_contain_text("reward")
    tokens = answer.locator(".response .tok")
    for choice, kind in (("policy version", "v"), ("advantage", "a"), ("log-prob", "l")):
        page.get_by_text(choice, exact=True).click()
        expect(tokens.first).to_have_class(re.compile(rf"tok {kind}\d+"))
        assert tokens.first.get_attribute("title")
    whole = answer.locator(".response").inner_text()
    page.get_by_text("plain", exact=True).click()
    assert whole.startswith(answer.locator(".response").inner_text())


def test_a_scale_click_changes_the_fleet(page: Page, dashboard: Dashboard) -> None:
    expect(generators(page).locator(".number")).to_have_text("2 of 2")
    generators(page).get_by_role("button", name="one generator worker more").click()
    expect(generators(page).locator(".number")).to_have_text("3 of 3", timeout=120_000)
    roles = {row["role"]: row["num_live"] for row in dashboard.headrace("status", str(dashboard.live))["roles"]}
    assert roles["generator"] == 3
    generators(page).get_by_role("button", name="one generator worker fewer").click()
    expect(generators(page).locator(".number")).to_have_text("2 of 2", timeout=120_000)


def test_a_drain_click_has_one_worker_finish_and_leave(
    page: Page, dashboard: Dashboard, keep: Callable[[Page, str], None]
) -> None:
    show(page, "live", "workers")
    row = page.locator('tr[data-key="generator-1"]')
    expect(row).to_contain_text("live")
    before = num_updates(dashboard.live)
    row.get_by_role("button", name="Drain").click()
    expect(page.locator(".said")).to_have_text("generator-1 takes no new work, finishes, and leaves")
    keep(page, "drain")
    expect(row).to_have_count(0, timeout=120_000)
    found = dashboard.headrace("status", str(dashboard.live))
    roles = {role["role"]: role for role in found["roles"]}
    assert (roles["generator"]["num_live"], roles["generator"]["num_wanted"]) == (1, 1), "none takes its place"
    until(lambda: num_updates(dashboard.live) > before, 120.0)
    page.get_by_label("generator", exact=True).fill("2")
    page.locator("form.role", has_text="generator").get_by_role("button", name="Scale").click()
    expect(page.locator("form.role", has_text="generator").locator(".present")).to_have_text("2 of 2", timeout=120_000)


def test_the_last_worker_of_a_role_is_not_drained_and_the_page_says_why(page: Page, browser: Browser) -> None:
    show(page, "live", "workers")
    page.locator('[data-drain="reward-0"]').click()
    expect(page.locator(".said")).to_contain_text("reward-0 is the run's last reward")
    expect(page.locator('tr[data-key="reward-0"]')).to_contain_text("live")
    expect(page.locator('[data-drain="learner"]')).to_be_hidden()
    # The browser itself writes the refusal into the console.
    assert all("400" in said for said in browser.complaints)
    browser.complaints.clear()


def test_the_balance_of_a_large_ledger_is_counted_at_a_click(
    browser: Browser, dashboard: Dashboard, keep: Callable[[Page, str], None]
) -> None:
    page = browser.open(f"{dashboard.url}#token={dashboard.token}")
    page.wait_for_selector("main")
    show(page, "large", "work")
    balance = panel(page, "The ledger's balance")
    expect(balance.locator(".note")).to_contain_text("entries are in flight; counting them holds up the ledger")
    expect(balance.locator("tbody tr")).to_have_count(0)
    balance.get_by_role("button", name="Count now").click()
    leased = balance.locator("tbody tr", has_text="in flight: leased").locator("td").nth(1)
    expect(leased).to_have_text(f"{NUM_HELD:,}")
    expect(balance.locator("tbody tr").last.locator("td").nth(1)).to_have_text("0")
    # The next look counts nothing, and names the time of the count.
    again = re.compile(r"entries are in flight.*it balanced .* ago")
    expect(balance.locator(".note")).to_contain_text(again, timeout=20_000)
    expect(leased).to_have_text(f"{NUM_HELD:,}")
    keep(page, "balance")


def test_a_trajectorys_life_opens_and_closes_by_the_keyboard(page: Page, keep: Callable[[Page, str], None]) -> None:
    show(page, "live", "answers")
    # Newer answers come meanwhile, above it.
    name = page.locator(".answer > header").first.inner_text().rpartition(" ")[2]
    answer = page.locator(".answer").filter(has=page.locator("header", has_text=re.compile(rf" {re.escape(name)}$")))
    life = answer.locator("details.life")
    life.locator("summary").focus()
    page.keyboard.press("Enter")
    told = life.locator("pre")
    for event in ("admitted", "leased by generator-", "chunk 0: ", ", by reward-0", "claimed by the learner"):
        expect(told).to_contain_text(event)
    # A checkpoint settles it, and the open panel goes on.
    expect(told).to_contain_text("trained on by update", timeout=120_000)
    page.keyboard.press("Tab")
    expect(told).to_be_focused()
    keep(page, "life")
    page.keyboard.press("Escape")
    expect(told).to_be_hidden()
    expect(life.locator("summary")).to_be_focused()


def test_a_life_with_hostile_names_stays_text(browser: Browser, dashboard: Dashboard) -> None:
    page = browser.open(f"{dashboard.url}#token={dashboard.token}")
    page.wait_for_selector("main")
    show(page, "large", "answers")
    life = page.locator(".answer", has_text="t.1.0").locator("details.life")
    life.locator("summary").click()
    expect(life.locator("pre")).to_contain_text(f"leased by {HOSTILE_WORKER}")
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.hacked") is None
    # A run of files alone has no ledger.
    show(page, "hostile", "answers")
    life = page.locator(".answer details.life").first
    life.locator("summary").click()
    expect(life.locator("pre")).to_contain_text("ledger")
    # The browser itself writes the refusal into the console.
    assert all("400" in said for said in browser.complaints)
    browser.complaints.clear()


def test_a_pause_click_stops_admission_and_another_lets_it_go_on(page: Page) -> None:
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".top .pill")).to_have_text("paused")
    expect(card(page, "What limits it")).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".top .pill")).to_have_text("running")


def test_what_a_model_or_a_log_writes_stays_text(browser: Browser, dashboard: Dashboard) -> None:
    page = browser.open(f"{dashboard.url}#token={dashboard.token}")
    page.wait_for_selector("main")
    show(page, "hostile", "overview")
    expect(card(page, "Newest answer")).to_contain_text("<script>")
    show(page, "hostile", "answers")
    hostile = page.locator('.answer[data-verdict="wrong"]').first
    expect(hostile.locator(".prompt").first).to_have_text(SHOWN)
    page.get_by_text("plain", exact=True).click()
    expect(hostile.locator(".response")).to_have_text(SHOWN)
    show(page, "hostile", "workers")
    expect(page.locator("pre.log:visible").first).to_contain_text("<script>")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
    # Code in the page is refused by its policy, even where a script would add it.
    inline = (
        "const made = document.createElement('script'); made.append('window.hacked = true'); document.head.append(made)"
    )
    page.evaluate(f"() => {{ try {{ {inline} }} catch {{}} }}")
    assert page.evaluate("window.hacked") is None
    assert browser.complaints
    browser.complaints.clear()


def test_runs_are_shown_side_by_side(page: Page) -> None:
    show(page, "live", "runs")
    expect(panel(page, "Runs").locator("tbody tr")).to_have_count(3)
    page.get_by_role("checkbox", name="compare hostile").check()
    chart = panel(page, "Side by side").locator(".chart").nth(1)
    expect(chart.locator("path.curve")).to_have_count(2)
    expect(chart.locator(".legend")).to_contain_text("hostile")


def test_five_questions_are_answered_within_three_clicks(page: Page) -> None:
    questions = {
        "Accuracy": ("Learning curves", re.compile(r"\d+\.\d\s%")),
        "What limits it": ("Why it waits", re.compile(r"\w")),
        "Staleness": ("Histograms", re.compile(r"\d\.\d versions")),
        "Dropped": ("Dropped against trained", re.compile(r"\d+\s%|nothing")),
        "Newest answer": ("What the model answers", re.compile("right|wrong|accuracy")),
    }
    for title, (leads_to, answer) in questions.items():
        show(page, "live", "overview")
        # No click: the answer. One: all about it.
        expect(card(page, title).locator(".value")).to_have_text(answer)
        card(page, title).click()
        expect(panel(page, leads_to)).to_be_visible()


def test_every_control_is_reached_by_the_keyboard(page: Page) -> None:
    for tab in TABS:
        show(page, "live", tab)
        page.wait_for_timeout(1500)
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        wanted = page.evaluate(
            "() => [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
            ".filter(one => one.checkVisibility() && !one.disabled && !(one.type === 'radio' && !one.checked))"
            ".map((one, index) => (one.dataset.reach = index, index)).length"
        )
        reached: set[str] = set()
        for _ in range(2 * wanted + 20):
            page.keyboard.press("Tab")
            found = page.evaluate("document.activeElement?.dataset.reach ?? null")
            if found is not None:
                reached.add(found)
            if len(reached) == wanted:
                break
        # A row may have gone meanwhile.
        assert len(reached) >= wanted - 2, (tab, wanted, len(reached))


def test_a_tab_opens_by_enter_and_its_focus_is_seen(page: Page) -> None:
    page.locator(".tabs a", has_text="Work").first.focus()
    page.keyboard.press("Enter")
    expect(panel(page, "The ledger's balance")).to_be_visible()
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_every_tab_fits_its_width_and_can_be_read(
    browser: Browser, dashboard: Dashboard, keep: Callable[[Page, str], None], width: int, scheme: str
) -> None:
    page = browser.open(f"{dashboard.url}#token={dashboard.token}", width=width, height=800, scheme=scheme)
    page.wait_for_selector("main")
    for tab in TABS:
        show(page, "live", tab)
        page.wait_for_timeout(2500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        ratios = page.evaluate(CONTRASTS)
        assert min(ratios) >= 4.0, (tab, scheme, ratios)
        keep(page, f"{tab}-{width}-{scheme}")


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const probe = document.createElement('i');
    probe.style.setProperty('color', style.getPropertyValue(name));
    document.body.append(probe);
    const part = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
    probe.remove();
    const [r, g, b] = part.map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = [['--ink', '--surface'], ['--soft', '--surface'], ['--soft', '--sunken'], ['--accent', '--surface'],
    ['--good', '--good-soft'], ['--warn', '--warn-soft'], ['--bad', '--bad-soft'], ['--on-accent', '--accent']];
  return pairs.map(([one, other]) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""
"""Contrast of each colour of text with what is behind it (WCAG 2)."""


def test_on_a_narrow_screen_no_view_and_no_control_is_cut_off(browser: Browser, dashboard: Dashboard) -> None:
    page = browser.open(f"{dashboard.url}#token={dashboard.token}", width=360, height=800)
    page.wait_for_selector("main")
    show(page, "live", "workers")
    expect(page.locator('[data-drain="generator-0"]')).to_be_visible()
    for locator in (page.locator(".tabs a"), page.locator("[data-drain]:visible"), page.locator("td.says:visible")):
        assert locator.count() > 2
        for box in (one.bounding_box() for one in locator.all()):
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360, box


def test_without_the_token_the_page_requests_it(browser: Browser, dashboard: Dashboard) -> None:
    page = browser.open(dashboard.url)
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_text("no token or a wrong one")).to_be_visible()
    page.get_by_label("Token").fill(dashboard.token)
    page.get_by_role("button", name="Open").click()
    expect(page.locator(".node.role-learner")).to_be_visible()
    assert "token" not in page.url
    # Each refusal is in the console, by the browser itself.
    assert all("401" in said for said in browser.complaints)
    browser.complaints.clear()
