"use strict";
// An episode in the table of rollouts: its turns one below the other, with what came between them and its branches.

const [OPEN, CLOSE] = ["<tool_call>", "</tool_call>"];

/** Return the turn that sampled an episode's token, -1 for context. */
function turnAt(row, place) {
  return row.episode.turns.findLast(([, start]) => start <= place)[0];
}

/** Return the advantage of each token shown, null for context; null for other responses. */
function advantages(row) {
  if (!row.episode || !row.tokens) return null;
  const own = row.episode.turn_advantages;
  return row.tokens.map((_, place) => {
    const turn = turnAt(row, place);
    return turn < 0 ? null : own ? own[turn] ?? null : row.advantage;
  });
}

function turnsOf({ num_turns: turns, num_branches: branches }) {
  return number(turns) + (branches ? ` (${branches} ${branches === 1 ? "branch" : "branches"})` : "");
}

/** Return the trimmed texts between the tags of a turn's text, in linear time: a policy may write anything. */
function callTexts(text) {
  const found = [];
  for (let end = 0; ;) {
    const start = text.indexOf(OPEN, end);
    end = start < 0 ? -1 : text.indexOf(CLOSE, start + OPEN.length);
    if (end < 0) return found;
    found.push(text.slice(start + OPEN.length, end).trim());
  }
}

/** Return the tool calls in a turn's text: `name(arguments)`, or the text of one that is no JSON. */
function calls(text) {
  return callTexts(text).map((call) => {
    try {
      const { name, arguments: given } = JSON.parse(call);
      return `${name}(${Object.entries(given ?? {}).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join(", ")})`;
    } catch { return call; }
  });
}

function facts(entries) {
  const shown = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "episode-facts" }, ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

/** Show an episode: facts, an index of its turns, and each sequence with its tokens. */
function episode(row, coloring) {
  const { episode: own } = row, { marks, readout, handlers } = tokenMarks(row, coloring);
  const summary = facts({ ended: own.status.replaceAll("_", " "), reward: number(own.reward), turns: own.num_turns,
    branches: own.num_branches, "context tokens": number(own.num_context_tokens), seconds: number(own.seconds),
    ...Object.fromEntries(Object.entries(own.metrics).map(([name, value]) => [name, number(value)])) });
  const error = own.error ? el("pre", { class: "notice", dir: "auto" }, own.error) : null;
  if (!row.tokens) return [summary, error, el("pre", { dir: "auto" }, row.response)].filter((part) => part !== null);
  const box = el("div", { class: "episode", tabindex: "0", role: "group", "aria-label": "Episode, token by token; arrow keys read out a token's values", ...handlers },
    ...own.sequences.map((sequence, place) => sequenceBox(row, sequence, place, marks)));
  if (own.sequences.length === 0) box.append(el("p", { class: "empty" }, "nothing was sampled"));
  if (own.num_tokens > marks.length) box.append(el("p", { class: "note" }, `… ${(own.num_tokens - marks.length).toLocaleString("en")} more tokens are not on this page`));
  return [summary, error, box, readout].filter((part) => part !== null);
}

/** Say where a sequence comes from. */
function sequenceTitle(sequence, place) {
  if (place === 0) return "Conversation";
  const { parent, turn, num_shared: shared } = sequence;
  if (parent === null) return `Branch ${place}: another conversation`;
  const from = parent === 0 ? "the conversation" : `branch ${parent}`, tokens = `${shared.toLocaleString("en")} tokens shared`;
  return turn === null ? `Branch ${place}: shares no turn with ${from} (${tokens})` : `Branch ${place}: leaves ${from} after turn ${turn} (${tokens})`;
}

function sequenceBox(row, sequence, place, marks) {
  const { start, end } = sequence, { turns } = row.episode;
  const spans = turns.map(([turn, from], at) => [turn, from, turns[at + 1]?.[1] ?? row.episode.num_tokens])
    .filter(([, from]) => from >= start && from < end && from < marks.length);
  const prompt = el("pre", { class: "context", dir: "auto" }, sequence.prompt.replaceAll("\n", "↵\n"));
  const label = `Prompt${sequence.turn === null ? "" : ` after turn ${sequence.turn}`}, ${sequence.num_prompt_tokens.toLocaleString("en")} tokens`;
  const isOpen = sequence.prompt.length <= 600;
  return el("div", { class: place ? "sequence branch" : "sequence" }, el("h5", {}, sequenceTitle(sequence, place)),
    sequence.prompt ? el("details", { open: isOpen }, el("summary", {}, label), prompt) : null,
    ...spans.map(([turn, from, to]) => turnBox(row, turn, from, to, marks)));
}

function turnBox(row, turn, from, to, marks) {
  const { turn_rewards: rewards, turn_advantages: compared } = row.episode;
  const own = marks.slice(from, to);
  const box = el("pre", { class: turn < 0 ? "tokens context" : "tokens", dir: "auto" });
  const starts = new Map(row.spans.map(([version, start]) => [start, version]));
  own.forEach((mark, at) => {
    const version = starts.get(from + at);
    if (version !== undefined && version >= 0 && (at > 0 || turn >= 0)) box.append(el("sup", {}, `v${version}`));
    box.append(mark);
  });
  if (turn < 0) return el("div", { class: "turn" }, el("span", { class: "turn-name" }, "context"), box);
  const called = calls(row.tokens.slice(from, to).join(""));
  const notes = [rewards ? `reward ${number(rewards[turn])}` : null, compared ? `advantage ${number(compared[turn])}` : null,
    ...called.map((call) => `calls ${call}`)].filter(Boolean);
  return el("div", { class: "turn" }, el("span", { class: "turn-name" }, el("strong", {}, `turn ${turn}`),
    ...notes.map((note) => el("span", {}, note))), box);
}
