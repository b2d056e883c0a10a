// What a run leaves for people: how each role used its time, and the record of the run.

import { Curves } from "./charts.js";
import { count, h, keyed, panel, percent, say, table } from "./dom.js";

const NUMBER = /^([-–+≤]?[\d.,]+(e-?\d+)?( ?%)?|–|)$/;

// A table from rows of text; the first is its head. A column of numbers is aligned right.
export function textTable(rows, label) {
  const [head, ...body] = rows;
  const kinds = head.map((_, index) => (body.every((row) => NUMBER.test(row[index])) ? "number" : null));
  const made = table(head.map((name, index) => ({ name, class: kinds[index] })), label);
  made.rows.append(...body.map((row) => h("tr", {}, row.map((text, index) => h("td", { class: kinds[index] ?? (text.length > 24 ? "says" : null), text })))));
  made.element.classList.add("texts");
  return made.element;
}

export const summaryCards = (cards) => cards.map((one) => h("div", { class: "card" }, h("span", { class: "card-title", text: one.label }), h("b", { class: "value", text: one.value }), h("span", { class: "soft", text: one.note })));

export const missingList = (missing) => h("ul", { class: "missing" }, missing.map((text) => h("li", { text })));

const waitColour = (waits, name) => `wide-${Math.max(0, Object.keys(waits).indexOf(name))}`;

export class TimeTab {
  constructor(app) {
    this.app = app;
    this.bars = h("div", { class: "uses" });
    this.key = h("div", { class: "legend" });
    this.uses = panel("Where the time went", { class: "wide" }, this.bars, this.key, (this.table = h("div")));
    this.byRole = panel("Use of time, by role", { class: "wide" }, (this.roleCharts = h("div", { class: "charts" })));
    this.fleet = panel("The fleet", { class: "wide" }, (this.fleetCharts = h("div", { class: "charts" })));
    this.element = h("div", { class: "tab" }, this.uses.element, this.byRole.element, this.fleet.element);
    this.curves = new Map();
  }

  opened() {
    this.app.readRecord();
  }

  show() {}

  history() {
    this.app.readRecord();
  }

  record(data) {
    const { fleet, tables, shares } = data;
    this.byRole.element.hidden = this.fleet.element.hidden = !fleet;
    this.table.replaceChildren(...(tables.uses ? [textTable(tables.uses, "use of time by role")] : []));
    say(this.uses.note, tables.uses ? "sampled from the heartbeats of all workers" : "nothing is recorded; the first row is written after 5 s of a running fleet");
    if (!fleet) return void this.bars.replaceChildren(this.key.replaceChildren() ?? "");
    const used = Object.keys(fleet.waits).filter((wait) => Object.values(shares).some((of) => (of[wait] ?? 0) >= 0.0005));
    this.bars.replaceChildren(...Object.entries(shares).flatMap(([role, of]) => [
      h("span", { text: role }),
      h("div", { class: "shares", role: "img", "aria-label": `${role}: ${used.filter((wait) => of[wait] >= 0.005).map((wait) => `${fleet.waits[wait]} ${percent(of[wait], 0)}`).join(", ")}` },
        used.filter((wait) => of[wait] >= 0.0005).map((wait) => h("i", { class: waitColour(fleet.waits, wait), style: { "flex-grow": String(of[wait]) }, title: `${fleet.waits[wait]} ${percent(of[wait])}` }))),
    ]));
    this.key.replaceChildren(...used.map((wait) => h("span", { class: "entry" }, h("i", { class: `swatch ${waitColour(fleet.waits, wait)}` }), fleet.waits[wait])));
    const roles = Object.entries(fleet.roles);
    const of = (name) => roles.map(([role, columns]) => ({ name: role, x: fleet.x, y: columns[name] }));
    this.draw(this.roleCharts, roles.map(([role, columns]) => [
      `${role}: share of time, %`, { stacked: true, percent: true },
      Object.entries(columns.shares).map(([wait, y]) => ({ name: fleet.waits[wait], colour: waitColour(fleet.waits, wait), x: fleet.x, y })),
    ]), fleet.unit);
    const changes = of("workers").some((one) => new Set(one.y).size > 1);
    this.draw(this.fleetCharts, [
      ["Tokens per second: written, scored, trained", {}, of("tokens").filter((one) => one.y.some(Boolean))],
      ["Groups dropped, by reason", {}, Object.entries(fleet.dropped).map(([name, y]) => ({ name, x: fleet.x, y }))],
      ["Ready units, at the learner's claim", {}, [{ name: "ready", x: fleet.x, y: fleet.ready }]],
      ["Resident memory, GB", {}, of("memory")],
      ["Workers", {}, changes ? of("workers") : []],
    ], fleet.unit);
  }

  draw(parent, charts, unit) {
    keyed(parent, charts, ([title]) => title, ([title, options]) => {
      const made = new Curves(title, { ...options, fromZero: true, real: true, named: true });
      this.curves.set(title, made);
      return made.element;
    });
    for (const [title, , series] of charts) {
      const curves = this.curves.get(title);
      curves.options.xName = unit;
      curves.show(series);
    }
  }
}

export class RecordTab {
  constructor(app) {
    this.app = app;
    this.element = h("div", { class: "tab" });
  }

  opened() {
    this.app.readRecord();
  }

  show() {}

  history() {
    this.app.readRecord();
  }

  record(data) {
    const { tables } = data;
    const of = (title, name, note = "") => {
      if (!tables[name]) return null;
      const made = panel(title, { class: "wide" }, textTable(tables[name], title));
      say(made.note, note);
      return made.element;
    };
    const evaluations = (tables.evaluations?.length ?? 1) - 1;
    const incidents = (tables.incidents?.length ?? 1) - 1;
    const some = (shown, all, how) => (shown < all ? `${how} ${count(shown)} of ${count(all)}` : "");
    const details = (title, ...content) => h("details", {}, h("summary", { text: title }), content);
    const made = panel("How it was made", { class: "wide" }, tables.made && textTable(tables.made, "facts"),
      tables.packages && details(`Versions of ${count(tables.packages.length - 1)} libraries, recorded at the start`, textTable(tables.packages, "libraries")),
      data.settings && details("Every setting of this run", h("pre", { class: "log settings", tabindex: "0", text: data.settings })));
    this.element.replaceChildren(...[
      h("div", { class: "cards summary" }, summaryCards(data.cards)),
      data.missing.length > 0 && panel("Not on this page", { class: "wide" }, missingList(data.missing)).element,
      of("Evaluations on held-out prompts", "evaluations", some(evaluations, data.num_evaluations, "evenly chosen:")),
      of("Repairs", "repairs", "from a worker's last progress to its successor's first"),
      of("Faults and restarts", "incidents", `incidents, and the supervisor's warnings in the last megabyte of its log; UTC; ${some(incidents, data.num_incidents, "the newest") || "the newest last"}`),
      of("Changes of settings", "changes", "by headrace update, while the run went on; each with the means of the updates before and after it; UTC"),
      of("Starts", "starts", "UTC"),
      made.element,
    ].filter(Boolean));
  }
}
