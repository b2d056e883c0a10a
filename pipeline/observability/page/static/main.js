// The page itself: the token, the run and tab it shows, and the stream that feeds it.

import { AnswersTab } from "./answers.js";
import { follow, forgetToken, get, isReport, post, runPath, setToken, takeToken } from "./api.js";
import { age, h, keyed, mark, say } from "./dom.js";
import { LearningTab } from "./learning.js";
import { OverviewTab } from "./overview.js";
import { RecordTab, TimeTab } from "./record.js";
import { RunsTab } from "./runs.js";
import { WorkersTab } from "./workers.js";
import { WorkTab } from "./work.js";

const TABS = [["overview", "Overview", OverviewTab], ["learning", "Learning", LearningTab], ["time", "Time", TimeTab], ["work", "Work", WorkTab], ["workers", "Workers", WorkersTab], ["answers", "Answers", AnswersTab], ["record", "Record", RecordTab], ["runs", "Runs", RunsTab]];
const THEMES = { auto: "light", light: "dark", dark: "auto" };
const RUNS_EVERY_MS = 10000;
const RECORD_EVERY_MS = 30000;
const kept = storage();

// A browser may keep nothing for a page from a file; then a choice lasts as long as the page.
function storage() {
  try {
    return window.localStorage;
  } catch {
    const values = new Map();
    return { getItem: (name) => values.get(name) ?? null, setItem: (name, value) => values.set(name, value) };
  }
}

