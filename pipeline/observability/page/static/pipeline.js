// The live pipeline: roles as boxes, links with depth and rate, and who waits for whom.
// Boxes are laid out as text in a grid; links are drawn behind them.

import { age, bytes, count, figure, h, keyed, many, mark, rate, s, say, short, words } from "./dom.js";

const NAMES = { generator: "Generators", reward: "Reward", reference: "Reference", value: "Value", learner: "Learner" };
const DOES = {
  generator: "sample responses, a window at a time",
  reward: "judge finished responses",
  reference: "add the frozen policy's log-probs",
  value: "add a value to every token",
  learner: "trains on whole units",
};
const SCORERS = ["reward", "reference", "value"];
const VERBS = { compute: "at work", input: "wait for input", room: "wait for room", credit: "wait for credit", weights: "wait for weights", ledger: "wait for the ledger", endpoint: "wait for a judge", disk: "write to disk", compile: "compile", starting: "start", draining: "drain", stopped: "stopped", quarantine: "wait for good weights" };

export const doing = (waits) =>
  Object.entries(waits ?? {}).sort((a, b) => b[1] - a[1]).map(([what, number]) => `${number} ${VERBS[what] ?? words(what)}`).join(", ");

// The worker that everything waits for, taken from the sentence that names it.
export function lastOf(overview) {
  const found = /(\S+),? (?:which )?is (?:at|silent|stuck)/.exec(overview.waits ?? "");
  const name = found?.[1].replace(/,$/, "");
  return overview.workers?.find((row) => row.worker === name) ?? null;
}

export const queueOf = (overview, name, kind = "ledger") => overview.queues?.find((row) => row.name === name && row.kind === kind);

function box(role) {
  const title = h("h3", { text: NAMES[role] ?? words(role) });
  const number = h("span", { class: "number" });
  const now = h("p", { class: "now" });
  const flow = h("p", { class: "flow" });
  const controls = h("div", { class: "controls" });
  const element = h("div", { class: `node role-${role}` }, h("div", { class: "head" }, title, number), now, flow, controls);
  element.title = DOES[role] ?? "";
  return { element, number, now, flow, controls };
}

