// Conversation: its messages, and the requests that extend it.

import { inWords, streamAnswer } from "./answer.js";
import { MessageView } from "./message.js";
import { fields, isShaded, startSettings, systemPrompt } from "./settings.js";
import { followTokens, hideAlternatives } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const SAVED = "engine.conversation";

// A message: {role, content, reasoning?, pieces?, reason?, stats?}
let messages = [];
let views = [];
let running = null; // AbortController of the current answer
let startedAt = 0;
let chosenModel = async () => "";

export function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// ---- storage, kept until the tab is closed

function save() {
  const ended = (message) => (isArriving(message) ? { ...message, reason: "stopped" } : message);
  const whole = messages.map(ended);
  const words = whole.map(({ pieces, thoughts, ...rest }) => rest);
  for (const kept of [whole, words, []]) {
    try {
      sessionStorage.setItem(SAVED, JSON.stringify(kept));
      return;
    } catch {
      // over the quota with token alternatives; the plain text may fit
    }
  }
}

const isArriving = (message) => message.role === "assistant" && !message.reason;

function restore() {
  for (const message of JSON.parse(sessionStorage.getItem(SAVED) ?? "[]")) add(message);
  refresh();
}

// ---- display

function add(message) {
  const view = new MessageView(message, { regenerate });
  messages.push(message);
  views.push(view);
  $("messages").append(view.element);
  return view;
}

function refresh() {
  $("welcome").hidden = messages.length > 0;
  $("new-chat").disabled = messages.length === 0;
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running !== null);
  $("messages").classList.toggle("shaded", isShaded());
  views.forEach((view, at) => view.allowRegenerate(!running && at === views.length - 1));
}

const isAtEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = $("scroller");
  return scrollHeight - scrollTop - clientHeight < 60;
};

function toEnd() {
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

// Announces the answer to screen readers sentence by sentence, not token by token.
class Announcer {
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

// ---- requests

function history() {
  const system = systemPrompt();
  const said = messages.filter((message) => message.content);
  const lines = said.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...lines] : lines;
}

async function answer(parameters) {
  const asked = { messages: history(), ...parameters };
  const message = { role: "assistant", content: "", reasoning: "", pieces: [], thoughts: [] };
  const view = add(message);
  const announcer = new Announcer();
  const controller = new AbortController();
  running = controller;
  startedAt = performance.now();
  refresh();
  toEnd();
  const take = (kind, pieces) => {
    if (view.append(kind, pieces) === 1) requestAnimationFrame(() => draw(view));
    if (kind === "content") announcer.feed(pieces.map((piece) => piece.text).join(""));
  };
  try {
    const body = { model: await chosenModel(), ...asked };
    Object.assign(message, await streamAnswer(body, controller.signal, take));
  } catch (error) {
    message.reason = error.name === "AbortError" ? "stopped" : "error";
    message.stats = error.stats;
    if (message.reason === "error") showProblem(error.message);
  }
  announcer.say(announcer.heard);
  announcer.say(inWords(message));
  if (running === controller) running = null;
  if (views.includes(view)) finish(view);
  else refresh();
}

// Draws everything that has arrived since the last frame.
function draw(view) {
  const follow = isAtEnd();
  view.draw();
  if (follow) toEnd();
}

function finish(view) {
  draw(view);
  const follow = isAtEnd();
  if (view.isEmpty && view.message.reason === "error") remove(view);
  else view.finish();
  refresh();
  save();
  if (follow) toEnd();
}

function remove(view) {
  const at = views.indexOf(view);
  views.splice(at, 1);
  messages.splice(at, 1);
  view.element.remove();
}

// Returns the form's fields; on invalid input, shows an error and returns null.
function parametersOrProblem() {
  showProblem("");
  try {
    return fields();
  } catch (error) {
    showSettings(true);
    showProblem(error.message);
    return null;
  }
}

function send(text) {
  if (running || !text.trim()) return;
  const parameters = parametersOrProblem();
  if (!parameters) return;
  $("prompt").value = "";
  grow();
  add({ role: "user", content: text.trim() });
  save();
  answer(parameters);
}

function stop() {
  running?.abort();
}

function regenerate(view) {
  const parameters = running ? null : parametersOrProblem();
  if (!parameters) return;
  if (view.message.role === "assistant") remove(view);
  $("prompt").focus();
  answer(parameters);
}

function forget() {
  stop();
  hideAlternatives();
  messages = [];
  views = [];
  $("messages").replaceChildren();
  showProblem("");
  save();
  refresh();
  $("prompt").focus();
}

// ---- form

function grow() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

function onKey(event) {
  const breaksLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
  if (event.key === "Enter" && !breaksLine) {
    event.preventDefault();
    send($("prompt").value);
  }
}

function onSubmit(event) {
  event.preventDefault();
  if (!running) send($("prompt").value);
  else if (performance.now() - startedAt > 300) stop(); // ignores the second click of a double click
}

function showSettings(isShown) {
  $("settings").hidden = !isShown;
  $("toggle-settings").setAttribute("aria-expanded", String(isShown));
}

export function startChat({ model }) {
  chosenModel = model;
  startSettings(refresh);
  showSettings(matchMedia("(min-width: 62rem)").matches);
  $("toggle-settings").addEventListener("click", () => showSettings($("settings").hidden));
  $("composer").addEventListener("submit", onSubmit);
  $("prompt").addEventListener("keydown", onKey);
  $("prompt").addEventListener("input", grow);
  $("new-chat").addEventListener("click", forget);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", () => {
      $("prompt").focus();
      send(button.textContent);
    });
  }
  addEventListener("pagehide", save);
  followTokens($("messages"), $("scroller"));
  restore();
  toEnd();
}
