"use strict";
// The time of actors: each one's shares of the whole run, and one actor's seconds step by step.

const LONG = 1.5; // of the 95th percentile: a first step of minutes must not flatten all the others

/** Colours of stages that several actors have; waiting is grey, and a second kind of waiting is paler. */
const PALER = "color-mix(in srgb, var(--wait) 45%, var(--card))";
const STAGE_COLORS = [[/^(wait|idle)/, "var(--wait)"], [/generate/, seriesColor(0)],
  [/sync|load|pause|resume/, seriesColor(1)], [/train/, seriesColor(3)], [/score/, seriesColor(2)]];

/** Choose a colour for each stage of an actor; stages without a colour of their own get one that is free. */
function stageColors(stages) {
  const own = (stage) => STAGE_COLORS.find(([pattern]) => pattern.test(stage))?.[1];
  const colors = new Map(), taken = new Set();
  for (const stage of Object.keys(stages).sort((a, b) => Boolean(own(b)) - Boolean(own(a)))) {
    const free = Array.from({ length: 8 }, (_, place) => seriesColor(place)).find((color) => !taken.has(color));
    const wanted = own(stage), isFree = wanted && !taken.has(wanted);
    const other = wanted === "var(--wait)" ? PALER : free ?? seriesColor(colors.size);
    colors.set(stage, isFree ? wanted : other);
    taken.add(colors.get(stage));
  }
  return colors;
}

function stageName(stage) {
  return stage.replaceAll("_", " ");
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

function bar(color, attributes) {
  const drawn = svg("rect", { class: "bar", ...attributes });
  drawn.style.setProperty("--color", color);
  return drawn;
}

/** Make one stacked bar of an actor's shares of its time over the run, the largest first, with its legend. */
function shareBar(actor, stages) {
  const sums = Object.entries(stages).map(([stage, seconds]) => [stage, total(seconds)]).sort((a, b) => b[1] - a[1]);
  const whole = total(sums.map(([, seconds]) => seconds)) || 1, colors = stageColors(stages);
  const shown = sums.map(([stage, seconds]) => [stage, Math.round((100 * seconds) / whole), seconds]).filter(([, percent]) => percent > 0);
  const texts = shown.map(([stage, percent]) => `${stageName(stage)} ${percent}%`);
  const track = el("div", { class: "shares", role: "img", "aria-label": `${actor}: ${texts.join(", ")}` });
  for (const [stage, , seconds] of shown) {
    const part = el("span", { title: `${stageName(stage)} ${number(seconds)} s` });
    part.style.width = `${(100 * seconds) / whole}%`;
    part.style.backgroundColor = colors.get(stage);
    track.append(part);
  }
  const legend = shown.map(([stage], place) => el("span", {}, swatch(colors.get(stage)), texts[place]));
  return el("div", { class: "actor" }, el("strong", {}, actor), track, el("p", { class: "legend" }, ...legend));
}

/** Stacked bars, one per step; neighbours are averaged if there are more than fit. */
class StageChart extends Figure {
  constructor() { super("Step by step", "seconds"); }

  show(run, actor) {
    const stages = run.stages[actor] ?? {};
    Object.assign(this, { run, actor, stages, colors: stageColors(stages) });
    this.draw();
  }

  drawing(width) {
    const names = Object.keys(this.stages ?? {}).filter((stage) => this.stages[stage].some((value) => value > 0));
    this.legend.replaceChildren(...names.map((stage) => el("span", {}, swatch(this.colors.get(stage)), stageName(stage))));
    this.plot.setAttribute("aria-label", `${this.title}, ${this.actor ?? ""}. Arrow keys read out the values.`);
    if (names.length === 0) return null;
    const steps = this.run.series[0].steps, size = Math.max(1, Math.ceil(steps.length / ((width - LEFT - RIGHT) / 4)));
    const bins = [];
    for (let first = 0; first < steps.length; first += size) bins.push(this.bin(names, steps, first, first + size));
    const heights = bins.map((bin) => total(bin.parts.map(([, seconds]) => seconds)));
    const usual = [...heights].sort((a, b) => a - b)[Math.floor(0.95 * (heights.length - 1))];
    const values = valueRange([0, Math.min(Math.max(...heights), usual * LONG || 1)], false);
    const { root, x, y } = frame(width, [steps[0] - 0.5, steps.at(-1) + 0.5], values, ticks(...values, 5), this.unit);
    const wide = Math.max(1, (width - LEFT - RIGHT) / bins.length - 1);
    this.marks = bins.map((bin) => ({ ...bin, x: x(bin.step) }));
    for (const bin of bins) root.append(...stacked(bin, this.colors, x(bin.step) - wide / 2, wide, y, values[1]));
    return root;
  }

  bin(names, steps, from, to) {
    const mean = (values) => total(values) / values.length;
    return { step: mean(steps.slice(from, to)), from: steps[from], to: steps[Math.min(to, steps.length) - 1],
      parts: names.map((stage) => [stage, mean(this.stages[stage].slice(from, to))]) };
  }

  read({ from, to, parts }) {
    const when = from === to ? `step ${number(from)}` : `steps ${number(from)}–${number(to)}, mean`;
    const each = parts.map(([stage, seconds]) => `${stageName(stage)} ${number(seconds)}`);
    return `${when}: ${number(total(parts.map(([, seconds]) => seconds)))} s (${each.join(", ")})`;
  }
}

function stacked(bin, colors, left, wide, y, limit) {
  let below = 0;
  return bin.parts.map(([stage, seconds]) => {
    const top = y(Math.min(limit, below + seconds)), height = y(Math.min(limit, below)) - top;
    below += seconds;
    return bar(colors.get(stage), { x: left, width: wide, y: top, height: Math.max(0, height) });
  });
}

function stagesSection() {
  const runs = DATA.runs.filter((run) => Object.keys(run.stages).length > 0);
  if (runs.length === 0) return [el("p", { class: "empty" }, "no timings in these runs")];
  const overview = el("div", { class: "actors" }), chart = new StageChart();
  let run = runs[0];
  const actors = choice("Actor", [], (actor) => chart.show(run, actor));
  const showRun = (place) => {
    run = runs[place];
    overview.replaceChildren(...Object.entries(run.stages).map(([actor, stages]) => shareBar(actor, stages)));
    actors.select.replaceChildren(...Object.keys(run.stages).map((actor) => el("option", { value: actor }, actor)));
    const first = Object.keys(run.stages).find((actor) => /learner/i.test(actor)) ?? Object.keys(run.stages)[0];
    actors.select.value = first;
    chart.show(run, first);
  };
  const which = choice("Run", runs.map((each, place) => [place, each.name]), showRun);
  showRun(0);
  return [runs.length > 1 ? el("div", { class: "filters" }, which.field) : "", overview, el("div", { class: "filters" }, actors.field), chart.node];
}
