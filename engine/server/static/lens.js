// Logit lens: what each layer would have said in the place of a token, as a table of layers.

import { request } from "./api.js";
import { $, make } from "./dom.js";
import { percent, probabilityRow, visible } from "./tokens.js";
import { historyOf, sideOf } from "./transcript.js";

const MAX_TOP = 5;
let limits = null;
let asking = null; // AbortController

// Asks whether the model has a lens; resolves to whether it has.
export async function loadLimits() {
  try {
    limits = await (await request("v1/engine/lens")).json();
  } catch {
    limits = null; // an older server, or one without the page's endpoints
  }
  return Boolean(limits?.num_layers);
}

// Shows the lens of a token of an answer; `before` are the messages before the answer.
export async function openLens({ message, before }, token) {
  const dialog = $("lens");
  const at = Math.max(...token.piece.tokens.map((one) => one.at).filter(Number.isInteger));
  $("lens-title").textContent = `What each layer would have said for “${visible(token.piece.text)}”`;
  $("lens-words").textContent = `Asking ${limits.num_layers} layers …`;
  $("lens-grid").replaceChildren();
  $("lens-top").replaceChildren();
  $("lens-scale").hidden = true;
  asking?.abort();
  asking = new AbortController();
  dialog.onclose = () => {
    asking.abort();
    token.focus({ preventScroll: true });
  };
  if (!dialog.open) dialog.showModal();
  const columns = Math.min(at + 1, limits.max_lens_tokens, innerWidth < 700 ? 4 : 8);
  const { model, system, tools } = message.asked;
  const body = {
    model, tools, messages: historyOf(before, sideOf(message), system),
    token_ids: message.ids.slice(0, at + 1), num_tokens: columns, top: MAX_TOP,
  };
  try {
    const found = await (await request("v1/engine/lens", { body, signal: asking.signal })).json();
    draw(found.tokens);
  } catch (error) {
    if (error.name !== "AbortError") $("lens-words").textContent = error.message;
  }
}

function draw(tokens) {
  const last = tokens.length - 1;
  const numLayers = tokens[last].layers.length;
  $("lens-words").textContent = summary(tokens[last]);
  $("lens-scale").hidden = false;
  const head = make("tr");
  head.setAttribute("role", "row");
  head.append(headCell("Layer", "col"), ...tokens.map(({ token }) => headCell(visible(token), "col")));
  const rows = Array.from({ length: numLayers }, (_, index) => numLayers - 1 - index).map((layer) => {
    const row = make("tr");
    row.setAttribute("role", "row");
    row.append(headCell(String(layer + 1), "row"), ...tokens.map((token) => cell(token, layer)));
    return row;
  });
  $("lens-grid").replaceChildren(head, ...rows);
  choose(rows[0].lastChild, false);
}

function headCell(text, scope) {
  const made = make("th", "", text);
  made.scope = scope;
  made.setAttribute("role", scope === "col" ? "columnheader" : "rowheader");
  return made;
}

// A cell shows the layer's first choice; its color is the probability of that.
function cell(token, layer) {
  const { rank, top } = token.layers[layer];
  const made = make("td", rank === 1 ? "said" : "", visible(top[0].token));
  made.setAttribute("role", "gridcell");
  made.style.setProperty("--p", `${Math.round(70 * top[0].probability)}%`);
  made.tabIndex = -1;
  made.shown = { token, layer };
  return made;
}

// Shows the likeliest tokens of a cell beside the table.
function choose(cellElement, takesFocus = true) {
  const { token, layer } = cellElement.shown;
  const { rank, probability, top } = token.layers[layer];
  for (const other of $("lens-grid").querySelectorAll("td[tabindex='0']")) other.tabIndex = -1;
  cellElement.tabIndex = 0;
  if (takesFocus) cellElement.focus();
  const list = make("ol", "probabilities");
  list.append(...top.map((one) => probabilityRow(one.token, one.probability, one.token_id === token.token_id)));
  const place = rank === 1 ? "its first choice" : `number ${rank.toLocaleString("en")}, ${percent(probability)}`;
  $("lens-top").replaceChildren(
    make("h3", "", `Layer ${layer + 1}`),
    make("p", "note", `“${visible(token.token)}” was said; here it is ${place}.`),
    list,
  );
}

// Tells from which layer on the token is the first choice.
function summary({ token, layers }) {
  const said = `“${visible(token)}”`;
  const best = layers.findIndex(({ rank }) => rank === 1);
  const settled = layers.findLastIndex(({ rank }) => rank !== 1) + 1;
  const count = layers.length;
  if (settled === count - 1) return `${said} becomes the first choice in layer ${count}, the last one.`;
  if (settled < count) return `${said} is the first choice from layer ${settled + 1} of ${count} on.`;
  const { rank, probability } = layers[count - 1];
  const chance = `The last layer has it as number ${rank}, with ${percent(probability)}: it was drawn.`;
  return best < 0 ? `${said} is no layer's first choice. ${chance}` : `${said} is the first choice of layer ${best + 1}, `
    + `but not of the last one. ${chance}`;
}

function walk(event) {
  const from = event.target.closest("td");
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = moves[event.key];
  if (!from || !move) return;
  event.preventDefault();
  const rows = [...$("lens-grid").rows];
  const row = rows[rows.indexOf(from.parentElement) + move[0]];
  const to = row?.cells[from.cellIndex + move[1]];
  if (to?.shown) choose(to);
}

export function startLens() {
  const grid = $("lens-grid");
  grid.addEventListener("keydown", walk);
  grid.addEventListener("pointermove", (event) => {
    const over = event.target.closest("td");
    if (over && over.tabIndex !== 0) choose(over, false);
  });
  grid.addEventListener("focusin", (event) => event.target.shown && choose(event.target, false));
  $("lens-close").addEventListener("click", () => $("lens").close());
}