export class Pipeline {
  // scale(role, count) is called by the buttons; isElastic(role) says whether a role has them
  constructor({ scale, isElastic }) {
    this.scale = scale;
    this.isElastic = isElastic;
    this.boxes = new Map();
    this.prompts = h("div", { class: "node store" }, h("div", { class: "head" }, h("h3", { text: "Prompts" })), (this.promptsNow = h("p", { class: "now" })), (this.creditBar = h("div", { class: "meter" }, h("i"))), (this.creditNow = h("p", { class: "flow" })));
    this.scorers = h("div", { class: "stack" });
    this.lanes = h("ul", { class: "lanes" });
    this.ledger = h("div", { class: "node store" }, h("div", { class: "head" }, h("h3", { text: "Ledger" }), (this.ledgerNumber = h("span", { class: "number" }))), this.lanes);
    this.grid = h("div", { class: "grid" }, this.prompts, this.box("generator").element, this.scorers, this.ledger, this.box("learner").element);
    this.svg = s("svg", { class: "links", "aria-hidden": "true" }, s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto-start-reverse" }, s("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))));
    this.layer = s("g");
    this.svg.append(this.layer);
    this.sentence = h("p", { class: "sentence", role: "status" });
    this.picture = h("div", { class: "picture" }, this.svg, this.grid);
    this.element = h("div", {}, this.picture, this.sentence);
    this.links = [];
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  box(role) {
    if (!this.boxes.has(role)) {
      const made = box(role);
      this.boxes.set(role, made);
      if (this.isElastic(role)) {
        const step = (by) => {
          const wanted = this.wanted?.[role];
          if (wanted !== undefined && wanted !== null) this.scale(role, wanted + by);
        };
        made.fewer = h("button", { type: "button", class: "step", "aria-label": `one ${role} worker fewer`, text: "−", onclick: () => step(-1) });
        made.more = h("button", { type: "button", class: "step", "aria-label": `one ${role} worker more`, text: "+", onclick: () => step(1) });
        made.controls.append(made.fewer, made.more);
      }
    }
    return this.boxes.get(role);
  }

  show(overview) {
    const roles = new Map((overview.roles ?? []).map((row) => [row.role, row]));
    const totals = overview.totals;
    const culprit = overview.is_over ? null : lastOf(overview);
    const present = SCORERS.filter((role) => roles.has(role));
    keyed(this.scorers, present, (role) => role, (role) => this.box(role).element);
    this.wanted = {};
    for (const [role, row] of roles) {
      const shown = this.box(role);
      this.wanted[role] = row.num_wanted;
      say(shown.number, row.num_wanted === null || row.num_wanted === undefined ? short(row.num_live) : `${short(row.num_live)} of ${short(row.num_wanted)}`);
      say(shown.now, row.num_unwell ? `${row.num_unwell} unwell; ${doing(row.waiting_for)}` : doing(row.waiting_for) || "none is here");
      say(shown.flow, this.flowOf(role, overview));
      mark(shown.element, "data-state", row.num_unwell ? "bad" : culprit?.role === role ? "culprit" : row.waiting_for?.compute ? "works" : "waits");
      const canScale = overview.state === "running" && overview.supervisor_pid !== null && row.num_wanted !== null;
      if (shown.more) {
        shown.controls.hidden = !canScale;
        shown.fewer.disabled = !canScale || row.num_wanted <= 1;
      }
    }
    for (const role of ["generator", "learner"]) if (!roles.has(role)) {
      const shown = this.box(role);
      say(shown.number, "");
      say(shown.now, overview.is_over ? "ended" : "none is here");
      say(shown.flow, "");
      shown.controls.hidden = true;
      mark(shown.element, "data-state", "none");
    }
    if (totals) {
      say(this.promptsNow, overview.is_paused ? "paused: none is admitted" : totals.is_exhausted ? "every prompt is admitted" : totals.is_closed ? "admission is closed" : `${short(totals.num_groups_admitted)} groups admitted`);
      say(this.creditNow, `credit ${count(totals.credit_used)} of ${count(totals.credit_limit)}`);
      this.creditBar.firstElementChild.style.setProperty("width", `${Math.min(100, (100 * totals.credit_used) / Math.max(1, totals.credit_limit))}%`);
      mark(this.prompts, "data-state", overview.is_paused ? "paused" : null);
      say(this.ledgerNumber, `version ${totals.policy_version}`);
    }
    const lanes = (overview.queues ?? []).filter((row) => row.kind === "ledger" && (row.depth || ["open", "leased", "reward", "ready", "claimed", "bytes"].includes(row.name)) && row.name !== "credit");
    keyed(this.lanes, lanes, (row) => row.name, () => h("li", {}, h("span"), h("b"), h("div", { class: "meter" }, h("i"))), (item, row) => {
      const [name, depth, meter] = item.children;
      say(name, words(row.name));
      say(depth, row.name === "bytes" ? bytes(row.depth) : short(row.depth));
      item.title = `${words(row.name)}: ${count(row.depth)}${row.limit ? ` of ${count(row.limit)}` : ""} ${row.unit ?? ""}, oldest ${age(row.oldest_age_s)}; ${row.waiting_for} empties it`;
      meter.hidden = !row.limit;
      if (row.limit) meter.firstElementChild.style.setProperty("width", `${Math.min(100, (100 * row.depth) / row.limit)}%`);
    });
    say(this.sentence, overview.is_over ? `This run is over: ${overview.detail || overview.state}.` : overview.waits);
    mark(this.sentence, "data-state", overview.is_over ? "over" : culprit && culprit.health !== "live" ? "bad" : null);
    this.links = this.linksOf(overview, roles, present);
    mark(this.picture, "data-over", overview.is_over);
    this.draw();
  }

  flowOf(role, overview) {
    const rates = overview.rates ?? {};
    if (role === "generator") return rate(rates.sampled_tokens, "tokens");
    if (role === "learner") {
      const progress = overview.progress ?? {};
      return `update ${count(progress.num_updates ?? 0)}${progress.num_wanted ? ` of ${count(progress.num_wanted)}` : ""}`;
    }
    const mailbox = queueOf(overview, role, "mailbox");
    const lane = queueOf(overview, role);
    return rate(mailbox?.out_per_s ?? lane?.out_per_s, "chunks");
  }

  linksOf(overview, roles, present) {
    const waitsOf = (role) => roles.get(role)?.waiting_for ?? {};
    const rates = overview.rates ?? {};
    const totals = overview.totals;
    const links = [
      { from: this.prompts, to: this.box("generator").element, label: rate(rates.admitted_groups, "groups"), flows: rates.admitted_groups > 0, state: waitsOf("generator").credit ? "waits" : null, what: waitsOf("generator").credit ? "no credit" : "" },
    ];
    for (const role of present) {
      const mailbox = queueOf(overview, role, "mailbox");
      const isFull = Boolean(waitsOf("generator").room);
      links.push({ from: this.box("generator").element, to: this.box(role).element, label: mailbox ? rate(mailbox.in_per_s) : "", what: mailbox?.depth ? `${short(mailbox.depth)} on the way` : "", flows: mailbox?.in_per_s > 0, state: isFull ? "waits" : null });
      const lane = queueOf(overview, role);
      links.push({ from: this.box(role).element, to: this.ledger, label: rate(lane?.out_per_s), flows: lane?.out_per_s > 0 });
    }
    const ready = queueOf(overview, "ready");
    const learner = overview.workers?.find((row) => row.role === "learner");
    const needed = learner?.counters?.needed;
    links.push({ from: this.ledger, to: this.box("learner").element, label: needed ? `${short(learner.counters.ready ?? 0)} of ${short(needed)} ready` : ready ? `${short(ready.depth)} ready` : "", flows: waitsOf("learner").compute > 0, state: waitsOf("learner").input ? "waits" : null });
    const sampling = Object.entries(overview.versions?.sampling ?? {}).map(([version, number]) => `${number} at ${version < 0 ? NONE_YET : `v${version}`}`).slice(-3).join(", ");
    links.push({ from: this.box("learner").element, to: this.box("generator").element, isBack: true, label: `weights v${overview.versions?.published ?? totals?.policy_version ?? 0}`, what: sampling ? `sampling: ${sampling}` : "", flows: !overview.is_over, state: waitsOf("generator").weights ? "waits" : null });
    return links;
  }

  draw() {
    const all = this.picture.getBoundingClientRect();
    if (all.width < 40) return;
    const isTall = all.width < 960;
    mark(this.picture, "data-form", isTall ? "tall" : "wide");
    const area = this.picture.getBoundingClientRect();
    mark(this.svg, "viewBox", `0 0 ${area.width} ${area.height}`);
    mark(this.svg, "width", area.width);
    mark(this.svg, "height", area.height);
    const of = (element) => {
      const found = element.getBoundingClientRect();
      return { left: found.left - area.left, right: found.right - area.left, top: found.top - area.top, bottom: found.bottom - area.top, x: (found.left + found.right) / 2 - area.left, y: (found.top + found.bottom) / 2 - area.top };
    };
    const drawn = [];
    for (const link of this.links) {
      if (!link.to.isConnected || !link.from.isConnected) continue;
      // When stacked, the scorers count as one stop: links leave the last and reach the first.
      if (isTall && this.scorers.children.length > 1 && (link.to.parentElement === this.scorers && link.to !== this.scorers.firstElementChild || link.from.parentElement === this.scorers && link.from !== this.scorers.lastElementChild)) continue;
      const [from, to] = [of(link.from), of(link.to)];
      let path;
      let label;
      if (link.isBack && isTall) {
        const right = area.width - 10;
        path = `M${from.right} ${from.y}H${right - 8}Q${right} ${from.y} ${right} ${from.y - 8}V${to.y + 8}Q${right} ${to.y} ${right - 8} ${to.y}H${to.right + 2}`;
        label = { x: from.right, y: from.bottom + 18, anchor: "end" };
      } else if (link.isBack) {
        const low = area.height - 20;
        path = `M${from.x} ${from.bottom}V${low - 10}Q${from.x} ${low} ${from.x - 10} ${low}H${to.x + 10}Q${to.x} ${low} ${to.x} ${low - 10}V${to.bottom + 2}`;
        label = { x: (from.x + to.x) / 2, y: low + 15, anchor: "middle" };
      } else if (isTall) {
        const x = Math.max(from.left + 18, Math.min(to.x, from.right - 18));
        const end = Math.max(to.left + 14, Math.min(x, to.right - 14));
        path = `M${x} ${from.bottom}L${end} ${to.top - 2}`;
        label = { x: (x + end) / 2 + 8, y: (from.bottom + to.top) / 2 + 4, anchor: "start" };
      } else {
        const y = Math.max(from.top + 16, Math.min(to.y, from.bottom - 16));
        const end = Math.max(to.top + 16, Math.min(y, to.bottom - 16));
        path = `M${from.right} ${y}L${to.left - 2} ${end}`;
        label = { x: (from.right + to.left) / 2, y: (y + end) / 2 - 7, anchor: "middle" };
      }
      drawn.push(s("path", { class: `link${link.flows ? " flows" : ""}`, "data-state": link.state, d: path, "marker-end": "url(#arrow)" }));
      const text = (value, dy, kind) => value && drawn.push(s("text", { class: kind, x: label.x, y: label.y + dy, "text-anchor": label.anchor, text: value }));
      if (link.isBack || isTall) text([link.label, link.what].filter(Boolean).join(" · "), 0, "label");
      else {
        text(link.label, 0, "label");
        text(link.what, 22, "label soft");
      }
    }
    this.layer.replaceChildren(...drawn);
  }
}

