// Recent responses, coloured token by token, with reward and verdict.

import { get, runPath } from "./api.js";
import { clock, count, figure, h, keyed, panel, say, words } from "./dom.js";

const LIFE_EVERY_MS = 3000;
const ENDED = new Set(["trained", "dropped"]);
const COLOURS = [["version", "policy version"], ["advantage", "advantage"], ["logprob", "log-prob"], ["none", "plain"]];

// A token's CSS class: one of eleven steps of a scale, or of six colours for versions.
function tokenClass(by, tokens, index, scale) {
  if (by === "version") return `tok v${tokens.versions[index] % 6}`;
  const value = by === "advantage" ? tokens.advantages?.[index] : tokens.logprobs?.[index];
  if (typeof value !== "number") return "tok";
  if (by === "advantage") return `tok a${Math.round(5 * Math.max(-1, Math.min(1, value / (scale || 1))) + 5)}`;
  return `tok l${Math.round(10 * Math.max(0, Math.min(1, -value / 5)))}`;
}

function legendOf(by, tokens, scale) {
  if (!tokens) return [];
  if (by === "version") return [...new Set(tokens.versions)].sort((a, b) => a - b).map((version) => h("span", { class: "entry" }, h("i", { class: `tok v${version % 6}` }), `version ${version}`));
  if (by === "advantage") return tokens.advantages ? [h("span", { class: "entry" }, h("i", { class: "tok a0" }), `−${figure(scale)}`), h("span", { class: "entry" }, h("i", { class: "tok a5" }), "0"), h("span", { class: "entry" }, h("i", { class: "tok a10" }), `+${figure(scale)}`)] : [h("span", { class: "soft", text: "no advantage was recorded" })];
  if (by === "logprob") return [h("span", { class: "entry" }, h("i", { class: "tok l0" }), "sure"), h("span", { class: "entry" }, h("i", { class: "tok l5" }), "−2.5"), h("span", { class: "entry" }, h("i", { class: "tok l10" }), "−5 and less")];
  return [];
}

function factsOf(row) {
  const parts = Object.entries(row.parts ?? {});
  const [first, last] = row.versions;
  return [
    `update ${row.update}`,
    row.kind !== "trained" && (row.kind === "evaluation" ? "of an evaluation" : `dropped: ${words(row.kind)}`),
    parts.length > 1 && parts.map(([name, value]) => `${name} ${value >= 0 ? "+" : ""}${value.toFixed(2)}`).join(", "),
    `${count(row.num_tokens)} tokens`,
    row.finish_reason === "length" ? "cut at the limit" : "ended by itself",
    row.masked && "masked as over-long",
    last > first ? `sampled by versions ${first} to ${last}` : `sampled by version ${first}`,
    row.trajectory,
  ].filter(Boolean);
}

function closesByEscape(event) {
  if (event.key !== "Escape") return;
  event.currentTarget.open = false;
  event.currentTarget.querySelector("summary").focus();
}

export class AnswersTab {
  constructor(app) {
    this.app = app;
    this.by = "version";
    this.rows = [];
    // Expanded lives of trajectories that have not ended, and when each was read.
    this.lives = new Map();
    this.read = 0;
    const choices = COLOURS.map(([name, text]) => {
      const input = h("input", { type: "radio", name: "colour", value: name, id: `by-${name}`, checked: name === this.by, onchange: () => this.colour(name) });
      return [input, h("label", { for: `by-${name}`, text })];
    });
    this.filter = h("select", { "aria-label": "which answers", onchange: () => this.draw() }, [["", "all"], ["right", "right"], ["wrong", "wrong"]].map(([value, text]) => h("option", { value, text })));
    this.list = h("div", { class: "answers" });
    this.older = h("button", { type: "button", text: "Older answers", onclick: () => this.readOlder(), hidden: true });
    this.panel = panel("What the model answers", { class: "wide" }, this.list, this.older);
    this.panel.head.append(h("span", { class: "tools" }, h("fieldset", { class: "choices" }, h("legend", { text: "colour by" }), choices), this.filter));
    this.element = h("div", { class: "tab" }, this.panel.element);
  }

  // An expanded life is refreshed until its trajectory has ended.
  show() {
    const now = Date.now();
    if (this.isReading || now - this.read < LIFE_EVERY_MS) return;
    this.read = now;
    this.isReading = true;
    Promise.allSettled(Array.from(this.lives, ([details, row]) => (details.isConnected ? this.life(row, details) : this.lives.delete(details)))).then(() => (this.isReading = false));
  }

  history() {}

