// Where the work went: the balance, dropped against trained, histograms, queues, open groups.

import { get, runPath } from "./api.js";
import { Bars, binsOf } from "./charts.js";
import { age, bytes, cells, count, figure, h, keyed, mark, panel, percent, rate, say, short, table, words } from "./dom.js";

const CURRENCY = { groups: "groups", trajectories: "trajectories", tokens: "tokens", finished: "for the critic" };
// one colour for each state of work, everywhere; drop reasons not listed here have colour 4
const COLOURS = { trained: 0, claimed: 6, ready: 7, running: 5, no_signal: 1, stale: 2, value_warmup: 3, rolled_back: 3 };

export class WorkTab {
  constructor(app) {
    this.app = app;
    this.balance = panel("The ledger's balance", {}, (this.bar = h("div", { class: "shares", role: "img" })), (this.key = h("div", { class: "legend" })), (this.audit = table([{ name: "" }], "the balance as a sum")).element);
    this.countNow = h("button", { type: "button", hidden: true, text: "Count now", onclick: () => this.ask("audit-now", this.showAudit, this.balance) });
    this.balance.body.append(this.countNow);
    this.dropsTable = table([{ name: "how it left" }, { name: "groups", class: "number" }, { name: "responses", class: "number" }, { name: "mean length", class: "number" }, { name: "difficulty", class: "number" }, { name: "" }], "drops by reason against what was trained");
    this.warnings = h("div", { class: "warnings" });
    this.drops = panel("Dropped against trained", {}, this.warnings, this.dropsTable.element, h("p", { class: "soft small", text: "Length: tokens of finished responses. Difficulty: 1 less the mean accuracy of the response's group." }));
    this.staleness = new Bars("Staleness, in versions", { named: true });
    this.length = new Bars("Length of trained responses, tokens");
    this.advantage = new Bars("Advantage of trained tokens");
    this.histograms = panel("Histograms", { class: "wide" }, h("div", { class: "charts" }, this.staleness.element, this.length.element, this.advantage.element));
    this.queueTable = table([{ name: "queue" }, { name: "depth", class: "number" }, { name: "limit", class: "number" }, { name: "oldest", class: "number" }, { name: "in", class: "number" }, { name: "out", class: "number" }, { name: "waits for" }, { name: "refused", class: "number" }], "queues");
    this.queues = panel("Queues and mailboxes", { class: "wide" }, this.queueTable.element);
    this.groupTable = table([{ name: "group", class: "number" }, { name: "open for", class: "number" }, { name: "done", class: "number" }, { name: "the rest waits for" }], "open groups");
    this.groups = panel("Oldest open groups", { class: "wide" }, this.groupTable.element);
    this.element = h("div", { class: "tab two" }, this.balance.element, this.drops.element, this.histograms.element, this.queues.element, this.groups.element);
  }

  opened() {
    this.asked = 0;
  }

  async show(overview) {
    this.showQueues(overview);
    const now = Date.now();
    if (this.asked && now - this.asked < 5000) return;
    this.asked = now;
    await Promise.all([
      this.ask("audit", this.showAudit, this.balance),
      this.ask("drops", this.showDrops, this.drops),
      this.ask("versions", this.showVersions, this.staleness),
      this.ask("groups", this.showGroups, this.groups),
    ]);
  }

  async ask(name, then, where) {
    const run = this.app.run;
    // A report has no ledger to ask.
    where.element.hidden = !this.app.can(name);
    if (where.element.hidden) return;
    try {
      const found = await get(runPath(run, name));
      if (run === this.app.run) then.call(this, found);
    } catch (error) {
      say(where.note, error.message);
    }
  }

  history(data) {
    const note = data.num_updates ? `of update ${data.updates.update.at(-1)}` : "before the first update";
    const none = data.num_updates && !data.histograms?.length ? "; this run's version did not record it" : "";
    this.length.show(binsOf(data.histograms?.length, "responses"), note + none);
    this.advantage.show(binsOf(data.histograms?.advantage, "tokens"), note + none);
  }

  showQueues(overview) {
    this.queues.element.hidden = !overview.queues;
    keyed(this.queueTable.rows, overview.queues ?? [], (row) => `${row.kind} ${row.name}`, () => h("tr", {}, h("th", { scope: "row" }), Array.from({ length: 7 }, (_, index) => h("td", { class: index === 5 ? null : "number" }))), (element, row) => {
      const amount = row.name === "bytes" ? bytes : count;
      cells(element, [
        row.kind === "mailbox" ? `${words(row.name)} mailboxes` : words(row.name),
        amount(row.depth),
        row.limit === null ? "–" : amount(row.limit),
        row.oldest_age_s === null ? "–" : age(row.oldest_age_s),
        rate(row.in_per_s) || "–",
        rate(row.out_per_s) || "–",
        row.waiting_for,
        row.num_refused || row.num_gaps ? `${count(row.num_refused)}${row.num_gaps ? `, ${count(row.num_gaps)} gaps` : ""}` : "0",
      ]);
    });
  }

