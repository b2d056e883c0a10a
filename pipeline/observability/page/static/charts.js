// Curves and histograms: lines, intervals, and a readout by pointer or arrow keys.

import { figure, h, s, say } from "./dom.js";

const HEIGHT = 190;
const PAD = { top: 10, right: 12, bottom: 24, left: 46 };

function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9 * span; value += step) found.push(Math.abs(value) < 1e-12 * span ? 0 : value);
  return { found, step };
}

// Larger values would overflow the arithmetic of axes; they leave a gap.
const finite = (value) => typeof value === "number" && Math.abs(value) < 1e100;

// With as many digits as neighbouring ticks need to differ.
const tickText = (value, step) => (Math.abs(value) >= 1 && step < 0.01 ? value.toFixed(Math.min(8, Math.ceil(-Math.log10(step)))) : figure(Number(value.toPrecision(6))));

function smoothed(values, amount) {
  if (!amount) return values;
  let mean = null;
  let weight = 0;
  return values.map((value) => {
    if (!finite(value)) return value;
    mean = (mean ?? 0) * amount + value * (1 - amount);
    weight = weight * amount + (1 - amount);
    return mean / weight;
  });
}

const colourOf = (one, index) => (typeof one.colour === "string" ? one.colour : `series-${(one.colour ?? index) % 8}`);

// Gives each series the lower and upper edge of its area.
function stack(series) {
  let base = series[0]?.y.map(() => 0) ?? [];
  for (const one of series) {
    one.base = base;
    one.top = base = one.y.map((value, place) => base[place] + (finite(value) ? value : 0));
  }
}