  samples(data) {
    const known = new Map(this.rows.map((row) => [row.key, row]));
    for (const row of data.samples) known.set(`${row.update} ${row.trajectory}`, { ...row, key: `${row.update} ${row.trajectory}` });
    this.rows = [...known.values()].sort((a, b) => b.update - a.update).slice(0, 400);
    this.oldest = this.rows.at(-1)?.update;
    if (!this.hasPaged) this.older.hidden = !data.num_older;
    this.draw();
  }

  cleared() {
    this.rows = [];
    this.hasPaged = false;
    this.draw();
  }

  async readOlder() {
    const run = this.app.run;
    try {
      const data = await get(runPath(run, `samples?last=10&before=${this.oldest}`));
      if (run !== this.app.run) return;
      this.hasPaged = true;
      this.older.hidden = !data.num_older;
      this.samples(data);
    } catch (error) {
      say(this.panel.note, error.message);
    }
  }

  colour(name) {
    this.by = name;
    this.list.replaceChildren();
    this.draw();
  }

  draw() {
    const wanted = this.filter.value;
    const rows = this.rows.filter((row) => !wanted || (wanted === "right") === row.accuracy >= 1);
    keyed(this.list, rows, (row) => row.key, (row) => this.answer(row));
    say(this.panel.note, rows.length ? `${count(rows.length)} of updates ${rows.at(-1).update} to ${rows[0].update}` : this.rows.length ? "none of these" : "none yet: no update, or samples.per_update is 0");
  }

  answer(row) {
    const tokens = row.tokens;
    const scale = tokens?.advantages ? Math.max(1e-6, ...tokens.advantages.map(Math.abs)) : 1;
    const body = h("div", { class: "response" });
    if (tokens?.pieces && this.by !== "none") {
      tokens.pieces.forEach((piece, index) => {
        for (const [place, number] of tokens.cuts) if (place === index) body.append(h("span", { class: "gap", text: ` … ${count(number)} tokens … ` }));
        for (const [place, words] of tokens.turns) if (place === index) body.append(h("span", { class: "gap", title: "the environment's words", text: words }));
        const parts = [`version ${tokens.versions[index]}`, typeof tokens.logprobs?.[index] === "number" && `log-prob ${tokens.logprobs[index].toFixed(3)}`, typeof tokens.advantages?.[index] === "number" && `advantage ${figure(tokens.advantages[index])}`];
        body.append(h("span", { class: tokenClass(this.by, tokens, index, scale), title: parts.filter(Boolean).join(", "), text: piece }));
      });
    } else body.textContent = row.response || "(empty)";
    const verdict = row.accuracy >= 1 ? "right" : row.accuracy <= 0 ? "wrong" : "part";
    const missing = !tokens?.pieces && this.by !== "none" ? h("span", { class: "soft", text: row.tokens_missing || "its tokens were not recorded" }) : null;
    const life = this.app.can("trajectory") ? h("details", { class: "life", ontoggle: (event) => this.toggled(row, event.target), onkeydown: closesByEscape }, h("summary", { text: "its whole life" }), h("pre", { class: "log", tabindex: "0", "aria-label": "events of the trajectory" })) : null;
    return h("article", { class: "answer", "data-verdict": verdict },
      h("header", {}, h("b", { class: "verdict", text: row.verdict }), h("span", { text: `reward ${row.reward >= 0 ? "+" : ""}${row.reward.toFixed(2)}` }), h("span", { class: "soft", text: factsOf(row).join(" · ") })),
      h("dl", {}, h("dt", { text: "prompt" }), h("dd", {}, h("div", { class: "prompt", text: row.prompt })), h("dt", { text: "response" }), h("dd", {}, body, h("div", { class: "legend" }, legendOf(this.by, tokens?.pieces ? tokens : null, scale), missing)), h("dt", { text: "right answer" }), h("dd", { class: "prompt", text: row.answer })), life);
  }

  toggled(row, details) {
    if (!details.open) return void this.lives.delete(details);
    this.lives.set(details, row);
    this.life(row, details);
  }

  async life(row, details) {
    const text = details.querySelector("pre");
    try {
      const found = await get(runPath(this.app.run, `trajectory?name=${encodeURIComponent(row.trajectory)}`));
      if (ENDED.has(found.state)) this.lives.delete(details);
      const told = [...found.events.map((event) => `${clock(event.at_s)}  ${event.text}`), `${count(found.num_tokens)} tokens; ${found.state}${found.prompt === null ? "" : `; prompt ${count(found.prompt)}`}`].join("\n");
      say(text, told);
    } catch (error) {
      this.lives.delete(details);
      say(text, error.message);
    }
  }
}
