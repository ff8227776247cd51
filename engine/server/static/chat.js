// The conversation shown: its messages, and the requests that extend it.

import { inWords, streamAnswer } from "./answer.js";
import { answeredSides, pendingCall } from "./calls.js";
import { setPrompt, startComposer } from "./composer.js";
import { $ } from "./dom.js";
import { MessageView } from "./message.js";
import { Announcer, offerRetry, showProblem, startProblem } from "./problem.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { followTokens, hideAlternatives } from "./tokens.js";
import { historyOf, sideOf } from "./transcript.js";

// A message: {role, content, side?}; an answer also has {reasoning, pieces, thoughts, ids, calls,
// reason, stats, asked}, where asked = {model, system, tools?, label, side?}.
let conversation = newConversation();
let views = [];
const running = new Set(); // AbortControllers of the answers that arrive
let chosenModel = async () => "";
let onChange = () => {};

const messages = () => conversation.messages;

function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", time: 0, messages: [] };
}

// ---- storage

function save() {
  const ended = (one) => (isArriving(one) ? { ...one, reason: "stopped" } : one);
  const first = messages().find((one) => one.role === "user")?.content ?? "";
  conversation.title = first.trim().split("\n")[0].slice(0, 80);
  store.setCurrentId(conversation.id);
  const isSaved = store.save({ ...conversation, messages: messages().map(ended) });
  if (!isSaved) showProblem("The browser has no room for this conversation: export it, or delete others.");
  onChange(conversation);
}

const isArriving = (message) => message.role === "assistant" && !message.reason;

// ---- display

// Shows these messages instead of the present ones.
function show(list) {
  hideAlternatives();
  conversation.messages = [];
  views = [];
  $("messages").replaceChildren();
  for (const message of list) add(message);
  refresh();
}

function add(message) {
  const view = new MessageView(message, { regenerate, edit });
  messages().push(message);
  views.push(view);
  $("messages").append(view.element);
  return view;
}

function refresh() {
  const isBusy = running.size > 0;
  const last = messages().findLastIndex((one) => one.role !== "assistant");
  const pending = pendingCall(messages());
  $("welcome").hidden = messages().length > 0;
  $("new-chat").disabled = messages().length === 0;
  $("send").textContent = isBusy ? "Stop" : "Send";
  $("send").classList.toggle("stop", isBusy);
  $("prompt").placeholder = pending ? `Result of ${pending.call.name}` : "Message";
  $("messages").classList.toggle("shaded", settings.isShaded());
  const isCompared = settings.sides().length > 1 || messages().some((one) => one.side === "b");
  $("messages").classList.toggle("compared", isCompared);
  views.forEach((view, at) => view.allow({
    regenerate: !isBusy && at >= last && (view.isAnswer || at === views.length - 1),
    edit: !isBusy,
  }));
}

const isAtEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = $("scroller");
  return scrollHeight - scrollTop - clientHeight < 60;
};

