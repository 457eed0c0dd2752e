"use strict";
// The table of sampled rollouts, with filters, sorting and pages; a row expands to its coloured tokens.

const ROWS = 25;
const COLUMNS = [
  ["step", "Step", (row) => row.step], ["prompt", "Prompt", null], ["response", "Response", null],
  ["reward", "Reward", (row) => row.reward], ["advantage", "Advantage", (row) => row.advantage],
  ["tokens", "Tokens", (row) => row.num_tokens], ["versions", "Versions", (row) => row.min_version],
];
const TURNS = ["turns", "Turns", (row) => row.episode?.num_turns ?? 1];  // a column only with episodes
const COLORINGS = {
  ratio: ["log-ratio", (row) => row.ratios, 1, "less likely now", "more likely now"],
  logprob: ["logprob when sampled", (row) => row.logprobs?.map((value) => value === null ? null : -value), 4, "", "surprising"],
  advantage: ["advantage", advantages, 2, "worse than its group", "better"],
  none: ["no colour", () => null, 1, "", ""],
};

function versions(row) {
  if (row.min_version === null) return "–";
  const span = row.min_version === row.max_version ? `${row.min_version}` : `${row.min_version}–${row.max_version}`;
  return `${span} (lag ${row.step - 1 - row.min_version})`;
}

/** Return the length of an instruction that all prompts begin with, if it is long: the table leaves it out. */
function sharedStart(rows) {
  let shared = rows[0].prompt;
  for (const { prompt } of rows) while (!prompt.startsWith(shared)) shared = shared.slice(0, -1);
  const isWorthIt = shared.length > 40 && rows.some((row) => row.prompt.length > shared.length);
  return isWorthIt ? shared.lastIndexOf("\n") + 1 || shared.lastIndexOf(" ") + 1 : 0;
}

function outcome(row) {
  if (row.episode) return row.episode.status.replaceAll("_", " ");
  if (row.error !== null) return "error";
  if (row.ungradable !== null) return "ungradable";
  return row.finish_reason === "length" ? "truncated" : "ended";
}

class Rollouts {
  constructor(runs) {
    this.rows = runs.filter((run) => run.rollouts.length > 0).flatMap((run) => {
      const start = sharedStart(run.rollouts);
      return run.rollouts.map((row) => ({ ...row, run, brief: (start ? "… " : "") + row.prompt.slice(start),
        text: [row.prompt, row.response, row.ground_truth].join("\n").toLowerCase() }));
    });
    this.columns = this.rows.some((row) => row.episode) ? [...COLUMNS, TURNS] : COLUMNS;
    this.sorting = { name: "step", factor: 1 };
    this.page = 0;
    this.colorings = Object.keys(COLORINGS).filter((name) => name === "none" || this.rows.some(COLORINGS[name][1]));
    this.coloring = this.colorings[0];
    this.opened = new Set();
    this.count = el("p", { class: "count", role: "status" });
    this.body = el("tbody", { role: "rowgroup" });
    this.head = el("tr", { role: "row" });
    this.scale = el("p", { class: "legend" });
    const previous = el("button", { type: "button", onclick: () => this.turn(-1) }, "← Previous");
    const next = el("button", { type: "button", onclick: () => this.turn(1) }, "Next →");
    this.pager = { previous, next, position: el("span", {}) };
    this.node = el("div", {}, this.filters(runs), this.count, this.scale,
      el("table", { class: "rollouts", role: "table" }, el("thead", { role: "rowgroup" }, this.head), this.body),
      el("p", { class: "pager" }, previous, this.pager.position, next));
    this.show();
  }

