// The box in which a message is written.

import { $, isSendKey } from "./dom.js";

export function setPrompt(text) {
  $("prompt").value = text;
  grow();
}

function grow() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

// Calls `send(text)` on Enter and on Send, or `stop()` on Send while `isBusy()` holds.
export function startComposer({ send, stop, isBusy }) {
  let sentAt = 0;
  const submit = () => {
    sentAt = performance.now();
    send($("prompt").value);
  };
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!isBusy()) submit();
    else if (performance.now() - sentAt > 300) stop(); // ignores the second click of a double click
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    if (!isBusy()) submit();
  });
  $("prompt").addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      $("prompt").focus();
      send(example.textContent);
    });
  }
}
