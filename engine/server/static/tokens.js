// Answer text by token, with the alternatives to each token.
//
// A piece is {text, tokens}; a token is {text, p, others: [[text, p], ...], at}, where `at` is its
// place among the answer's tokens. Most pieces hold one token; tokens that only together form a
// character share a piece.

import { make } from "./dom.js";

const MAX_OTHERS = 6;
const DIGITS = 1e5; // probabilities are kept to five places

export function tokensOf(logprobs, first) {
  return (logprobs?.content ?? []).map((entry, index) => {
    const others = (entry.top_logprobs ?? []).map((top) => [top.token, share(top.logprob)]);
    const p = share(entry.logprob);
    if (!others.some(([text]) => text === entry.token)) others.push([entry.token, p]);
    return { text: entry.token, p, others: others.slice(0, MAX_OTHERS), at: first + index };
  });
}

const share = (logprob) => Math.round(Math.exp(logprob) * DIGITS) / DIGITS;

// Pairs text with tokens as they arrive; text may arrive later than its token.
export class TokenPairing {
  waiting = [];

  feed(text, tokens) {
    const pieces = [];
    this.waiting.push(...tokens);
    while (text && this.waiting.length) {
      const next = this.waiting[0].text;
      if (!next || !text.startsWith(next)) break;
      pieces.push({ text: next, tokens: [this.waiting.shift()] });
      text = text.slice(next.length);
    }
    if (text) pieces.push({ text, tokens: this.waiting.splice(0) });
    return pieces;
  }
}

// Returns the nodes of a piece's text, or a part of it: the space before the word, and the word,
// which shows its alternatives.
export function nodesOf(piece, text = piece.text) {
  if (!piece.tokens.length || !text) return [text];
  const word = text.trimStart() ? text.trimStart() : text;
  const span = make("span", "token", word);
  span.tabIndex = -1;
  span.dataset.doubt = doubtOf(piece);
  span.piece = piece;
  return [text.slice(0, text.length - word.length), span];
}

function doubtOf({ tokens }) {
  const p = Math.min(...tokens.map((token) => token.p));
  if (p > 0.8) return "0";
  if (p > 0.5) return "1";
  return p > 0.25 ? "2" : "3";
}

// ---- the box of alternatives

const box = document.getElementById("alternatives");
let current = null;

// Replaces characters that show nothing: "·" is a space, "U+00A0" one that does not break.
export function visible(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return shown.replace(/[\p{C}\p{Z}]/gu, (one) => codeOf(one)) || "(nothing)";
}

const codeOf = (one) => `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

export function percent(p) {
  if (p > 0.9995) return "100 %";
  return p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
}

// Returns a row: a token, a bar as long as its probability, and the probability.
export function probabilityRow(text, p, isChosen) {
  const row = make("li", isChosen ? "chosen" : "");
  const label = make("span", "word", visible(text));
  if (isChosen) label.append(make("span", "unseen", ", chosen"));
  const bar = make("span", "bar-track");
  const fill = make("i");
  fill.style.width = `${Math.max(1, 100 * p)}%`;
  bar.append(fill);
  row.append(label, bar, make("b", "", percent(p)));
  return row;
}

function showAlternatives(span) {
  if (!span.piece || span === current) return;
  hideAlternatives();
  current = span;
  const { tokens } = span.piece;
  const lists = tokens.map((token) => {
    const list = make("ol");
    list.append(...token.others.map(([text, p]) => probabilityRow(text, p, text === token.text)));
    return list;
  });
  if (opensLens(span)) lists.push(make("p", "hint", hintOfLens()));
  box.replaceChildren(...lists);
  box.hidden = false;
  span.classList.add("pointed");
  span.setAttribute("aria-describedby", box.id);
  place(span.getClientRects());
}

// Places the box below the word, or above it if there is no space, inside the window.
function place(lines) {
  const { width, height } = box.getBoundingClientRect();
  const page = document.documentElement;
  const [first, last] = [lines[0], lines[lines.length - 1]];
  const left = Math.min(Math.max(8, last.left - 12), page.clientWidth - width - 8);
  const below = last.bottom + 8;
  const top = below + height < page.clientHeight ? below : first.top - height - 8;
  box.style.left = `${left}px`;
  box.style.top = `${Math.max(8, top)}px`;
}

export function hideAlternatives() {
  current?.classList.remove("pointed");
  current?.removeAttribute("aria-describedby");
  current = null;
  box.hidden = true;
}

// ---- the lens of a token, opened by a click, a second tap, or Enter

let openLens = null;

// `open(span)` shows the lens of a token; null: the model has none.
export function onLens(open) {
  openLens = open;
}

const opensLens = (span) => openLens !== null && span.piece.tokens.some((token) => Number.isInteger(token.at));
const hintOfLens = () =>
  `${matchMedia("(pointer: coarse)").matches ? "Tap again" : "Click"}: what each layer would have said`;

// One listener for all answers handles pointer, touch, and arrow keys between words.
export function followTokens(list, scroller) {
  const tokenAt = (event) => event.target.closest?.(".token");
  let shownBefore = null; // when the pointer went down: a first tap only shows the alternatives
  list.addEventListener("pointerdown", () => {
    shownBefore = current;
  }, { capture: true });
  list.addEventListener("pointerover", (event) => {
    const token = tokenAt(event);
    if (token && event.pointerType !== "touch") showAlternatives(token);
    else if (!list.contains(document.activeElement)) hideAlternatives();
  });
  list.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hideAlternatives();
  });
  list.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (!token || token.closest("a")) return;
    const isFirstTap = event.pointerType === "touch" && shownBefore !== token;
    if (isFirstTap) showAlternatives(token);
    else if (opensLens(token) && getSelection().isCollapsed) openLens(token);
  });
  list.addEventListener("focusin", (event) => {
    const token = tokenAt(event);
    if (token) showAlternatives(token);
  });
  list.addEventListener("focusout", hideAlternatives);
  list.addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    if (token) walk(token, event);
  });
  // The focus scrolls to its word, whose box then moves along.
  scroller.addEventListener("scroll", () => {
    if (current && current === document.activeElement) place(current.getClientRects());
    else hideAlternatives();
  }, { passive: true });
}

function walk(token, event) {
  const all = [...token.closest(".text").querySelectorAll(".token")];
  const at = all.indexOf(token);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Escape") hideAlternatives();
  if (event.key === "Enter" && opensLens(token)) {
    event.preventDefault(); // would press the button that the lens focuses
    openLens(token);
  }
  if (to === undefined || !all[to]) return;
  event.preventDefault();
  token.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
}