  filters(runs) {
    const update = () => { this.page = 0; this.show(); };
    const steps = [...new Set(this.rows.map((row) => row.step))].sort((a, b) => a - b);
    const any = (values, name) => [["", `all ${name}`], ...values.map((value) => [value, value])];
    const bound = (label) => {
      const input = el("input", { type: "number", step: "any", oninput: update });
      return { input, field: el("label", { class: "field narrow" }, el("span", {}, label), input) };
    };
    this.run = choice("Run", [["", "all runs"], ...runs.map((run) => [run.place, run.name])], update);
    this.step = choice("Step", any(steps, "steps"), update);
    const tasks = [...new Set(this.rows.map((row) => row.task).filter(Boolean))].sort();
    this.task = choice("Task", any(tasks, "tasks"), update);
    this.least = bound("Reward from");
    this.most = bound("to");
    const ends = ["ended", "truncated", "ungradable", "error"], found = [...new Set(this.rows.map(outcome))];
    const others = found.filter((name) => !ends.includes(name)).sort();
    this.outcome = choice("Outcome", any([...(found.length > others.length || !others.length ? ends : []), ...others], "outcomes"), update);
    this.search = el("input", { type: "search", placeholder: "in prompts and responses", oninput: update });
    const colors = choice("Colour tokens by", this.colorings.map((name) => [name, COLORINGS[name][0]]),
      (name) => { this.coloring = name; this.show(); });
    return el("div", { class: "filters" }, runs.length > 1 ? this.run.field : null, this.step.field,
      tasks.length > 0 ? this.task.field : null, this.least.field, this.most.field, this.outcome.field,
      el("label", { class: "field wide" }, el("span", {}, "Search"), this.search), colors.field);
  }

  isShown(row) {
    const least = this.least.input.valueAsNumber, most = this.most.input.valueAsNumber;
    return (this.run.select.value === "" || String(row.run.place) === this.run.select.value)
      && (this.step.select.value === "" || String(row.step) === this.step.select.value)
      && (this.task.select.value === "" || row.task === this.task.select.value)
      && (Number.isNaN(least) || row.reward >= Math.fround(least)) && (Number.isNaN(most) || row.reward <= Math.fround(most))
      && (this.outcome.select.value === "" || outcome(row) === this.outcome.select.value)
      && row.text.includes(this.search.value.toLowerCase());
  }

  show() {
    const value = this.columns.find(([name]) => name === this.sorting.name)[2];
    const found = this.rows.filter((row) => this.isShown(row))
      .sort((a, b) => this.sorting.factor * (value(a) - value(b)));
    const pages = Math.max(1, Math.ceil(found.length / ROWS)), first = this.page * ROWS;
    this.head.replaceChildren(...this.columns.map((column) => this.heading(...column)));
    this.body.replaceChildren(...found.slice(first, first + ROWS).flatMap((row) => this.line(row)));
    this.count.textContent = `${found.length.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")} rollouts on this page`;
    this.pager.position.textContent = ` page ${this.page + 1} of ${pages} `;
    this.pager.previous.disabled = this.page === 0;
    this.pager.next.disabled = this.page + 1 >= pages;
    this.scale.replaceChildren(...colorScale(this.coloring));
  }

  turn(by) { this.page += by; this.show(); }

  heading(name, label, value) {
    const isSorted = this.sorting.name === name;
    if (!value) return el("th", { scope: "col", role: "columnheader" }, label);
    const sort = () => { this.sorting = { name, factor: isSorted ? -this.sorting.factor : 1 }; this.page = 0; this.show(); };
    const mark = isSorted ? (this.sorting.factor > 0 ? " ↑" : " ↓") : "";
    return el("th", { scope: "col", role: "columnheader", class: "number",
      "aria-sort": isSorted ? (this.sorting.factor > 0 ? "ascending" : "descending") : null },
    el("button", { type: "button", onclick: sort }, label + mark));
  }

  /** Return the row and, if it is open, a second one with everything about the rollout. */
  line(row) {
    const isOpen = this.opened.has(row);
    const open = el("button", { type: "button", class: "open", "aria-expanded": String(isOpen),
      onclick: () => { isOpen ? this.opened.delete(row) : this.opened.add(row); this.show(); } }, row.response || "(empty)");
    const cells = { step: number(row.step), prompt: row.brief, response: open, reward: number(row.reward),
      advantage: number(row.advantage), tokens: number(row.num_tokens), versions: versions(row),
      turns: row.episode ? turnsOf(row.episode) : "–" };
    const marked = el("tr", { role: "row" }, ...this.columns.map(([name, label, value]) =>
      el("td", { role: "cell", "data-label": label, class: value ? "number" : "text" },
        name === "step" && DATA.runs.length > 1 ? swatch(seriesColor(row.run.place)) : null, cells[name])));
    if (!isOpen) return [marked];
    return [marked, el("tr", { role: "row", class: "detail" }, el("td", { role: "cell", colspan: this.columns.length }, ...this.detail(row)))];
  }