function toEnd() {
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

// ---- requests

// Asks the models of these sides; resolves to whether any of them has said something.
async function ask(sides) {
  const system = settings.systemPrompt;
  const asked = sides.map((side) => ({
    side, parameters: settings.fields(side), lines: historyOf(messages(), side, system(side)),
  }));
  const begun = Promise.all(asked.map((one) => answer(one, system(one.side))));
  refresh();
  toEnd();
  const answers = await begun;
  return answers.some(Boolean);
}

async function answer({ side, parameters, lines }, system) {
  const isCompared = settings.sides().length > 1;
  const asked = { model: "", system, tools: parameters.tools, label: "", ...(isCompared && { side }) };
  const message = {
    role: "assistant", content: "", reasoning: "", pieces: [], thoughts: [], ids: [], calls: [], asked,
    ...(isCompared && { side }),
  };
  const controller = new AbortController();
  const announcer = new Announcer();
  const own = conversation;
  running.add(controller);
  let view = null;
  try {
    asked.model = await chosenModel(side);
    asked.label = settings.labelOf(side, asked.model);
    if (own !== conversation) throw new DOMException("another conversation is shown", "AbortError");
    view = add(message);
    refresh();
    toEnd();
    const body = { model: asked.model, messages: lines, ...parameters };
    Object.assign(message, await streamAnswer(body, controller.signal, message, taking(view, announcer)));
  } catch (error) {
    message.reason = error.name === "AbortError" ? "stopped" : "error";
    message.stats = error.stats;
    const again = () => (views.includes(view) ? regenerate(view) : askAgain(side));
    if (message.reason === "error") showProblem(error.message, again);
  }
  running.delete(controller);
  announcer.say(announcer.heard);
  announcer.say(inWords(message));
  const isShown = view !== null && views.includes(view);
  if (isShown) finish(view);
  else refresh();
  return message.reason !== "error" || (isShown && !view.isEmpty);
}

// Draws what has arrived once a frame, and less often if drawing takes long.
function taking(view, announcer) {
  let cost = 0; // ms of the last drawing
  const later = () => requestAnimationFrame(() => {
    const begin = performance.now();
    draw(view);
    cost = performance.now() - begin;
  });
  return (kind, pieces) => {
    if (view.append(kind, pieces) === 1) setTimeout(later, 4 * cost);
    if (kind === "content") announcer.feed(pieces.map((piece) => piece.text).join(""));
  };
}

function draw(view) {
  const follow = isAtEnd();
  view.draw();
  if (follow) toEnd();
}

function finish(view) {
  const follow = isAtEnd();
  view.draw();
  if (view.isEmpty && view.message.reason === "error") remove(view);
  else view.finish();
  refresh();
  save();
  if (follow) toEnd();
}

function remove(view) {
  const at = views.indexOf(view);
  views.splice(at, 1);
  messages().splice(at, 1);
  view.element.remove();
}

// Tells what is wrong with the settings of any side, if anything is.
function areValid(sides) {
  showProblem("");
  for (const side of sides) {
    try {
      settings.fields(side);
    } catch (error) {
      settings.show(true);
      showProblem(error.message);
      return false;
    }
  }
  return true;
}

// Asks after a change of the messages. A request that is refused leaves them as they were `before`;
// then `undo` puts the text back, and `again` tries once more.
async function askOrUndo(sides, before, again, undo = () => {}) {
  const own = conversation;
  own.time = Date.now();
  save();
  if ((await ask(sides)) || own !== conversation) return;
  show(before);
  save();
  toEnd();
  undo();
  offerRetry(again);
}

function send(text) {
  const sides = settings.sides();
  if (running.size || !text.trim() || !areValid(sides)) return;
  const before = [...messages()];
  const pending = pendingCall(before);
  setPrompt("");
  if (pending) add({ role: "tool", content: text, ...pending });
  else add({ role: "user", content: text.trim() });
  refresh();
  const waiting = pending ? answeredSides(messages()) : sides;
  const undo = () => $("prompt").value || setPrompt(text);
  if (waiting.length) askOrUndo(waiting, before, () => send($("prompt").value), undo);
  else save();
}

// Sends an edited message instead of the old one and all after it; returns whether it could.
function edit(view, text) {
  if (running.size || !areValid(settings.sides())) return false;
  const before = [...messages()];
  const at = views.indexOf(view);
  show(before.slice(0, at));
  add({ role: "user", content: text });
  const again = () => edit(views[at], text);
  askOrUndo(settings.sides(), before, again, () => views[at].edit(text));
  return true;
}

// Answers the last message again, on the side of the answer that is replaced.
function regenerate(view) {
  const sides = view.isAnswer ? [sideOf(view.message)] : settings.sides();
  if (running.size || !areValid(sides)) return;
  const before = [...messages()];
  const at = views.indexOf(view);
  if (view.isAnswer) remove(view);
  $("prompt").focus();
  askOrUndo(sides, before, () => regenerate(views[at]));
}

// Asks on a side that has not answered, while the other one has.
function askAgain(side) {
  if (!running.size && areValid([side])) askOrUndo([side], [...messages()], () => askAgain(side));
}

function stop() {
  for (const controller of running) controller.abort();
}

// ---- conversations

export const current = () => conversation;

// Shows a stored conversation, or a new one without `entry`.
export function open(entry, { isDeleted = false } = {}) {
  stop();
  if (messages().length && !isDeleted) save();
  conversation = entry ? { ...entry } : newConversation();
  store.setCurrentId(conversation.id);
  show(entry ? store.load(entry.id) : []);
  showProblem("");
  onChange(conversation);
  toEnd();
  focusPrompt();
}

// On a phone the keyboard would cover half of the page.
function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus();
}

// Returns what the lens needs of the answer that contains an element: {message, before}.
export function answerOf(element) {
  const at = views.findIndex((view) => view.element.contains(element));
  return { message: messages()[at], before: messages().slice(0, at) };
}

export function startChat({ model, changed }) {
  chosenModel = model;
  onChange = changed;
  settings.start(refresh);
  startProblem();
  startComposer({ send, stop, isBusy: () => running.size > 0 });
  $("new-chat").addEventListener("click", () => open(null));
  addEventListener("pagehide", () => messages().length && save());
  followTokens($("messages"), $("scroller"));
  const entry = store.list().find((each) => each.id === store.currentId());
  if (entry) conversation = { ...entry };
  show(entry ? store.load(entry.id) : []);
  toEnd();
  focusPrompt();
}