// series: [{name, x, y, low?, high?, points?, colour?, dash?}]; options: {fromZero, percent, named, always, xName, real,
// stacked, robust}. `real`: x may have fractions. `stacked`: areas on top of one another, instead of lines.
export class Curves {
  constructor(title, options = {}) {
    this.options = options;
    this.series = [];
    this.smooth = 0;
    this.legend = h("div", { class: "legend" });
    this.readout = h("div", { class: "readout", hidden: true });
    this.svg = s("svg", { height: HEIGHT, width: "100%", "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title }, this.svg, this.readout);
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", { text: title }), this.legend), this.plot);
    this.title = title;
    this.at = null;
    this.drawn = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.read(null));
    this.plot.addEventListener("blur", () => this.read(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(series, smooth = this.smooth) {
    this.series = series.filter((one) => one.y.some(finite));
    this.smooth = smooth;
    this.element.hidden = !this.series.length && !this.options.always;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width < 40) return;
    const series = this.series.map((one) => ({ ...one, raw: one.y, y: one.points ? one.y : smoothed(one.y, this.smooth) }));
    const xs = [...new Set(series.flatMap((one) => one.x.filter((_, index) => finite(one.y[index]))))].sort((a, b) => a - b);
    if (this.options.stacked) stack(series);
    const ys = series.flatMap((one) => [...(one.top ?? one.y), ...(one.low ?? []), ...(one.high ?? [])]).filter(finite);
    this.svg.replaceChildren();
    this.legend.replaceChildren();
    if (!ys.length) {
      this.svg.append(s("text", { x: width / 2, y: HEIGHT / 2, class: "empty", "text-anchor": "middle", text: "nothing yet" }));
      this.drawn = null;
      return;
    }
    let low = Math.min(...ys);
    let high = Math.max(...ys);
    if (this.options.percent) [low, high] = [0, 1];
    if (this.options.fromZero) low = Math.min(0, low);
    // A single stall must not flatten the rest.
    if (this.options.robust) high = Math.min(high, 1.35 * [...ys].sort((a, b) => a - b)[Math.floor(0.98 * (ys.length - 1))]);
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.2, high + Math.abs(high) * 0.2];
    const room = this.options.percent ? 0.04 : 0.08;
    const span = high - low;
    const top = high + room * span;
    const bottom = low === 0 ? 0 : low - room * span;
    const [first, last] = [xs[0], xs.at(-1)];
    const single = first === last;
    const x = (value) => PAD.left + (single ? 0.5 : (value - first) / (last - first)) * (width - PAD.left - PAD.right);
    const y = (value) => PAD.top + (1 - (value - bottom) / (top - bottom)) * (HEIGHT - PAD.top - PAD.bottom);
    const shown = (value) => (this.options.percent ? `${figure(100 * value)} %` : figure(value));
    const { found, step } = ticks(bottom, top, 4);
    for (const value of found) {
      this.svg.append(s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
      this.svg.append(s("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end", text: this.options.percent ? `${Math.round(100 * value)} %` : tickText(value, step) }));
    }
    const places = single ? [first] : ticks(first, last, Math.max(2, Math.floor(width / 90))).found.filter((value) => this.options.real || Number.isInteger(value));
    for (const value of places) {
      const anchor = x(value) > width - 24 ? "end" : "middle";
      this.svg.append(s("text", { class: "tick", x: Math.min(x(value), width - 4), y: HEIGHT - 6, "text-anchor": anchor, text: figure(value) }));
    }
    for (const mark of this.marks ?? []) {
      this.svg.append(s("line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: PAD.top, y2: HEIGHT - PAD.bottom }));
      this.legend.append(h("span", { class: "entry", text: `┊ ${mark.text}` }));
    }
    const hasName = series.length > 1 || this.options.named;
    series.forEach((one, index) => {
      const colour = colourOf(one, index);
      if (one.top) {
        const edge = (values) => one.x.map((value, place) => `${x(value).toFixed(1)} ${y(values[place]).toFixed(1)}`);
        const width = single ? 10 : 0;
        const outline = single ? [[-width, one.top[0]], [width, one.top[0]], [width, one.base[0]], [-width, one.base[0]]].map(([by, value]) => `${x(first) + by} ${y(value)}`) : [...edge(one.top), ...edge(one.base).reverse()];
        this.svg.append(s("path", { class: `area ${colour}`, d: `M${outline.join("L")}Z` }));
        this.legend.append(h("span", { class: "entry" }, h("i", { class: `swatch ${colour}` }), one.name));
        return;
      }
      const points = one.x.map((value, place) => [x(value), one.y[place], place]).filter(([, value]) => finite(value));
      if (one.low) {
        for (const [at, , place] of points)
          if (finite(one.low[place]) && finite(one.high[place]))
            this.svg.append(s("line", { class: `interval ${colour}`, x1: at, x2: at, y1: y(one.low[place]), y2: y(one.high[place]) }));
      }
      const path = points.map(([at, value], place) => `${place ? "L" : "M"}${at.toFixed(1)} ${y(value).toFixed(1)}`).join("");
      this.svg.append(s("path", { class: `curve ${colour} dash-${one.dash ?? 0}`, d: path }));
      if (one.points || points.length === 1)
        for (const [at, value] of points) this.svg.append(s("circle", { class: `dot ${colour}`, cx: at, cy: y(value), r: 3 }));
      const newest = points.at(-1);
      const sign = one.dash === undefined ? h("i", { class: `swatch ${colour}` }) : s("svg", { width: 22, height: 10 }, s("path", { class: `curve ${colour} dash-${one.dash}`, d: "M0 5H22" }));
      if (newest) this.legend.append(h("span", { class: "entry" }, sign, hasName ? `${one.name} ` : "", h("b", { text: shown(newest[1]) })));
    });
    const best = series.map((one) => `${one.name} ${shown(one.y.filter(finite).at(-1))}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${best}, at ${this.options.xName ?? "update"} ${last}. Arrow keys read values.`);
    this.drawn = { xs, x, y, series, shown, width };
    if (this.at !== null) this.read(this.at);
  }

  point(event) {
    if (!this.drawn) return;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const { xs, x } = this.drawn;
    this.read(xs.reduce((best, one) => (Math.abs(x(one) - at) < Math.abs(x(best) - at) ? one : best)));
  }

  key(event) {
    if (!this.drawn || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const { xs } = this.drawn;
    const place = this.at === null ? xs.length : xs.indexOf(this.at);
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: xs.length - 1 }[event.key];
    this.read(xs[Math.max(0, Math.min(xs.length - 1, next))]);
  }

  read(value) {
    this.at = value;
    this.svg.querySelectorAll(".cursor").forEach((one) => one.remove());
    this.readout.hidden = value === null || !this.drawn;
    if (this.readout.hidden) return;
    const { x, y, series, shown, width } = this.drawn;
    const at = x(value);
    this.svg.append(s("line", { class: "cursor", x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    const lines = [h("div", { class: "soft", text: `${this.options.xName ?? "update"} ${figure(value)}` })];
    series.forEach((one, index) => {
      const place = one.x.indexOf(value);
      if (place < 0 || !finite(one.y[place])) return;
      const colour = colourOf(one, index);
      if (!one.top) this.svg.append(s("circle", { class: `cursor dot ${colour}`, cx: at, cy: y(one.y[place]), r: 3.5 }));
      const interval = one.low && finite(one.low[place]) ? ` (${shown(one.low[place])} to ${shown(one.high[place])})` : "";
      const raw = this.smooth && !one.points ? `, here ${shown(one.raw[place])}` : "";
      lines.push(h("div", {}, h("i", { class: `swatch ${colour}` }), `${one.name} ${shown(one.y[place])}${interval}${raw}`));
    });
    this.readout.replaceChildren(...lines);
    const isRight = at > width / 2;
    this.readout.style.setProperty("left", isRight ? "auto" : `${at + 10}px`);
    this.readout.style.setProperty("right", isRight ? `${width - at + 10}px` : "auto");
  }
}

// bins: [{label, parts: [{name, value}]}]; one bar per bin, stacked by part.
export class Bars {
  constructor(title, options = {}) {
    this.title = title;
    this.options = options;
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", { height: HEIGHT, width: "100%", "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": title }, this.svg);
    this.note = h("p", { class: "soft small" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", { text: title }), this.legend), this.plot, this.note);
    this.bins = [];
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(bins, note = "") {
    this.bins = bins;
    say(this.note, note);
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width < 40) return;
    this.svg.replaceChildren();
    this.legend.replaceChildren();
    const sums = this.bins.map((bin) => bin.parts.reduce((sum, part) => sum + part.value, 0));
    const high = Math.max(0, ...sums);
    if (!high) {
      this.svg.append(s("text", { x: width / 2, y: HEIGHT / 2, class: "empty", "text-anchor": "middle", text: "nothing yet" }));
      return;
    }
    const names = [...new Set(this.bins.flatMap((bin) => bin.parts.filter((part) => part.value).map((part) => part.name)))];
    const given = new Map(this.bins.flatMap((bin) => bin.parts.map((part) => [part.name, part.colour])));
    const colourOf = (name) => `series-${given.get(name) ?? names.indexOf(name) % 6}`;
    const inner = width - PAD.left - PAD.right;
    const step = inner / this.bins.length;
    const y = (value) => PAD.top + (1 - value / (1.06 * high)) * (HEIGHT - PAD.top - PAD.bottom);
    for (const value of ticks(0, high, 3).found) {
      this.svg.append(s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
      this.svg.append(s("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end", text: figure(value) }));
    }
    const every = Math.ceil((this.bins.length * 44) / inner);
    const all = sums.reduce((sum, one) => sum + one, 0);
    this.bins.forEach((bin, index) => {
      let base = 0;
      const left = PAD.left + index * step + Math.min(1.5, step * 0.1);
      for (const part of bin.parts) {
        if (!part.value) continue;
        const rect = s("rect", { class: `bar ${colourOf(part.name)}`, x: left, width: Math.max(1, step - Math.min(3, step * 0.2)), y: y(base + part.value), height: Math.max(1, y(base) - y(base + part.value)) });
        rect.append(s("title", { text: `${bin.label}: ${figure(part.value)} ${part.name} (${((100 * part.value) / all).toFixed(1)} %)` }));
        this.svg.append(rect);
        base += part.value;
      }
      if (index % every === 0)
        this.svg.append(s("text", { class: "tick", x: left + step / 2, y: HEIGHT - 6, "text-anchor": "middle", text: bin.tick ?? bin.label }));
    });
    if (names.length > 1 || this.options.named)
      for (const name of names) this.legend.append(h("span", { class: "entry" }, h("i", { class: `swatch ${colourOf(name)}` }), name));
    const top = this.bins[sums.indexOf(high)];
    this.plot.setAttribute("aria-label", `${this.title}: ${this.bins.length} bars, the highest at ${top.label} with ${figure(high)} of ${figure(all)}`);
  }
}

// counts in bins of equal width from low to high, as in the history
export function binsOf(histogram, name) {
  if (!histogram) return [];
  const { low, high, counts } = histogram;
  const width = (high - low) / counts.length;
  return counts.map((value, index) => ({
    label: `${figure(low + index * width)} to ${figure(low + (index + 1) * width)}`,
    tick: figure(low + index * width),
    parts: [{ name, value }],
  }));
}