class App {
  constructor(root, session) {
    this.session = session;
    this.run = "";
    this.tab = "overview";
    this.stamp = "";
    this.picker = h("select", { id: "run", onchange: () => (location.hash = this.link(this.tab, this.picker.value)) });
    this.state = h("span", { class: "pill" });
    this.version = h("span", { class: "soft small facts" });
    this.pause = h("button", { type: "button", onclick: () => this.togglePause(), hidden: true });
    this.live = h("span", { class: "live", role: "status" }, h("i"), (this.liveText = h("span", { text: "connecting" })));
    this.theme = h("button", { type: "button", class: "quiet", onclick: () => this.turn() });
    this.notice = h("div", { class: "notice", role: "alert", hidden: true });
    this.trouble = h("div", { class: "trouble", role: "alert", hidden: true });
    this.said = h("div", { class: "said", role: "status" });
    const brand = h("a", { class: "brand", href: "#/", "aria-label": "Headrace, overview" }, h("span", { class: "mark", "aria-hidden": "true" }), h("span", { text: "Headrace" }));
    // A report has no workers, and only a comparison has several runs.
    const tabs = TABS.filter(([name]) => !isReport || (name !== "workers" && (name !== "runs" || this.can("comparison"))));
    this.tabs = new Map(tabs.map(([name, , Tab]) => [name, new Tab(this)]));
    this.links = new Map(tabs.map(([name, text]) => [name, h("a", { text })]));
    const main = h("main", { id: "content", tabindex: "-1" }, [...this.tabs.values()].map((tab) => tab.element));
    root.replaceChildren(
      h("header", { class: "top" }, brand, h("label", { class: "pick", for: "run" }, h("span", { class: "hidden", text: "run" }), this.picker), this.state, this.pause, this.version, h("span", { class: "space" }), this.live, this.theme),
      h("nav", { class: "tabs", "aria-label": "views" }, [...this.links.values()]),
      this.trouble, this.notice, main, this.said,
    );
    this.turn(kept.getItem("headrace-theme") ?? "auto");
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.connect());
  }

  // A comparison begins with all runs.
  get first() {
    return this.can("comparison") ? "runs" : "overview";
  }

  can(what) {
    return this.session.abilities.includes(what);
  }

  // Whether the number of workers of a role can be changed.
  isElastic(role) {
    return this.session.elastic.includes(role);
  }

  link(tab, run = this.run) {
    return `#/${encodeURIComponent(run)}/${tab}`;
  }

  turn(wanted) {
    const name = wanted ?? THEMES[kept.getItem("headrace-theme") ?? "auto"];
    kept.setItem("headrace-theme", name);
    mark(document.documentElement, "data-theme", name === "auto" ? null : name);
    say(this.theme, { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[name]);
    mark(this.theme, "aria-label", `colours: ${name}; change`);
  }

  async begin() {
    await this.readRuns();
    if (!isReport) setInterval(() => !document.hidden && this.readRuns(), RUNS_EVERY_MS);
    this.route();
  }

  async readRuns() {
    try {
      const found = await get("/api/runs");
      this.listed = found.runs;
      this.showRuns();
    } catch (error) {
      this.say(error.message, true);
    }
  }

  showRuns() {
    keyed(this.picker, this.listed ?? [], (row) => row.name, (row) => h("option", { value: row.name }), (option, row) => say(option, `${row.name} · ${row.state}`));
    if (this.run) this.picker.value = this.run;
    this.tabs.get("runs")?.runs(this.listed ?? []);
  }

  route() {
    const [, run = "", tab = ""] = location.hash.split("/").map(decodeURIComponent);
    const newest = this.listed?.find((row) => ["running", "starting", "stopping"].includes(row.state)) ?? this.listed?.[0];
    const wanted = run || newest?.name || "";
    const isKnown = this.tabs.has(tab);
    if (!run || !isKnown) {
      history.replaceState(null, "", this.link(isKnown ? tab : this.first, wanted));
      if (!wanted) return this.warn("There is no run here yet.");
    }
    const isOther = wanted !== this.run;
    this.run = wanted;
    this.tab = isKnown ? tab : this.first;
    for (const [name, link] of this.links) {
      mark(link, "href", this.link(name));
      mark(link, "aria-current", name === this.tab ? "page" : null);
      if (name === this.tab) link.scrollIntoView({ block: "nearest", inline: "nearest" });
      this.tabs.get(name).element.hidden = name !== this.tab;
    }
    document.title = `${this.run} · Headrace`;
    this.picker.value = this.run;
    if (isOther) {
      this.overview = this.historyData = this.sampleData = this.recordData = null;
      this.stamp = "";
      const overview = this.tabs.get("overview");
      for (const name of ["accuracy", "limit", "staleness", "drops", "answer"]) {
        const tabOf = { accuracy: "learning", limit: isReport ? "record" : "workers", staleness: "work", drops: "work", answer: "answers" }[name];
        mark(overview[name].element, "href", this.link(tabOf));
      }
      this.tabs.get("answers").cleared();
      this.connect();
    }
    this.current.opened?.();
    this.draw();
  }

  get current() {
    return this.tabs.get(this.tab);
  }

  connect() {
    this.stop?.();
    this.stop = null;
    if ((document.hidden && !isReport) || !this.run) return this.stand("away", "paused while hidden");
    this.stand("reading", "");
    this.stop = follow(runPath(this.run, "events"), (picture) => this.show(picture), (state, message) => {
      this.stand(state, message);
      if (state === "refused") signIn(message);
    });
  }

  stand(state, message) {
    mark(this.live, "data-state", state);
    say(this.liveText, { live: "live", reading: "reading the run", away: "not connected", refused: "no token", report: "as recorded" }[state]);
    this.live.title = message;
    if (state === "away" && message && !document.hidden) this.warn(message);
    else if (state === "live") this.warn("");
  }

  warn(text) {
    say(this.trouble, text);
    this.trouble.hidden = !text;
  }

  show(picture) {
    this.warn(picture.trouble ?? "");
    const stamp = JSON.stringify(picture.stamp);
    if (stamp !== this.stamp) {
      this.stamp = stamp;
      this.readFiles();
    }
    const overview = picture.overview;
    if (!overview) return this.current.filesOnly?.();
    this.overview = overview;
    const paused = overview.totals?.paused;
    if (paused) {
      overview.is_paused = true;
      overview.pause = `by ${paused.by} for ${age(overview.at_s - paused.since_s)}${paused.reason ? `: ${paused.reason}` : ""}`;
    }
    say(this.state, overview.is_over ? (overview.state === "stopping" ? "stopped" : `${overview.state}, over`) : overview.is_paused ? "paused" : overview.state);
    mark(this.state, "data-run-state", overview.is_paused ? "paused" : overview.is_over && overview.state === "running" ? "died" : overview.state);
    this.state.title = overview.detail ?? "";
    say(this.version, [isReport && overview.detail, ...Object.values(picture.facts ?? {})].filter(Boolean).join(" · "));
    const canAct = overview.state === "running" && overview.supervisor_pid !== null && this.can("pause");
    this.pause.hidden = !canAct;
    say(this.pause, overview.is_paused ? "Resume" : "Pause");
    this.draw();
  }

  async readFiles() {
    const run = this.run;
    try {
      const [historyData, sampleData] = await Promise.all([get(runPath(run, "history")), get(runPath(run, "samples?last=4"))]);
      if (run !== this.run) return;
      this.historyData = historyData;
      this.sampleData = sampleData;
      this.draw();
      if (isReport) await this.readRecord();
      this.tabs.get("overview").samples(sampleData);
      this.tabs.get("answers").samples(sampleData);
    } catch (error) {
      this.say(error.message, true);
    }
  }

  // What the run leaves for people. Reading it parses the whole history, so only the tabs that show it ask.
  async readRecord() {
    const run = this.run;
    if (this.isReadingRecord || (this.recordData && Date.now() - this.recordRead < RECORD_EVERY_MS)) return;
    this.isReadingRecord = true;
    try {
      const found = await get(runPath(run, "record"));
      this.recordRead = Date.now();
      if (run === this.run) this.recordData = found;
      this.draw();
    } catch (error) {
      this.say(error.message, true);
    } finally {
      this.isReadingRecord = false;
    }
    if (run !== this.run) await this.readRecord();
  }

  draw() {
    const tab = this.current;
    if (this.recordData && tab.record && tab.recorded !== this.recordData) {
      tab.recorded = this.recordData;
      tab.record(this.recordData);
    }
    if (this.overview) tab.show(this.overview);
    if (this.historyData && tab.drawn !== this.historyData) {
      tab.drawn = this.historyData;
      tab.history(this.historyData);
    }
  }

  say(text, isBad = false) {
    say(this.said, text);
    mark(this.said, "data-state", isBad ? "bad" : "good");
    clearTimeout(this.saidTimer);
    this.saidTimer = setTimeout(() => say(this.said, ""), isBad ? 12000 : 5000);
  }

  async change(what, values, done) {
    try {
      const found = await post(runPath(this.run, what), values);
      this.say(done(found));
    } catch (error) {
      this.say(error.message, true);
    }
  }

  scale(role, number) {
    return this.change("scale", { role, count: number }, (fleet) => `wanted: ${Object.entries(fleet.counts).map(([name, many]) => `${many} ${name}`).join(", ")}`);
  }

  drain(worker) {
    return this.change("drain", { worker }, () => `${worker} takes no new work, finishes, and leaves`);
  }

  togglePause() {
    const isPaused = this.overview?.is_paused;
    return this.change(isPaused ? "resume" : "pause", {}, () => (isPaused ? "admission goes on" : "admission is paused; work in flight finishes"));
  }
}

function signIn(message) {
  const root = document.getElementById("page");
  const input = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const form = h("form", { class: "signin", onsubmit: (event) => {
    event.preventDefault();
    setToken(input.value.trim());
    // Reload, so that no earlier App keeps running.
    location.reload();
  } }, h("h1", { text: "Headrace" }), h("p", { text: message }), h("label", { for: "token", text: "Token" }), input, h("button", { type: "submit", text: "Open" }), h("p", { class: "soft small", text: "headrace run dashboard prints an address that holds the token; with --token-file it is in that file." }));
  root.replaceChildren(form);
  input.focus();
}

async function start() {
  takeToken();
  let session;
  try {
    session = await get("/api/session");
  } catch (error) {
    if (error.status === 401) forgetToken();
    return signIn(error.message);
  }
  const app = new App(document.getElementById("page"), session);
  await app.begin();
}

start();
