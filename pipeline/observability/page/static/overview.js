// The first tab: five figures, the live pipeline, its twelve steps, and the latest incidents.

import { isReport } from "./api.js";
import { Curves } from "./charts.js";
import { age, clock, count, h, keyed, mark, panel, percent, say, short, words } from "./dom.js";
import { Pipeline, Story } from "./pipeline.js";
import { missingList, summaryCards } from "./record.js";

function card(title, href) {
  const value = h("b", { class: "value" });
  const note = h("span", { class: "soft" });
  const element = h("a", { class: "card", href }, h("span", { class: "card-title", text: title }), value, note);
  return { element, value, note };
}

export function dropped(totals) {
  const rows = Object.entries(totals?.num_groups_dropped ?? {}).filter(([, number]) => number);
  return rows.sort((a, b) => b[1] - a[1]);
}

export class OverviewTab {
  constructor(app) {
    this.app = app;
    const to = (tab) => app.link(tab);
    this.accuracy = card("Accuracy", to("learning"));
    this.limit = card("What limits it", to("workers"));
    this.staleness = card("Staleness", to("work"));
    this.drops = card("Dropped", to("work"));
    this.answer = card("Newest answer", to("answers"));
    this.cards = h("div", { class: "cards" }, [this.accuracy, this.limit, this.staleness, this.drops, this.answer].map((one) => one.element));
    this.pipeline = new Pipeline({ scale: (role, number) => app.scale(role, number), isElastic: (role) => app.isElastic(role) });
    this.story = new Story();
    this.picturePanel = panel("The pipeline, now", { class: "wide" }, this.pipeline.element);
    this.storyPanel = panel("A token's way, step by step", { class: "wide" }, this.story.element);
    this.curves = { accuracy: new Curves("Accuracy", { percent: true, named: true, always: true }), reward: new Curves("Reward, mean of the batch", { always: true }), length: new Curves("Length of a response, tokens", { fromZero: true, always: true }) };
    this.learning = panel("Learning", { class: "wide" }, h("div", { class: "charts" }, Object.values(this.curves).map((one) => one.element)));
    this.incidentList = h("ul", { class: "incidents" });
    this.incidents = panel("Incidents", { class: "wide" }, this.incidentList);
    this.missing = panel("Not on this page", { class: "wide", hidden: true });
    // A report has no pipeline at work.
    for (const one of [this.picturePanel, this.storyPanel]) one.element.hidden = isReport;
    this.element = h("div", { class: "tab" }, this.cards, this.missing.element, this.picturePanel.element, this.storyPanel.element, this.learning.element, this.incidents.element);
  }

  show(overview) {
    const progress = overview.progress ?? {};
    const held = progress.held_out ?? [];
    const batch = progress.accuracies ?? [];
    say(this.accuracy.value, held.length ? percent(held.at(-1)) : batch.length ? percent(batch.at(-1)) : "none yet");
    const evaluation = progress.evaluation;
    const interval = evaluation && evaluation.low !== null && evaluation.low !== undefined ? `${percent(evaluation.low)} to ${percent(evaluation.high)}; ` : "";
    say(this.accuracy.note, held.length ? `held-out, ${interval}at first ${percent(held[0])}` : batch.length ? "of the newest batch" : "no update yet");
    const culprit = /(\S+),? (?:which )?is (at|silent|stuck)\b/.exec(overview.waits ?? "");
    say(this.limit.value, overview.is_over ? "over" : overview.is_paused ? "paused" : (culprit?.[1].replace(/,$/, "") ?? "nothing"));
    say(this.limit.note, overview.is_over ? overview.detail || overview.state : overview.is_paused ? overview.pause || "admission was stopped by a person" : overview.waits);
    const versions = overview.versions ?? {};
    const has = versions.staleness_mean !== null && versions.staleness_mean !== undefined;
    say(this.staleness.value, has ? `${versions.staleness_mean.toFixed(1)} versions` : "none yet");
    say(this.staleness.note, has ? `mean of the newest update; at most ${versions.staleness_max}${versions.max_staleness !== null && versions.max_staleness !== undefined ? `, the bound is ${versions.max_staleness}` : ""}` : "before the first update");
    const totals = overview.totals;
    const rows = dropped(totals);
    const sum = rows.reduce((all, [, number]) => all + number, 0);
    say(this.drops.value, totals ? (sum ? percent(sum / Math.max(1, totals.num_groups_admitted), 0) : "nothing") : "–");
    say(this.drops.note, sum ? `${count(sum)} of ${count(totals.num_groups_admitted)} groups: ${rows.slice(0, 3).map(([reason, number]) => `${words(reason)} ${short(number)}`).join(", ")}` : "of the groups admitted");
    this.pipeline.show(overview);
    this.story.show(overview);
    showIncidents(this.incidentList, (overview.incidents ?? []).slice(-6));
    say(this.incidents.note, overview.incidents?.length ? `${overview.incidents.length} newest in all` : "");
  }

  record(data) {
    if (!isReport) return;
    this.cards.classList.add("summary");
    this.cards.replaceChildren(...summaryCards(data.cards));
    this.missing.element.hidden = !data.missing.length;
    this.missing.body.replaceChildren(missingList(data.missing));
  }

  history(data) {
    showAccuracy(this.curves.accuracy, data);
    const x = data.updates.update ?? [];
    this.curves.reward.show([{ name: "reward", x, y: data.updates.reward ?? [] }]);
    this.curves.length.show([{ name: "batch", x, y: data.updates.response_length ?? [] }]);
  }

  samples(data) {
    const newest = data.samples?.[0];
    say(this.answer.value, newest ? newest.verdict : "none yet");
    mark(this.answer.value, "data-verdict", newest ? (newest.accuracy >= 1 ? "right" : newest.accuracy <= 0 ? "wrong" : "part") : null);
    say(this.answer.note, newest ? `update ${newest.update}: ${newest.response.replaceAll("\n", " ").slice(0, 140) || "(empty)"}` : "before the first update");
  }
}

export function showAccuracy(curves, data) {
  const series = [{ name: "batch", x: data.updates.update ?? [], y: data.updates.accuracy ?? [], colour: 5 }];
  const sets = new Map();
  for (const row of data.evaluations ?? []) {
    if (!sets.has(row.set_name)) sets.set(row.set_name, []);
    sets.get(row.set_name).push(row);
  }
  let colour = 0;
  for (const [name, rows] of sets)
    series.push({ name, points: true, colour: colour++, x: rows.map((row) => row.update), y: rows.map((row) => row.accuracy), low: rows.map((row) => row.low), high: rows.map((row) => row.high) });
  curves.show(series);
}

export function showIncidents(list, incidents) {
  const rows = [...incidents].reverse();
  keyed(list, rows, (row) => `${row.at_s} ${row.worker} ${row.event}`, (row) =>
    h("li", { "data-level": row.level }, h("time", { text: clock(row.at_s) }), h("b", { text: row.worker }), h("span", { text: row.words })));
  if (!rows.length) keyed(list, [1], () => "none", () => h("li", { class: "soft", text: "None: no worker ended unexpectedly, and the supervisor logged no warning." }));
}
