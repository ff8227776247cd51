// One message of the conversation. Model and user text is inserted as text, never as HTML.

import { inWords } from "./answer.js";
import { nodesOf } from "./tokens.js";

function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, label, onClick) {
  const made = make("button", "quiet small", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

export class MessageView {
  undrawn = [];

  constructor(message, { regenerate }) {
    this.message = message;
    this.element = make("li", message.role);
    this.text = make("div", "text");
    this.foot = make("div", "foot");
    this.note = make("span", "note");
    const isAnswer = message.role === "assistant";
    this.element.append(make("span", "unseen", isAnswer ? "Answer" : "You"));
    this.copyButton = button("Copy", `Copy ${isAnswer ? "the answer" : "the message"}`, () => this.copy());
    this.againButton = button("Again", "Generate another answer", () => regenerate(this));
    if (isAnswer) this.makeThoughts();
    this.element.append(this.text, this.foot);
    this.foot.append(this.note, this.copyButton, this.againButton);
    this.fill();
  }

  makeThoughts() {
    this.thoughts = make("details", "thoughts");
    this.thoughtsText = make("div", "text");
    this.thoughts.append(make("summary", "", "Thoughts"), this.thoughtsText);
    this.thoughts.hidden = true;
    this.element.append(this.thoughts);
  }

  // Draws the message so far; a new answer is empty.
  fill() {
    const { content, pieces, reasoning, thoughts } = this.message;
    if (pieces?.length) this.text.append(...pieces.flatMap(nodesOf));
    else this.text.textContent = content;
    if (reasoning) {
      this.thoughts.hidden = false;
      if (thoughts?.length) this.thoughtsText.append(...thoughts.flatMap(nodesOf));
      else this.thoughtsText.textContent = reasoning;
    }
    const isArriving = this.message.role === "assistant" && !this.message.reason;
    this.element.classList.toggle("arriving", isArriving);
    this.element.setAttribute("aria-busy", String(isArriving));
    this.foot.hidden = isArriving;
    if (!isArriving) this.finish();
  }

  get isEmpty() {
    return !this.message.content && !this.message.reasoning;
  }

  // Adds pieces; returns the number of pieces waiting to be drawn.
  append(kind, pieces) {
    const isContent = kind === "content";
    const text = pieces.map((piece) => piece.text).join("");
    this.message[isContent ? "content" : "reasoning"] += text;
    this.message[isContent ? "pieces" : "thoughts"].push(...pieces);
    return this.undrawn.push([isContent, pieces]);
  }

  draw() {
    for (const [isContent, pieces] of this.undrawn.splice(0)) {
      const target = isContent ? this.text : this.thoughtsText;
      target.append(...pieces.flatMap(nodesOf));
      if (!isContent) this.thoughts.hidden = false;
      this.thoughts.open = !isContent && !this.message.content;
    }
  }

  finish() {
    this.element.classList.remove("arriving");
    this.element.setAttribute("aria-busy", "false");
    this.foot.hidden = false;
    this.note.textContent = this.message.role === "assistant" ? inWords(this.message) : "";
    for (const text of [this.text, this.thoughtsText]) this.makeReachable(text);
  }

  // Makes all words of a text a single Tab stop.
  makeReachable(text) {
    const first = text?.querySelector(".token");
    if (!first) return;
    first.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Tokens; the arrow keys move from one to the next");
  }

  allowRegenerate(isAllowed) {
    this.againButton.hidden = !isAllowed;
  }

  async copy() {
    const done = await copyText(this.message.content);
    this.copyButton.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => {
      this.copyButton.textContent = "Copy";
    }, 1500);
  }
}

// Browsers allow clipboard access only on pages from localhost or over TLS.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    const before = document.activeElement;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}
