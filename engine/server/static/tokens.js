// Answer text by token, with the alternatives to each token.
//
// A piece is {text, tokens}; a token is {text, p, others: [[text, p], ...]}. Most pieces hold one
// token; tokens that only together form a character share a piece.

const MAX_OTHERS = 6;

export function tokensOf(logprobs) {
  return (logprobs?.content ?? []).map((entry) => {
    const others = (entry.top_logprobs ?? []).map((top) => [top.token, Math.exp(top.logprob)]);
    const p = Math.exp(entry.logprob);
    if (!others.some(([text]) => text === entry.token)) others.push([entry.token, p]);
    return { text: entry.token, p, others: others.slice(0, MAX_OTHERS) };
  });
}

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

// Returns a piece's nodes: the space before the word, and the word, which shows its alternatives.
export function nodesOf(piece) {
  if (!piece.tokens.length) return [piece.text];
  const word = piece.text.trimStart() ? piece.text.trimStart() : piece.text;
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = word;
  span.tabIndex = -1;
  span.dataset.doubt = doubtOf(piece);
  span.piece = piece;
  return [piece.text.slice(0, piece.text.length - word.length), span];
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

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(nothing)";
}

export function percent(p) {
  if (p > 0.9995) return "100 %";
  return p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function rowOf([text, p], chosen) {
  const row = element("li", chosen ? "chosen" : "");
  const bar = element("i");
  bar.style.width = `${Math.max(1, 100 * p)}%`;
  const label = element("span", "", visible(text));
  if (chosen) label.append(element("span", "unseen", ", chosen"));
  row.append(bar, label, element("b", "", percent(p)));
  return row;
}

export function showAlternatives(span) {
  if (!span.piece || span === current) return;
  hideAlternatives();
  current = span;
  box.replaceChildren(...span.piece.tokens.map((token) => {
    const list = element("ol");
    list.append(...token.others.map((other) => rowOf(other, other[0] === token.text)));
    return list;
  }));
  box.hidden = false;
  span.classList.add("pointed");
  span.setAttribute("aria-describedby", box.id);
  place(span.getClientRects()[0] ?? span.getBoundingClientRect());
}

// Places the box below the word, or above it if there is no space, inside the window.
function place(word) {
  const { width, height } = box.getBoundingClientRect();
  const page = document.documentElement;
  const left = Math.min(Math.max(8, word.left - 12), page.clientWidth - width - 8);
  const below = word.bottom + 8;
  const top = below + height < page.clientHeight ? below : word.top - height - 8;
  box.style.left = `${left}px`;
  box.style.top = `${Math.max(8, top)}px`;
}

export function hideAlternatives() {
  current?.classList.remove("pointed");
  current?.removeAttribute("aria-describedby");
  current = null;
  box.hidden = true;
}

// One listener for all answers handles pointer, touch, and arrow keys between words.
export function followTokens(list, scroller) {
  const tokenAt = (event) => event.target.closest?.(".token");
  list.addEventListener("pointerover", (event) => {
    const token = tokenAt(event);
    if (token) showAlternatives(token);
    else if (!list.contains(document.activeElement)) hideAlternatives();
  });
  list.addEventListener("pointerleave", () => hideAlternatives());
  list.addEventListener("focusin", (event) => {
    const token = tokenAt(event);
    if (token) showAlternatives(token);
  });
  list.addEventListener("focusout", hideAlternatives);
  list.addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    if (token) walk(token, event);
  });
  scroller.addEventListener("scroll", hideAlternatives, { passive: true });
}

function walk(token, event) {
  const all = [...token.parentElement.querySelectorAll(".token")];
  const at = all.indexOf(token);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Escape") hideAlternatives();
  if (to === undefined || !all[to]) return;
  event.preventDefault();
  token.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
}
