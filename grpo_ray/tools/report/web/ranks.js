"use strict";
// The Learner's ranks in a table per run: time in collectives, memory, and the share of steps in which one was the slowest.

const RANK_COLUMNS = [
  ["Rank", (rank) => rank.name],
  ["In collectives per step", (rank) => `${number(rank.collectives_s)} s`],
  ["Of the step", (rank) => percent(rank.collectives_frac)],
  ["Steps as the slowest", (rank) => percent(rank.slowest_frac)],
  ["Process memory", (rank) => gibibytes(rank.process_bytes)],
  ["GPU memory, peak", (rank) => gibibytes(rank.device_bytes)],
];

function percent(share) {
  return share === null ? "–" : `${number(100 * share)}%`;
}

function gibibytes(bytes) {
  return bytes === null ? "–" : `${number(bytes / 2 ** 30)} GiB`;
}

/** Make the table of a run with several ranks, without columns that have no value. */
function rankTable(run) {
  const columns = RANK_COLUMNS.filter(([, text]) => run.ranks.some((rank) => text(rank) !== "–"));
  const head = columns.map(([title]) => el("th", { scope: "col" }, title));
  const cells = (rank) => columns.map(([, text], place) => place === 0 ? el("th", { scope: "row" }, text(rank)) : el("td", {}, text(rank)));
  const table = el("table", { class: "ranks" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...run.ranks.map((rank) => el("tr", {}, ...cells(rank)))));
  const label = DATA.runs.length > 1 ? `Ranks of ${run.name}` : "Ranks";
  return el("div", {}, DATA.runs.length > 1 ? el("h3", {}, run.name) : null,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table));
}

function rankTables() {
  const note = "A rank's time in collectives is spent moving data and waiting for other ranks: the slowest rank has the least. The largest memory of all steps is given.";
  return [el("p", { class: "note" }, note), ...DATA.runs.filter((run) => run.ranks.length > 0).map(rankTable)];
}
