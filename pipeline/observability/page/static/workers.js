// Workers with their waits and logs, buttons to drain and scale, incidents, and `why`.

import { get, runPath } from "./api.js";
import { age, bytes, cells, count, h, keyed, mark, panel, rate, say, table, words } from "./dom.js";
import { showIncidents } from "./overview.js";

const MOST_ROWS = 300;

function doing(row) {
  const work = row.work ? `${row.work.kind} ${(100 * row.work.share).toFixed(0)} %` : "";
  const storing = row.storing ? `writes ${row.storing.kind} ${(100 * row.storing.share).toFixed(0)} %` : "";
  return [words(row.waiting_for), row.detail, work, storing, row.unreached && `cannot reach ${row.unreached}`, row.refused].filter(Boolean).join("; ");
}

function done(row) {
  const c = row.counters ?? {};
  if (row.role === "generator") return `${count(c.sampled_tokens ?? 0)} tokens, ${rate((c.sampled_tokens ?? 0) / Math.max(1, row.uptime_s))}; ${count(c.live ?? 0)} live`;
  if (row.role === "learner") return `${count(c.updates ?? 0)} updates, ${count(c.trained_tokens ?? 0)} tokens`;
  if (row.role === "observer") return `${count(c.incidents_open ?? 0)} incidents open`;
  return `${count(c.scored ?? 0)} scored${c.overdue ? `, ${count(c.overdue)} overdue` : ""}`;
}

export class WorkersTab {
  constructor(app) {
    this.app = app;
    this.worker = "";
    this.why = panel("Why it waits", { class: "wide" }, (this.chains = h("div", { class: "chains" })), (this.also = h("p", { class: "soft small also" })));
    this.roles = h("div", { class: "roles" });
    this.fleet = panel("Fleet", { class: "wide" }, this.roles);
    this.tableOf = table([{ name: "worker" }, { name: "state" }, { name: "version", class: "number" }, { name: "memory", class: "number" }, { name: "up", class: "number" }, { name: "does or waits for" }, { name: "done" }, { name: "" }], "workers");
    this.tableOf.element.classList.add("workers");
    this.workers = panel("Workers", { class: "wide" }, this.tableOf.element);
    this.pick = h("select", { "aria-label": "worker", onchange: () => this.choose(this.pick.value) });
    this.level = h("select", { "aria-label": "least level", onchange: () => this.readLog() }, ["info", "warning", "error"].map((name) => h("option", { value: name, text: name })));
    this.lines = h("pre", { class: "log", tabindex: "0", "aria-label": "log lines" });
    this.log = panel("Log", { class: "wide" }, this.lines);
    this.log.head.append(h("span", { class: "tools" }, this.pick, this.level));
    this.list = h("ul", { class: "incidents" });
    this.incidents = panel("Incidents", { class: "wide" }, this.list);
    this.element = h("div", { class: "tab" }, this.why.element, this.fleet.element, this.workers.element, this.incidents.element, this.log.element);
  }

  opened() {
    this.asked = 0;
  }

  show(overview) {
    const canAct = overview.state === "running" && overview.supervisor_pid !== null;
    const roles = (overview.roles ?? []).filter((row) => row.num_wanted !== null && row.num_wanted !== undefined);
    keyed(this.roles, roles, (row) => row.role, (row) => this.roleControl(row.role), (element, row) => {
      say(element.querySelector(".present"), `${count(row.num_live)} of ${count(row.num_wanted)}`);
      const input = element.querySelector("input");
      if (input && document.activeElement !== input) input.value = String(row.num_wanted);
      for (const control of element.querySelectorAll("input, button")) control.disabled = !canAct;
    });
    say(this.fleet.note, [overview.demand, ...(overview.evicted ?? [])].filter(Boolean).join("; ") || (canAct ? "" : "workers can be changed while the run runs"));
    const rows = overview.workers ?? [];
    const unwell = rows.filter((row) => row.health !== "live");
    const shown = [...unwell, ...rows.filter((row) => row.health === "live")].slice(0, MOST_ROWS);
    const absent = (overview.absent ?? []).map((worker) => ({ worker, health: "absent" }));
    keyed(this.tableOf.rows, [...shown, ...absent], (row) => row.worker, (row) => this.workerRow(row.worker), (element, row) => {
      mark(element, "data-health", row.health);
      if (row.health === "absent") return cells(element, [undefined, "being started", "–", "–", "–", "", ""]);
      cells(element, [undefined, row.health === "live" ? "live" : `${row.health} for ${age(row.unwell_s)}`, row.policy_version < 0 ? "–" : count(row.policy_version), bytes(row.rss_bytes), age(row.uptime_s), doing(row), done(row)]);
      const drain = element.querySelector("[data-drain]");
      drain.hidden = !this.app.isElastic(row.role) || !this.app.can("drain");
      drain.disabled = !canAct || row.waiting_for === "draining";
    });
    say(this.workers.note, rows.length > shown.length ? `${count(shown.length)} of ${count(rows.length)}, unwell ones first` : `${count(rows.length)}${unwell.length ? `, ${unwell.length} unwell` : ""}`);
    showIncidents(this.list, (overview.incidents ?? []).slice(-50));
    say(this.incidents.note, overview.clocks ?? "");
    const now = Date.now();
    // Waits for a slow answer, so that requests never pile up.
    if (!this.isAsking && now - (this.asked ?? 0) > 3000) {
      this.asked = now;
      this.isAsking = true;
      Promise.allSettled([this.readLog(), this.readWhy()]).then(() => (this.isAsking = false));
    }
  }

