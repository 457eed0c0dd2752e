"use strict";
// Line charts over steps: one line per run and series, with 95% bands where standard errors are known.

const HEIGHT = 224, TOP = 10, RIGHT = 12, BOTTOM = 38, LEFT = 66;
const NORMAL_95 = 1.96;

/** Draw the axes of a chart, with titles; the returned `x` and `y` map values to pixels. */
function frame(width, steps, values, yTicks, unit) {
  const x = (step) => LEFT + ((step - steps[0]) / (steps[1] - steps[0])) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((values[1] - value) / (values[1] - values[0])) * (HEIGHT - TOP - BOTTOM);
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  const labels = tickLabels(yTicks);
  for (const [place, tick] of yTicks.entries()) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, labels[place]));
  }
  const whole = ticks(steps[0], steps[1], Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  for (const tick of whole) {
    const text = tick.toLocaleString("en"), right = Math.min(x(tick) + 4 * text.length, width - 1);
    root.append(svg("text", { class: "tick", x: right, y: HEIGHT - 22, "text-anchor": "end" }, text));
  }
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  root.append(svg("text", { class: "tick", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "step"));
  root.append(svg("text", { class: "tick", transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, unit ?? ""));
  return { root, x, y };
}

/** Return [lowest, highest], rounded outwards to ticks; shares range from 0 to 1. */
function valueRange(values, isShare) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (isShare) return [0, 1];
  if (low >= 0 && low < high / 2) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const [first, second] = ticks(low, high, 5);
  const step = second - first || 1;
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

/** A figure that redraws when its width changes, and reads out values for pointer and arrow keys. */
class Figure {
  constructor(title, unit) {
    this.heading = el("h3", {});
    this.name(title, unit);
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img" });
    this.legend = el("p", { class: "legend" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.node = el("figure", {},
      el("figcaption", {}, this.heading, this.legend), this.plot, this.readout);
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.select(null));
    this.plot.addEventListener("blur", () => this.select(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  name(title, unit) {
    Object.assign(this, { title, unit });
    this.heading.replaceChildren(title ?? "");
  }

  /** Draw, and keep the steps that can be read out, with their positions. */
  draw() {
    this.width = this.plot.clientWidth;
    this.marks = [];
    if (this.width === 0) return;
    const drawn = this.drawing(this.width);
    this.plot.replaceChildren(drawn ?? el("p", { class: "empty" }, "no data in these runs"));
    this.cursor = drawn && svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    if (drawn) drawn.append(this.cursor);
    this.select(null);
  }

  point(offset) {
    if (this.marks.length === 0) return;
    const distance = (place) => Math.abs(this.marks[place].x - offset);
    let nearest = 0;
    this.marks.forEach((_, place) => { if (distance(place) < distance(nearest)) nearest = place; });
    this.select(nearest);
  }

  key(event) {
    const last = this.marks.length - 1, at = this.selected;
    const to = { ArrowRight: at === null ? 0 : Math.min(last, at + 1), ArrowLeft: at === null ? last : Math.max(0, at - 1),
      Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.select(to);
  }

  select(place) {
    this.selected = place;
    const mark = place === null ? null : this.marks[place];
    this.readout.textContent = mark ? this.read(mark) : "";
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", mark ? "visible" : "hidden");
    if (mark) { this.cursor.setAttribute("x1", mark.x); this.cursor.setAttribute("x2", mark.x); }
  }
}

/** A chart of one panel (series.py). */
class LineChart extends Figure {
  constructor(panel, runs) {
    super(panel.title, panel.unit);
    Object.assign(this, { panel, runs });
  }

  show(runs) { this.runs = runs; this.draw(); }

  /** Replace the panel. */
  setPanel(panel) {
    this.panel = panel;
    this.name(panel.title, panel.unit);
    this.draw();
  }

  /** Return all lines that have values, with name, colour, steps, values and standard errors. */
  lines() {
    const several = this.runs.length > 1;
    return this.runs.flatMap((run) => this.panel.series.flatMap(([metric, label], order) => run.series
      .filter((part) => metric in part.columns)
      .map((part) => ({
        name: several ? (this.panel.series.length > 1 ? `${run.name}, ${label}` : run.name) : label,
        color: seriesColor(several ? run.place : order), isDashed: order > 0,
        steps: part.steps, values: part.columns[metric].map((value) => value === null ? null : value / (this.panel.scale ?? 1)),
        errors: this.panel.bands && part.standard_errors[metric]?.some((error) => error !== null)
          ? part.standard_errors[metric] : null,
      })).filter((line) => line.values.some((value) => value !== null))));
  }

  drawing(width) {
    const lines = this.current = this.lines();
    this.legend.replaceChildren(...lines.map((line) => el("span", {}, swatch(line.color, line.isDashed), line.name)));
    this.plot.setAttribute("aria-label", `${this.title}. ${lines.map(summary).join(" ") || "No data."} Arrow keys read out the values.`);
    if (lines.length === 0) return null;
    const own = lines.flatMap((line) => line.values.filter((value) => value !== null));
    // A band may extend beyond a share's 0 to 1 without changing the axis, and measured shares may reach 1.003.
    const isShare = this.panel.is_share && own.every((value) => value >= 0 && value < 1.02);
    const isWhole = this.panel.is_number;
    const known = isWhole ? [0, ...own] : isShare ? own : lines.flatMap((line) => line.values.flatMap((value, place) =>
      value === null ? [] : [value - margin(line, place), value + margin(line, place)]));
    const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const values = valueRange(known, isShare);
    const range = steps.length > 1 ? [steps[0], steps.at(-1)] : [steps[0] - 1, steps[0] + 1];
    const { root, x, y } = frame(width, range, values, ticks(...values, 5).filter((tick) => !isWhole || Number.isInteger(tick)), this.unit);
    for (const line of lines) if (line.errors) root.append(band(line, x, y));
    for (const line of lines) root.append(...curve(line, x, y, isWhole));
    this.marks = steps.map((step) => ({ step, x: x(step) }));
    return root;
  }

  read({ step }) {
    const texts = this.current.flatMap((line) => {
      const place = line.steps.indexOf(step);
      if (place < 0 || line.values[place] === null) return [];
      const more = margin(line, place);
      return [`${line.name} ${number(line.values[place])}${more ? ` ± ${number(more)}` : ""}`];
    });
    return `step ${number(step)}: ${texts.join("; ") || "no value"}`;
  }
}

function summary(line) {
  const known = line.values.filter((value) => value !== null);
  return `${line.name}: from ${number(known[0])} to ${number(known.at(-1))} over ${known.length} points.`;
}

/** Return half the width of the 95% band. */
function margin(line, place) {
  return NORMAL_95 * (line.errors?.[place] ?? 0);
}

/** Split a line's places into stretches without missing values. */
function stretches(line) {
  const found = [];
  line.values.forEach((value, place) => {
    if (value === null) return;
    if (place > 0 && line.values[place - 1] !== null && found.length) found.at(-1).push(place);
    else found.push([place]);
  });
  return found;
}

/** Draw a line's stretches of known values; alone, or with `areDots`, a value is a dot. */
function curve(line, x, y, areDots) {
  const at = (place) => `${x(line.steps[place]).toFixed(1)},${y(line.values[place]).toFixed(1)}`;
  const parts = areDots ? stretches(line).flat().map((place) => [place]) : stretches(line);
  return parts.map((places) => {
    const drawn = places.length > 1 ? svg("polyline", { class: "line", points: places.map(at).join(" ") })
      : svg("circle", { class: "dot", r: 3, cx: x(line.steps[places[0]]), cy: y(line.values[places[0]]) });
    drawn.style.setProperty("--color", line.color);
    if (line.isDashed) drawn.classList.add("dashed");
    return drawn;
  });
}

function band(line, x, y) {
  const group = svg("g", { class: "band" });
  const limit = (pixel) => Math.min(HEIGHT - BOTTOM, Math.max(TOP, pixel));
  for (const places of stretches(line)) {
    const edge = (sign) => places.map((place) =>
      `${x(line.steps[place]).toFixed(1)},${limit(y(line.values[place] + sign * margin(line, place))).toFixed(1)}`);
    const area = svg("polygon", { points: [...edge(1), ...edge(-1).reverse()].join(" ") });
    area.style.setProperty("--color", line.color);
    group.append(area);
  }
  return group;
}
