// All runs of the folder, and a comparison of selected ones.

import { get, runPath } from "./api.js";
import { Curves } from "./charts.js";
import { age, cells, count, date, h, keyed, mark, panel, percent, say, table } from "./dom.js";

const MOST = 6;
const CHARTS = [
  ["Held-out accuracy", { percent: true, named: true, always: true }, (data) => {
    const rows = (data.evaluations ?? []).filter((row) => row.is_main);
    return { points: true, x: rows.map((row) => row.update), y: rows.map((row) => row.accuracy), low: rows.map((row) => row.low), high: rows.map((row) => row.high) };
  }],
  ["Accuracy of the batch", { percent: true, named: true }, (data) => ({ x: data.updates.update ?? [], y: data.updates.accuracy ?? [] })],
  ["Reward", { named: true }, (data) => ({ x: data.updates.update ?? [], y: data.updates.reward ?? [] })],
  ["Length of a response, tokens", { named: true, fromZero: true }, (data) => ({ x: data.updates.update ?? [], y: data.updates.response_length ?? [] })],
  ["Entropy, nats per token", { named: true, fromZero: true }, (data) => ({ x: data.updates.update ?? [], y: data.updates["metrics.entropy"] ?? [] })],
  ["Staleness, mean", { named: true, fromZero: true }, (data) => ({ x: data.updates.update ?? [], y: data.updates.staleness_mean ?? [] })],
];

export class RunsTab {
  constructor(app) {
    this.app = app;
    this.chosen = new Set();
    this.data = new Map();
    this.table = table([{ name: "" }, { name: "run" }, { name: "state" }, { name: "updates", class: "number" }, { name: "accuracy", class: "number" }, { name: "best", class: "number" }, { name: "algorithm" }, { name: "seed", class: "number" }, { name: "began" }, { name: "took", class: "number" }], "runs");
    this.table.element.classList.add("runs");
    this.list = panel("Runs", { class: "wide" }, this.table.element);
    this.charts = CHARTS.map(([title, options]) => new Curves(title, options));
    this.side = panel("Side by side", { class: "wide" }, h("div", { class: "charts" }, this.charts.map((chart) => chart.element)));
    this.element = h("div", { class: "tab" }, this.list.element, this.side.element);
  }

  opened() {
    if (!this.chosen.size && this.app.run) this.chosen.add(this.app.run);
    this.app.showRuns();
    this.readChosen();
  }

  show() {
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
    CHARTS.forEach(([, , read], index) => this.charts[index].show([...this.data].filter(([name]) => this.chosen.has(name)).map(([name, data], place) => ({ name, colour: place, ...read(data) }))));
  }
}
