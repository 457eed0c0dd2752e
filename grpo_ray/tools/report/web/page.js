"use strict";
// The page: one section each for runs, charts, time, rollouts and configuration.

DATA.runs.forEach((run, place) => { run.place = place; });
const shown = new Set(DATA.runs);
const charts = [];
const BANDS = "Bands are 95% confidence intervals: 1.96 standard errors, with a group's responses as one cluster.";

function section(title, ...children) {
  const id = title.toLowerCase().replaceAll(/[^a-z]+/g, "-");
  document.getElementById("nav").append(el("a", { href: `#${id}` }, title));
  document.getElementById("main").append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children));
}

function redraw() {
  const runs = DATA.runs.filter((run) => shown.has(run));
  for (const chart of charts) chart.show(runs);
}

function toggle(run) {
  const box = el("input", { type: "checkbox", checked: true, onchange: () => { box.checked ? shown.add(run) : shown.delete(run); redraw(); } });
  return el("label", { class: "toggle" }, box, swatch(seriesColor(run.place)), el("strong", {}, run.name));
}

/** Make the card of a run: what it is, what went wrong, what slows it down, and its figures. */
function runCard(run) {
  const list = (facts, attributes) => el("dl", attributes, ...Object.entries(facts).map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text))));
  const lines = (texts, kind) => texts.map((text) => el("p", { class: `notice ${kind}` }, text));
  return el("article", {}, DATA.runs.length > 1 ? toggle(run) : null, ...lines(run.errors, "error"),
    list(run.about, { class: "about" }), list(run.facts), ...lines(run.hints, "hint"), ...lines(notices(run), ""));
}

/** Make a table of the same validation prompts before and after training. */
function samplesTable(run) {
  const steps = [...new Set(run.samples.map((each) => each.step))];
  const answer = (row, place, step) => {
    const found = run.samples.filter((each) => each.step === step)[place];  // several prompts may have one text
    if (found?.prompt !== row.prompt) return el("td", {}, "–");
    const isGraded = found.error === null;
    return el("td", { "data-label": `Step ${step}` }, el("pre", { dir: "auto" }, found.response || "(empty)"),
      el("small", { class: isGraded ? null : "notice error" }, isGraded ? `reward ${number(found.reward)}` : `not graded: ${found.error}`));
  };
  const head = ["Prompt", "Ground truth", ...steps.map((step) => `Step ${step.toLocaleString("en")}`)];
  const rows = run.samples.filter((each) => each.step === steps[0]).map((row, place) => el("tr", {}, el("td", { "data-label": "Prompt" }, el("pre", { dir: "auto" }, row.prompt)),
    el("td", { "data-label": "Ground truth" }, el("pre", { dir: "auto" }, row.ground_truth)), ...steps.map((step) => answer(row, place, step))));
  return el("div", {}, DATA.runs.length > 1 ? el("h3", {}, run.name) : null,
    el("table", { class: "samples" }, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, ...rows)));
}

/** Return what readers of the charts and the table need to know. */
function notices(run) {
  const bins = run.series.filter((part) => part.bin_size > 1).map((part) => part.bin_size);
  const binned = bins.length ? [`Curves are downsampled: each point is the mean of ${Math.max(...bins)} steps (for a maximum: the largest value).`] : [];
  const { num_steps: steps, num_inspected_steps: read } = run.sample;
  const sampled = read < steps ? [`Rollouts are read from ${read.toLocaleString("en")} of ${steps.toLocaleString("en")} files, evenly spaced: the number of rollouts is an estimate, and each step has the standard error of the nearest step that was read.`] : [];
  return [...binned, ...sampled, ...run.notices];
}

function sampleNotice(run) {
  const { num_rollouts: all, num_steps: steps, num_sampled_steps: sampled, seed } = run.sample, here = run.rollouts.length;
  const name = DATA.runs.length > 1 ? `${run.name}: ` : "";
  if (all === 0) return `${name}no rollouts (run.save_rollouts was off, or no step has finished).`;
  const about = run.sample.num_inspected_steps < steps ? "about " : "";
  const what = here === all ? `all ${all.toLocaleString("en")} rollouts`
    : `a random sample, ${here.toLocaleString("en")} of ${about}${all.toLocaleString("en")} rollouts, from ${sampled.toLocaleString("en")} of ${steps.toLocaleString("en")} steps (seed ${seed})`;
  const ratio = run.checkpoint ? `; log-ratios compare the policy of ${run.checkpoint} with the one that sampled the token` : "";
  return `${name}${what}${ratio}.`;
}