const NONE_YET = "none yet";

// The twelve steps of the pipeline, each with its current figure.
const STORY = [
  ["Prompt", "is admitted when there is credit for it", (o) => o.totals && `credit ${count(o.totals.credit_used)} of ${count(o.totals.credit_limit)}`],
  ["Group", "its trajectories are opened", (o) => o.totals && `${short(o.totals.num_groups_admitted)} admitted`],
  ["Chunk", "a window of each is sampled", (o) => (o.rates?.sampled_tokens !== null && o.rates?.sampled_tokens !== undefined ? rate(o.rates.sampled_tokens, "tokens") : o.totals && `${short(o.totals.num_tokens_generated)} tokens`)],
  ["Ledger", "the chunk is written once", (o) => (queueOf(o, "bytes") ? bytes(queueOf(o, "bytes").depth) : "")],
  ["Wire", "the same chunk goes to the scorers", (o) => {
    const boxes = (o.queues ?? []).filter((row) => row.kind === "mailbox");
    return boxes.length ? `${short(boxes.reduce((sum, row) => sum + row.depth, 0))} on the way` : "";
  }],
  ["Score", "finished responses are judged", (o) => (queueOf(o, "reward") ? `${short(queueOf(o, "reward").depth)} wait` : "")],
  ["Ready", "the last field completes the unit", (o) => o.totals && many(o.totals.num_ready_units, "unit")],
  ["Claim", "the learner takes a batch", (o) => (queueOf(o, "claimed") ? `${short(queueOf(o, "claimed").depth)} claimed` : "")],
  ["Batch", "advantages and masks are made", (o) => o.progress?.last && many(o.progress.last.num_trajectories, "response")],
  ["Update", "makes the next policy version", (o) => `${count(o.progress?.num_updates ?? 0)} of ${count(o.progress?.num_wanted ?? 0)}`],
  ["Weights", "are taken in flight", (o) => `v${figure(o.versions?.published ?? 0)}`],
  ["Settle", "the checkpoint holds the effect", (o) => o.totals && `${short(o.totals.num_tokens_trained)} tokens trained`],
];

export class Story {
  constructor() {
    this.values = [];
    this.element = h("ol", { class: "story" }, STORY.map(([name, what]) => {
      const value = h("b");
      this.values.push(value);
      return h("li", { title: what }, h("span", { class: "step-name", text: name }), value, h("span", { class: "soft small", text: what }));
    }));
  }

  show(overview) {
    STORY.forEach(([, , read], index) => say(this.values[index], read(overview) || "–"));
  }
}
