// The message that something failed, with a button to try again; and the voice for screen readers.

import { $ } from "./dom.js";

let again = null;

export function showProblem(text, retry = null) {
  $("problem-text").textContent = text;
  $("problem").hidden = !text;
  offerRetry(text ? retry : null);
}

export function offerRetry(retry) {
  $("retry").hidden = !retry;
  again = retry;
}

export function startProblem() {
  $("retry").addEventListener("click", () => {
    $("prompt").focus();
    again?.();
  });
}

// Announces the answer to screen readers sentence by sentence, not token by token.
export class Announcer {
  heard = "";

  feed(text) {
    this.heard += text;
    const end = this.heard.search(/[.!?:\n]\s(?!.*[.!?:\n]\s)/s);
    if (end >= 0) this.say(this.heard.slice(0, end + 1), this.heard.slice(end + 1));
  }

  say(text, rest = "") {
    this.heard = rest;
    if (!text.trim()) return;
    const line = document.createElement("p");
    line.textContent = text;
    $("announcer").append(line);
    while ($("announcer").childElementCount > 20) $("announcer").firstChild.remove();
  }
}
