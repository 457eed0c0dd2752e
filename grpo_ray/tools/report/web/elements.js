"use strict";
// Small builders for the rest of the page. A run's texts only ever become text nodes.

const DATA = JSON.parse(document.getElementById("data").textContent);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
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

/** Replace control and direction characters by visible text without an effect. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (mark) => `⟨U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
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
