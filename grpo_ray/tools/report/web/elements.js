"use strict";
// Small builders for the rest of the page. A run's texts only ever become text nodes, with nothing unseen in them.

const DATA = JSON.parse(document.getElementById("data").textContent);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => typeof child === "string" ? visible(child) : child));
  return node;
}

/** Make an HTML element; `on...` attributes are listeners, children are nodes or text. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Make a labelled <select>; options are [value, text]. */
function choice(label, options, onchange) {
  const select = el("select", { onchange: () => onchange(select.value) });
  select.append(...options.map(([value, text]) => el("option", { value }, text)));
  return { select, field: el("label", { class: "field" }, el("span", {}, label), select) };
}

function swatch(color, isDashed = false) {
  const mark = el("span", { class: isDashed ? "swatch dashed" : "swatch", "aria-hidden": "true" });
  mark.style.setProperty("--color", color);
  return mark;
}

/** Return the colour of the run or series at a place: the style sheet's eight, then hues far apart. */
function seriesColor(place) {
  return place < 8 ? `var(--c${place})` : `hsl(${(place * 137.5) % 360} 55% var(--lightness))`;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** Return texts of evenly spaced numbers, with as many digits as tell them apart. */
function tickLabels(ticks) {
  const step = ticks[1] - ticks[0] || 1, most = Math.max(...ticks.map(Math.abs));
  const digits = Math.max(1, Math.ceil(Math.log10(most / step)) + 1);
  if (most >= 1e6) return ticks.map((tick) => tick.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits }));
  if (step < 1e-3) return ticks.map((tick) => tick === 0 ? "0" : tick.toExponential(digits - 1));
  const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  return ticks.map((tick) => tick.toLocaleString("en", { maximumFractionDigits: decimals }));
}

/** Replace characters that cannot be seen, or that act on the text around them, as records/visible_text.py does. */
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\u{e0000}-\u{e0fff}]/gu;

function visible(text) {
  return text.replace(UNSEEN, (mark) => `⟨U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Return about `count` round numbers from `low` to `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) =>
    Number(((first + place) * step).toPrecision(12)));
}