function addChart(panel) {
  const isKnown = ([metric]) => DATA.runs.some((run) => run.series.some((part) => metric in part.columns));
  if (!panel.series.some(isKnown)) return null;
  const chart = new LineChart(panel, DATA.runs);
  charts.push(chart);
  return chart.node;
}

/** Make a chart of one metric, chosen from all. */
function anyMetric() {
  const names = [...new Set(DATA.runs.flatMap((run) => run.series.flatMap((part) => Object.keys(part.columns))))].sort();
  if (names.length === 0) return el("p", { class: "empty" }, "no metrics yet");
  const pattern = (name) => Object.keys(DATA.metrics).find((key) => key.includes("*") && name.startsWith(key.slice(0, key.indexOf("*"))));
  const meaning = el("p", { class: "meaning" });
  const chart = new LineChart({ series: [] }, DATA.runs);
  charts.push(chart);
  const pick = (name) => {
    const [unit, text] = DATA.metrics[name] ?? DATA.metrics[pattern(name)] ?? ["", ""];
    meaning.textContent = text;
    chart.setPanel({ title: name, unit, series: [[name, name]], is_share: unit === "share", bands: false });
  };
  const metric = choice("Metric", names.map((name) => [name, name]), pick);
  pick(names[0]);
  return el("div", {}, el("div", { class: "filters" }, metric.field), meaning, chart.node);
}

function keysTable(title, keys) {
  const head = el("tr", {}, el("th", { scope: "col" }, "Key"), ...DATA.runs.map((run) => el("th", { scope: "col" }, run.name)));
  const rows = keys.map((key) => el("tr", {}, el("th", { scope: "row" }, key), ...DATA.runs.map((run) => el("td", {}, run.config[key] ?? "–"))));
  return el("div", { class: title === "Defaults" ? "scroll" : "scroll whole", tabindex: "0", role: "region", "aria-label": title }, el("table", { class: "config" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/** Make the tables of configuration keys: those that differ between runs, those that are not the defaults, and the others on request. */
function configTables() {
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.config)))].sort();
  const differing = keys.filter((key) => new Set(DATA.runs.map((run) => run.config[key])).size > 1);
  const changed = keys.filter((key) => !differing.includes(key) && DATA.runs.some((run) => run.changed.includes(key)));
  const others = keys.filter((key) => !differing.includes(key) && !changed.includes(key));
  const part = (title, found) => found.length === 0 ? [] : [el("h3", {}, title), keysTable(title, found)];
  const rest = el("div", {}), status = el("p", { class: "count", role: "status" });
  const search = el("input", { type: "search", placeholder: "e.g. learning_rate", oninput: () => show() });
  const show = () => {
    const found = others.filter((key) => key.includes(search.value));
    rest.replaceChildren(keysTable("Defaults", found));
    status.textContent = `${found.length} of ${others.length} keys`;
  };
  show();
  const filters = el("div", { class: "filters" }, el("label", { class: "field wide" }, el("span", {}, "Search keys"), search));
  return [
    ...part("Differences between the runs", differing), ...part("Changed from the defaults", changed),
    el("details", { class: "defaults" }, el("summary", {}, `The other ${others.length} keys`), filters, status, rest),
    ...DATA.runs.map((run) => el("details", {}, el("summary", {}, `config.yaml of ${run.name}`), el("pre", { tabindex: "0" }, run.config_yaml))),
  ];
}

section("Runs", el("div", { class: "cards" }, ...DATA.runs.map(runCard)));
const sampled = DATA.runs.filter((run) => run.samples.length > 0);
if (sampled.length > 0) section("Before and after", ...sampled.map(samplesTable));
for (const { title, panels } of DATA.panels) {
  const drawn = panels.map(addChart).filter((chart) => chart !== null);
  const hasBands = panels.some((panel) => panel.bands);
  const tables = title === "Ranks" && drawn.length > 0 ? rankTables() : [];
  if (drawn.length > 0) section(title, el("div", { class: "charts" }, ...drawn), hasBands ? el("p", { class: "note" }, BANDS) : "", ...tables);
  if (hasBands) section("Time", ...stagesSection());
}
section("Any metric", anyMetric());
section("Rollouts", ...DATA.runs.map((run) => el("p", { class: "note" }, sampleNotice(run))), new Rollouts(DATA.runs).node);
section("Configuration", ...configTables());
document.documentElement.dataset.ready = "yes";