  showAudit(found) {
    this.countNow.hidden = found.balances !== null;
    if (found.balances === null) {
      const before = this.counted?.run === this.app.run ? `; it balanced ${age(Date.now() / 1000 - this.counted.at_s)} ago` : "";
      mark(this.balance.note, "data-state", null);
      return void say(this.balance.note, `${count(found.num_held)} entries are in flight; counting them holds up the ledger for a moment${before}`);
    }
    this.counted = found.balances ? { run: this.app.run, at_s: found.at_s } : null;
    say(this.balance.note, found.balances ? `it balances; counted ${age(Date.now() / 1000 - found.at_s)} ago` : "it does not balance: this is a bug");
    mark(this.balance.note, "data-state", found.balances ? "good" : "bad");
    const names = Object.keys(found.columns);
    const columns = names.map((name) => found.columns[name]);
    keyed(this.audit.head, ["", ...names], (name) => name, (name) => h("th", { scope: "col", class: "number", text: CURRENCY[name] ?? name }));
    const terms = [["admitted", (one) => one.admitted], ["– trained", (one) => one.trained]];
    for (const reason of [...new Set(columns.flatMap((one) => Object.keys(one.dropped)))].sort()) terms.push([`– dropped: ${words(reason)}`, (one) => one.dropped[reason] ?? 0]);
    for (const state of [...new Set(columns.flatMap((one) => Object.keys(one.in_flight)))].sort()) terms.push([`– in flight: ${words(state)}`, (one) => one.in_flight[state] ?? 0]);
    terms.push(["= difference", (one) => one.difference]);
    keyed(this.audit.rows, terms, ([name]) => name, () => h("tr", {}, h("th", { scope: "row" }), names.map(() => h("td", { class: "number" }))), (row, [name, read]) => cells(row, [name, ...columns.map((one) => count(read(one)))]));
    const tokens = found.columns.tokens;
    const dropped = Object.entries(tokens.dropped).sort((a, b) => b[1] - a[1]).map(([reason, number]) => [`dropped: ${words(reason)}`, number, `series-${COLOURS[reason] ?? 4}`]);
    const flight = Object.values(tokens.in_flight).reduce((sum, number) => sum + number, 0);
    const shares = [["trained", tokens.trained, `series-${COLOURS.trained}`], ...dropped, ["in flight", flight, `series-${COLOURS.running}`]].filter(([, number]) => number > 0);
    keyed(this.bar, shares, ([name]) => name, ([, , kind]) => h("i", { class: kind }), (part, [name, number]) => {
      part.style.setProperty("flex-grow", String(number));
      part.title = `${name}: ${count(number)} tokens, ${percent(number / tokens.admitted)}`;
    });
    this.bar.setAttribute("aria-label", shares.map(([name, number]) => `${name} ${percent(number / tokens.admitted)}`).join(", "));
    keyed(this.key, shares, ([name]) => name, ([, , kind]) => h("span", { class: "entry" }, h("i", { class: `swatch ${kind}` }), h("span")), (entry, [name, number]) => say(entry.lastElementChild, `${name} ${percent(number / tokens.admitted)}`));
  }

  showDrops(found) {
    const rows = [found.trained, ...found.dropped];
    const longest = Math.max(1, ...rows.map((row) => row.mean_length ?? 0));
    keyed(this.dropsTable.rows, rows, (row) => row.reason || "trained", () => h("tr", {}, h("th", { scope: "row" }), ["number", "number", "number", "number"].map((kind) => h("td", { class: kind })), h("td", { class: "fill" }, h("div", { class: "meter" }, h("i")))), (element, row) => {
      cells(element, [row.reason ? words(row.reason) : "trained", count(row.num_groups), count(row.num_responses), figure(row.mean_length), row.mean_difficulty === null ? "–" : row.mean_difficulty.toFixed(2)]);
      const bar = element.lastElementChild.firstElementChild.firstElementChild;
      bar.style.setProperty("width", `${(100 * (row.mean_length ?? 0)) / longest}%`);
      mark(element, "data-kind", row.reason ? "dropped" : "trained");
    });
    keyed(this.warnings, found.warnings, (text) => text, (text) => h("p", { class: "warning", role: "alert", text }));
    const all = rows.reduce((sum, row) => sum + row.num_groups, 0);
    const gone = all - found.trained.num_groups;
    say(this.drops.note, all ? `${percent(gone / all, 0)} of ${short(all)} ended groups were dropped` : "nothing has ended yet");
  }

  showVersions(found) {
    const kinds = ["trained", "claimed", "ready", "running"].map((state) => [state, found[state], COLOURS[state]]);
    for (const [reason, counts] of Object.entries(found.dropped)) kinds.push([`dropped: ${words(reason)}`, counts, COLOURS[reason] ?? 4]);
    const most = Math.max(found.eta, 1, ...kinds.flatMap(([, counts]) => Object.keys(counts).map(Number)));
    const bins = Array.from({ length: Math.min(most, 64) + 1 }, (_, staleness) => ({ label: String(staleness), parts: kinds.map(([name, counts, colour]) => ({ name, value: counts[staleness] ?? 0, colour })) }));
    this.staleness.show(bins, `${found.unit}s by their oldest token; the bound is ${found.eta}${found.num_unbegun ? `; ${count(found.num_unbegun)} have no token yet` : ""}`);
  }

  showGroups(found) {
    say(this.groups.note, `${count(found.num_groups)} in the ledger, ${count(found.group_size)} members each`);
    keyed(this.groupTable.rows, found.groups, (row) => row.number, () => h("tr", {}, h("th", { scope: "row", class: "number" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td")), (element, row) => {
      cells(element, [count(row.number), row.age_s === null ? "–" : age(row.age_s), `${row.num_done + row.num_left} of ${found.group_size}`, row.waits]);
    });
  }
}
