// Helpers that make elements. Text only goes into text nodes, so model output and prompts are never
// parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

// Sets text only if it changed, so as not to disturb a selection or a screen reader.
export function say(element, text) {
  const value = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== value) element.textContent = value;
}

export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : String(value));
}

// One child per row, identified by its key, so that focus and hover are kept.
export function keyed(parent, rows, keyOf, make, update) {
  const there = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const row of rows) {
    const key = String(keyOf(row));
    let child = there.get(key);
    if (child) there.delete(key);
    else {
      child = make(row);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    if (update) update(child, row);
  }
  for (const child of there.values()) child.remove();
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
export const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);
export const short = (value) => (isNumber(value) ? (Math.abs(value) < 10000 ? whole.format(value) : compact.format(value)) : NONE);
export const percent = (share, digits = 1) => (isNumber(share) ? `${(100 * share).toFixed(digits)}\u00a0%` : NONE);

// "1 thing", "2 things".
export const many = (value, one) => `${short(value)} ${one}${value === 1 ? "" : "s"}`;

export function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10000) return compact.format(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return String(Number(value.toFixed(2)));
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

export function rate(value, unit) {
  if (!isNumber(value)) return "";
  const digits = value >= 10 || value === 0 ? 0 : 1;
  return `${value >= 10000 ? compact.format(value) : value.toFixed(digits)}${unit ? ` ${unit}` : ""}/s`;
}

export function age(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return "under 1 s";
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(at_s) {
  return isNumber(at_s) && at_s > 0 ? new Date(1000 * at_s).toLocaleTimeString("en-GB") : NONE;
}

export function date(at_s) {
  if (!isNumber(at_s) || at_s <= 0) return NONE;
  return new Date(1000 * at_s).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export const bytes = (value) => (isNumber(value) ? (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GB` : `${(value / 2 ** 20).toFixed(value < 10 * 2 ** 20 ? 1 : 0)} MB`) : NONE);
export const words = (name) => String(name).replaceAll("_", " ");

// A panel with a heading, a note next to it, and a body.
export function panel(title, properties, ...children) {
  const note = h("span", { class: "note" });
  const head = h("header", {}, h("h2", { text: title }), note);
  const body = h("div", { class: "body" }, children);
  const element = h("section", { ...properties, class: `panel ${properties?.class ?? ""}`.trim() }, head, body);
  return { element, head, note, body };
}

export function table(columns, label) {
  const head = h("tr", {}, columns.map((one) => h("th", { scope: "col", class: one.class, text: one.name })));
  const rows = h("tbody");
  const element = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": label }, h("table", {}, h("thead", {}, head), rows));
  return { element, rows, head };
}

export function cells(row, texts) {
  texts.forEach((text, index) => {
    const cell = row.children[index];
    if (text !== undefined && cell) say(cell, text);
  });
}
