// All runs of the folder, and a comparison of selected ones.

import { get, isReport, runPath } from "./api.js";
import { Curves } from "./charts.js";
import { age, cells, count, date, h, keyed, mark, panel, percent, say, table } from "./dom.js";
import { missingList, textTable } from "./record.js";

const MOST = isReport ? 100 : 6;
// What the curves are drawn over: a column of the history, and its name.
const COSTS = { update: "update", tokens: "trained tokens", time_s: "seconds of the learner" };
const CHARTS = [
  ["Held-out accuracy", { percent: true, always: true }, (data, cost) => {
    const rows = (data.evaluations ?? []).filter((row) => row.is_main);
    return { points: true, x: rows.map((row) => row[cost]), y: rows.map((row) => row.accuracy), low: rows.map((row) => row.low), high: rows.map((row) => row.high) };
  }],
  ["Accuracy of the batch", { percent: true }, column("accuracy")],
  ["Reward", {}, column("reward")],
  ["Length of a response, tokens", { fromZero: true }, column("response_length")],
  ["Entropy, nats per token", { fromZero: true }, column("metrics.entropy")],
  ["Clipped tokens, share", { fromZero: true }, column("metrics.clip_fraction")],
  ["Staleness, mean", { fromZero: true }, column("staleness_mean")],
  ["Trained tokens", { fromZero: true }, column("tokens")],
];

function column(name) {
  return (data, cost) => ({ x: data.updates[cost] ?? [], y: data.updates[name] ?? [] });
}

export class RunsTab {
  constructor(app) {
    this.app = app;
    this.chosen = new Set();
    this.data = new Map();
    this.table = table([{ name: "" }, { name: "run" }, { name: "state" }, { name: "updates", class: "number" }, { name: "accuracy", class: "number" }, { name: "best", class: "number" }, { name: "algorithm" }, { name: "seed", class: "number" }, { name: "began" }, { name: "took", class: "number" }], "runs");
    this.table.element.classList.add("runs");
    this.list = panel("Runs", { class: "wide" }, this.table.element);
    this.charts = CHARTS.map(([title, options]) => new Curves(title, { ...options, named: true }));
    this.side = panel("Side by side", { class: "wide" }, h("div", { class: "charts" }, this.charts.map((chart) => chart.element)));
    this.cost = h("select", { "aria-label": "draw over", onchange: () => this.draw() }, Object.entries(COSTS).map(([value, text]) => h("option", { value, text: `by ${text}` })));
    this.side.head.append(h("span", { class: "tools" }, this.cost));
    this.element = h("div", { class: "tab" }, this.list.element, this.side.element);
    this.looks = {};
    if (app.can("comparison")) this.readComparison();
  }

  async readComparison() {
    const found = await get("/api/comparison");
    this.looks = found.looks;
    const wide = (title, note, ...content) => {
      const made = panel(title, { class: "wide" }, content);
      say(made.note, note);
      return made.element;
    };
    const { tables } = found;
    const of = (title, name, note) => tables[name] && wide(title, note, textTable(tables[name], title));
    const isSame = !tables.settings && !tables.lacking;
    this.list.element.replaceWith(...[
      of("Runs", "runs", "settings equal but for the seed, sinks, tracing and samples are one configuration"),
      found.notes.length > 0 && wide("Not on this page", "", missingList(found.notes)),
      wide("Is there a difference?", "intervals are of 95 %", textTable(tables.configurations, "configurations"), h("div", { class: "verdicts" }, found.verdicts.map((text) => h("p", { text })))),
      of("Accuracy at equal cost", "bases", "each run's newest evaluation up to the largest cost that all have reached; equal updates: the newest that all have evaluated"),
    ].filter(Boolean));
    this.element.append(...[
      wide("Settings that differ", isSame ? "none but for the seed" : "", tables.settings && textTable(tables.settings, "settings that differ"),
        tables.lacking && h("details", {}, h("summary", { text: `${count(tables.lacking.length - 1)} settings that some runs do not have` }), textTable(tables.lacking, "settings that some runs do not have"))),
      of("Throughput and use of time", "roles", ""),
      of("Drops", "drops", "share of the admitted groups"),
    ].filter(Boolean));
    this.draw();
  }

  opened() {
    if (this.app.can("comparison")) for (const row of this.app.listed ?? []) this.chosen.add(row.name);
    if (!this.chosen.size && this.app.run) this.chosen.add(this.app.run);
    this.app.showRuns();
    this.readChosen();
  }

  show() {
    if (isReport) return;
    const now = Date.now();
    if (!this.read_ms || now - this.read_ms > 5000) {
      this.read_ms = now;
      this.readChosen();
    }
  }

  history() {}

  runs(rows) {
    keyed(this.table.rows, rows, (row) => row.name, (row) => {
      const box = h("input", { type: "checkbox", "aria-label": `compare ${row.name}`, onchange: () => this.choose(row.name, box.checked) });
      return h("tr", {}, h("td", {}, box), h("th", { scope: "row" }, h("a", { href: `#/${encodeURIComponent(row.name)}/overview`, text: row.name })), Array.from({ length: 8 }, (_, index) => h("td", { class: [1, 2, 3, 5, 7].includes(index) ? "number" : null })));
    }, (element, row) => {
      const box = element.firstElementChild.firstElementChild;
      box.checked = this.chosen.has(row.name);
      box.disabled = !box.checked && this.chosen.size >= MOST;
      mark(element.children[2], "data-run-state", row.state);
      element.children[2].title = row.detail ?? "";
      cells(element, [undefined, undefined, row.state, `${count(row.num_updates)}${row.num_wanted ? ` of ${count(row.num_wanted)}` : ""}`, row.accuracy_last === null ? "–" : percent(row.accuracy_last), row.accuracy_best === null ? "–" : percent(row.accuracy_best), row.algorithm, row.seed === null ? "–" : String(row.seed), date(row.started_s), row.took_s === null ? "–" : age(row.took_s)]);
    });
    say(this.list.note, `${count(rows.length)}; tick up to ${MOST} to see them side by side`);
  }

  choose(name, isChosen) {
    if (isChosen) this.chosen.add(name);
    else this.chosen.delete(name);
    this.app.showRuns();
    this.readChosen();
  }

  async readChosen() {
    const names = [...this.chosen];
    try {
      const found = await Promise.all(names.map((name) => get(runPath(name, "history"))));
      this.data = new Map(names.map((name, index) => [name, found[index]]));
      say(this.side.note, names.join(", "));
    } catch (error) {
      say(this.side.note, error.message);
    }
    this.draw();
  }

  draw() {
    const cost = this.cost.value;
    const shown = [...this.data].filter(([name]) => this.chosen.has(name));
    CHARTS.forEach(([, , read], index) => {
      Object.assign(this.charts[index].options, { xName: COSTS[cost], real: cost !== "update" });
      this.charts[index].show(shown.map(([name, data], place) => ({ name, ...(this.looks[name] ?? { colour: place }), ...read(data, cost) })));
    });
  }
}