  history() {}

  // The ledger cannot be read, but the logs can.
  filesOnly() {
    if (this.asked) return;
    this.asked = Date.now();
    this.readLog();
  }

  roleControl(role) {
    const isElastic = this.app.isElastic(role);
    const id = `count-${role}`;
    const input = h("input", { type: "number", min: "1", step: "1", id, inputmode: "numeric" });
    const form = h("form", { class: "role", onsubmit: (event) => {
      event.preventDefault();
      this.app.scale(role, Number(input.value));
    } }, h("label", { for: isElastic ? id : null, text: words(role) }), h("span", { class: "present" }), isElastic && [input, h("button", { type: "submit", text: "Scale" })]);
    return form;
  }

  workerRow(worker) {
    const show = h("button", { type: "button", class: "link", text: worker, title: "show its log", onclick: () => this.choose(worker, true) });
    const drain = h("button", { type: "button", class: "small", "data-drain": worker, text: "Drain", onclick: () => this.app.drain(worker) });
    return h("tr", {}, h("th", { scope: "row" }, show), h("td"), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "says" }), h("td", { class: "says" }), h("td", {}, drain));
  }

  choose(worker, isJump = false) {
    this.worker = worker;
    this.pick.value = worker;
    this.readLog();
    if (isJump) this.log.element.scrollIntoView({ block: "nearest" });
  }

  async readLog() {
    const [run, worker, level] = [this.app.run, this.worker, this.level.value];
    try {
      const found = await get(runPath(run, `logs?last=200&level=${level}&worker=${encodeURIComponent(worker)}`));
      if (run !== this.app.run || worker !== this.worker) return;
      keyed(this.pick, ["", ...found.workers], (name) => name, (name) => h("option", { value: name, text: name || "all workers" }));
      this.pick.value = worker;
      const atEnd = this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 20;
      const rows = found.lines.map((line, index) => ({ ...line, key: `${line.at} ${line.worker} ${index} ${line.text.length}` }));
      keyed(this.lines, rows, (row) => row.key, (row) => h("span", { class: "line", "data-level": row.level, text: `${row.text}\n` }));
      say(this.log.note, rows.length ? "" : `no line of this level`);
      if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
    } catch (error) {
      say(this.log.note, error.message);
      if (error.status === 400) this.worker = "";
    }
  }

  async readWhy() {
    const run = this.app.run;
    if (!this.app.can("why")) return void (this.why.element.hidden = true);
    try {
      const found = await get(runPath(run, "why"));
      if (run !== this.app.run) return;
      say(this.why.note, { moves: "nothing is wrong", mends: "it recovers by itself", you: "it needs you", ended: "it has ended, or is ending" }[found.outlook]);
      mark(this.why.note, "data-state", { moves: "good", you: "bad", mends: "warn" }[found.outlook]);
      keyed(this.chains, found.chains, (chain, index) => `${index} ${chain.links.join()} ${chain.next}`, (chain) =>
        h("div", { class: "chain", "data-state": chain.outlook }, h("ol", {}, chain.links.map((text) => h("li", { text }))), h("p", { class: "next", text: chain.next })));
      say(this.also, found.also.join(" "));
    } catch (error) {
      say(this.why.note, error.message);
    }
  }
}