  detail(row) {
    const facts = { run: row.run.name, "group, sample": `${row.group_id}, ${row.sample}`, generator: row.generator,
      task: row.task, "format reward": number(row.format_reward), "answer reward": number(row.answer_reward),
      outcome: [outcome(row), row.episode ? null : row.error ?? row.ungradable].filter(Boolean).join(": "),
      use: { 0: "dropped, not trained", 1: "trained" }[row.use] ?? `replayed, use ${row.use}` };
    const texts = Object.entries(facts).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`);
    return [
      el("h4", {}, row.episode ? "Example" : "Prompt"), el("pre", { dir: "auto" }, row.prompt),
      el("h4", {}, row.episode ? "Episode" : "Response"),
      ...(row.episode ? episode(row, this.coloring) : [row.tokens ? tokens(row, this.coloring) : el("pre", { dir: "auto" }, row.response)]),
      row.ground_truth ? el("h4", {}, "Ground truth") : null,
      row.ground_truth ? el("pre", { dir: "auto" }, row.ground_truth) : null,
      el("p", { class: "facts" }, texts.join(" · ")),
    ].filter((part) => part !== null);
  }
}

/** Colour a token by the sign and the size of its value. */
function paint(node, value, largest) {
  if (value === null || value === undefined) return;
  const share = Math.min(1, Math.abs(value) / largest);
  node.style.backgroundColor = `color-mix(in srgb, var(${value < 0 ? "--less" : "--more"}) ${Math.round(60 * share)}%, transparent)`;
}

function colorScale(coloring) {
  const [label, , largest, low, high] = COLORINGS[coloring];
  if (coloring === "none") return [];
  const hasSigns = coloring !== "logprob";
  const shown = (hasSigns ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1]).map((share) => {
    const mark = el("span", { class: "token" }, number(hasSigns ? share * largest : -share * largest));
    paint(mark, share * largest, largest);
    return mark;
  });
  return [el("span", {}, `Token colours: ${label}${coloring === "advantage" ? "" : ", nats"}`), el("span", {}, low, ...shown, high)];
}

/** Make a mark per token, and what reads out their values: a line, and the handlers of the box around the marks. */
function tokenMarks(row, coloring) {
  const [, valuesOf, largest] = COLORINGS[coloring], values = valuesOf(row);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const version = (place) => row.spans.findLast(([, start]) => start <= place)?.[0];
  const isContext = (place) => Boolean(row.episode) && turnAt(row, place) < 0;
  const marks = (row.tokens ?? []).map((text, place) => {
    const mark = el("span", { class: "token" }, text.replaceAll("\n", "↵\n"));
    if (!(version(place) < 0)) paint(mark, values?.[place], largest);
    return mark;
  });
  let at = -1;
  const select = (place) => {
    marks[at]?.classList.remove("selected");
    at = place;
    marks[at]?.classList.add("selected");
    const ratio = row.ratios ? `, log-ratio ${number(row.ratios[at])}` : "";
    const values = at < 0 ? "" : isContext(at) ? "context, not sampled" : version(at) < 0 ? "sampled, too old to be trained" : `logprob ${number(row.logprobs[at])}${ratio}, version ${version(at)}`;
    readout.textContent = at < 0 ? "" : `token ${at + 1} ${JSON.stringify(visible(row.tokens[at]))}: ${values}`;
  };
  const handlers = {
    onpointerover: (event) => { const place = marks.indexOf(event.target); if (place >= 0) select(place); },
    onkeydown: (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (to === undefined || marks.length === 0) return;
      event.preventDefault();
      select(Math.min(marks.length - 1, Math.max(0, to)));
    },
  };
  return { marks, readout, handlers };
}

/** Show the response token by token; pointer and arrow keys read out a token's values. */
function tokens(row, coloring) {
  const { marks, readout, handlers } = tokenMarks(row, coloring);
  const starts = new Map(row.spans.map(([version, start]) => [start, version]));
  const box = el("pre", { class: "tokens", tabindex: "0", dir: "auto", "aria-label": "Response, token by token; arrow keys read out a token's values", ...handlers });
  marks.forEach((mark, place) => {
    if (starts.has(place) && (place > 0 || row.spans.length > 1)) box.append(el("sup", {}, `v${starts.get(place)}`));
    box.append(mark);
  });
  if (row.num_tokens > marks.length) box.append(`… (${(row.num_tokens - marks.length).toLocaleString("en")} more tokens)`);
  return el("div", {}, box, readout);
}
