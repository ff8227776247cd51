// One message of the conversation.

import { inWords } from "./answer.js";
import { button, copyButton, folded, isSendKey, make } from "./dom.js";
import { RichText } from "./rich.js";
import { nodesOf } from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };

// `actions` are called with the view: regenerate(view), edit(view, text).
export class MessageView {
  undrawn = [];
  isRaw = false;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const { role, side } = message;
    this.element = make("li", side ? `${role} side-${side}` : role);
    this.text = make("div", "text");
    this.foot = make("div", "foot");
    this.note = make("span", "note");
    this.element.append(make("h2", "unseen", NAMES[role]));
    if (message.asked?.side) this.element.append(make("p", "label", message.asked.label));
    this.body = this.text;
    if (role === "tool") this.body = folded("call", `Result of ${message.call.name}`, this.text);
    if (role === "assistant") this.makeAnswer();
    this.element.append(this.body);
    if (this.calls) this.element.append(this.calls);
    this.element.append(this.foot);
    this.makeFoot();
    this.fill();
  }

  get isAnswer() {
    return this.message.role === "assistant";
  }

  get isEmpty() {
    const { content, reasoning, calls } = this.message;
    return !content && !reasoning && !calls?.length;
  }

  makeAnswer() {
    this.thoughtsText = make("div", "text");
    this.thoughts = folded("thoughts", "Thoughts", this.thoughtsText);
    this.thoughts.hidden = true;
    this.calls = make("div", "calls");
    this.element.append(this.thoughts);
  }

  makeFoot() {
    const { isAnswer } = this;
    this.foot.append(this.note);
    const label = `Copy ${isAnswer ? "the answer" : "the message"}`;
    this.foot.append(copyButton(label, () => this.message.content));
    this.againButton = button("Again", "Again: generate another answer", () => this.actions.regenerate(this));
    this.rawButton = button("Raw", "Raw text of the answer", () => this.showRaw(!this.isRaw));
    this.editButton = button("Edit", "Edit the message and send it again", () => this.edit());
    if (isAnswer) this.foot.append(this.rawButton);
    if (this.message.role === "user") this.foot.append(this.editButton);
    this.foot.append(this.againButton);
  }

  // Draws the message so far; a new answer is empty.
  fill() {
    const { reasoning, thoughts, content } = this.message;
    if (this.isAnswer) this.showRaw(false);
    else this.text.textContent = content;
    if (reasoning) {
      this.thoughts.hidden = false;
      this.thoughtsText.append(...(thoughts?.length ? thoughts.flatMap((one) => nodesOf(one)) : [reasoning]));
    }
    const isArriving = this.isAnswer && !this.message.reason;
    this.element.classList.toggle("arriving", isArriving);
    this.element.setAttribute("aria-busy", String(isArriving));
    this.foot.hidden = isArriving;
    if (!isArriving) this.finish();
  }

  // Shows the answer's Markdown as elements, or as it came.
  showRaw(isRaw) {
    this.isRaw = isRaw;
    this.rawButton.setAttribute("aria-pressed", String(isRaw));
    this.text.classList.toggle("raw", isRaw);
    this.text.replaceChildren();
    const { content, pieces = [] } = this.message;
    if (isRaw) this.text.append(...(pieces.length ? pieces.flatMap((one) => nodesOf(one)) : [content]));
    else this.rich = new RichText(this.text, pieces);
    if (!isRaw) this.rich.draw(content);
    if (this.message.reason) this.makeReachable(this.text);
  }

  // Adds pieces; returns the number of parts waiting to be drawn.
  append(kind, pieces) {
    const isContent = kind === "content";
    const text = pieces.map((piece) => piece.text).join("");
    this.message[isContent ? "content" : "reasoning"] += text;
    this.message[isContent ? "pieces" : "thoughts"].push(...pieces);
    return this.undrawn.push([isContent, pieces]);
  }

  draw() {
    const parts = this.undrawn.splice(0);
    if (!parts.length) return;
    const { message } = this;
    const thoughts = parts.filter(([isContent]) => !isContent).flatMap(([, pieces]) => pieces);
    this.thoughtsText.append(...thoughts.flatMap((one) => nodesOf(one)));
    if (thoughts.length) this.thoughts.hidden = false;
    if (thoughts.length || message.content) this.thoughts.open = !message.content;
    if (parts.some(([isContent]) => isContent)) this.rich.draw(message.content);
    this.drawCalls();
  }

  drawCalls() {
    const known = this.message.calls ?? [];
    this.calls.replaceChildren(...known.map(({ name, arguments: given }) => (
      folded("call", `Call of ${name}`, make("pre", "", pretty(given)))
    )));
  }

  finish() {
    this.element.classList.remove("arriving");
    this.element.setAttribute("aria-busy", "false");
    this.foot.hidden = false;
    this.note.textContent = this.isAnswer ? inWords(this.message) : "";
    if (this.isAnswer) this.drawCalls();
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

  allow({ regenerate, edit }) {
    this.againButton.hidden = !regenerate;
    this.editButton.hidden = !edit;
  }

  // Replaces the text by a box to edit it; Escape leaves it as it was.
  edit(text = this.message.content) {
    const form = make("form", "edit");
    const area = make("textarea");
    area.value = text;
    area.rows = Math.min(12, area.value.split("\n").length + 1);
    area.setAttribute("aria-label", "Edited message");
    const send = make("button", "main small", "Send");
    const close = () => {
      form.replaceWith(this.text);
      this.foot.hidden = false;
    };
    const cancel = button("Cancel", "Cancel the edit", () => {
      close();
      this.editButton.focus();
    });
    form.append(area, make("p", "hint", "The messages after it are replaced."), cancel, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() && this.actions.edit(this, area.value.trim())) close();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel.click();
      else if (isSendKey(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.text.replaceWith(form);
    this.foot.hidden = true;
    area.focus();
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete, or not JSON
  }
}
