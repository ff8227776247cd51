// Form of sampling parameters: kept until the tab is closed, validated before each request.
//
// While two sides are compared, the form shows the settings of one of them; side "a" is the only
// one otherwise.

import { $ } from "./dom.js";

const SAVED = "engine.settings";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "presence_penalty",
];
const SHARED = ["logprobs", "shade"]; // of the page, not of a side
const form = $("settings");

let values = { a: {}, b: {} };
let isCompared = false;
let shown = "a";
let defaults = {};

export const sides = () => (isCompared ? ["a", "b"] : ["a"]);
export const systemPrompt = (side) => values[side].system?.trim() ?? "";
export const isShaded = () => form.elements.shade.checked;
export const modelOf = (side) => values[side].model ?? "";

// ---- storage

function save() {
  sessionStorage.setItem(SAVED, JSON.stringify({ values, isCompared, shown }));
}

function restore() {
  const saved = JSON.parse(sessionStorage.getItem(SAVED) ?? "null");
  if (saved?.values) ({ values, isCompared, shown } = saved);
  for (const name of SHARED) form.elements[name].checked = values.a[name] ?? true;
}

// ---- form

const inputs = () => [...form.elements].filter((one) => one.name && !SHARED.includes(one.name));

function toForm() {
  for (const input of inputs()) {
    input.value = values[shown][input.name] ?? "";
    const standard = defaults[input.name];
    if (NUMBERS.includes(input.name) && input.name !== "seed") input.placeholder = standard ?? "default";
  }
  for (const side of ["a", "b"]) $(`side-${side}`).setAttribute("aria-pressed", String(side === shown));
  $("sides").hidden = !isCompared;
  $("compare").setAttribute("aria-pressed", String(isCompared));
  $("model-field").hidden = !isCompared || shown === "a"; // the page's head has the model of "a"
  check();
}

function fromForm() {
  for (const input of inputs()) values[shown][input.name] = input.value;
  for (const name of SHARED) values.a[name] = form.elements[name].checked;
}

function labelTextOf(input) {
  return form.querySelector(`label[for="${input.id}"]`).textContent;
}

function wordsFor(input) {
  const { min, max, step } = input;
  const kind = Number.isInteger(Number(step)) ? "a whole number" : "a number";
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  return `${labelTextOf(input)} must be ${kind} ${range}, or empty.`;
}

function isValid(input) {
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = input.validity;
  const isWhole = Number.isInteger(Number(input.step));
  return !(badInput || rangeUnderflow || rangeOverflow || (isWhole && stepMismatch));
}

// Marks wrong fields; returns the first one.
function check() {
  let first = null;
  for (const name of NUMBERS) {
    const input = form.elements[name];
    const valid = isValid(input);
    if (valid) input.removeAttribute("aria-invalid");
    else input.setAttribute("aria-invalid", "true");
    first ??= valid ? null : input;
  }
  return first;
}

// ---- for the chat

export function show(isShown) {
  form.hidden = !isShown;
  $("toggle-settings").setAttribute("aria-expanded", String(isShown));
  const wrong = isShown && check();
  if (wrong) $("more").open ||= $("more").contains(wrong);
}

function showSide(side) {
  shown = side;
  toForm();
}

// Compares two models or two settings, or no longer; the second side begins as a copy of the first.
function compare(isWanted) {
  isCompared = isWanted;
  if (isWanted) values.b = { ...values.a, ...values.b };
  shown = isWanted ? "b" : "a";
  toForm();
  save();
}

// Returns the non-empty request fields of a side; throws an Error with a message for the user, and
// shows that side.
export function fields(side) {
  const before = shown;
  if (side !== before) showSide(side);
  const wrong = check();
  if (wrong) throw new Error(wordsFor(wrong));
  if (side !== before) showSide(before);
  return fieldsOf(side);
}

function fieldsOf(side) {
  const own = values[side];
  const found = {};
  for (const name of NUMBERS) {
    if (own[name]) found[name] = Number(own[name]);
  }
  if (own.stop) found.stop = [own.stop];
  if (own.tools?.trim()) found.tools = toolsOf(own.tools);
  if (form.elements.logprobs.checked) {
    Object.assign(found, { logprobs: true, top_logprobs: 5, return_token_ids: true });
  }
  return found;
}

function toolsOf(text) {
  try {
    const tools = JSON.parse(text);
    if (Array.isArray(tools)) return tools;
  } catch {
    // told below
  }
  throw new Error("Tools must be a JSON array of functions, as in OpenAI's API, or empty.");
}

// Names a side's answers: its model, and its settings that the other side has otherwise.
export function labelOf(side, model) {
  if (!isCompared) return model;
  const other = values[side === "a" ? "b" : "a"];
  const differing = [...NUMBERS, "stop", "system"].filter((name) => (
    (values[side][name] ?? "") !== (other[name] ?? "")
  ));
  const told = differing.map((name) => {
    const value = values[side][name] || (defaults[name] ?? "default");
    return `${labelTextOf(form.elements[name]).toLowerCase()} ${String(value).slice(0, 40)}`;
  });
  return [side.toUpperCase(), model, ...told].join(" · ");
}

// Shows the model's own defaults in empty fields; `named` are the names of all models.
export function showModels(named, given) {
  defaults = given ?? {};
  $("model-b").replaceChildren(...named.map((name) => new Option(name, name)));
  if (named.length && !named.includes(values.b.model)) values.b.model = named[0];
  toForm();
}

export function start(onChange) {
  restore();
  toForm();
  const changed = () => {
    fromForm();
    check();
    save();
    onChange();
  };
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset-settings").addEventListener("click", () => {
    for (const input of inputs()) if (input.name !== "model") input.value = "";
    for (const name of SHARED) form.elements[name].checked = true;
    changed();
  });
  const isWide = matchMedia("(min-width: 62rem)").matches;
  $("more").open = isWide;
  show(isWide);
  $("toggle-settings").addEventListener("click", () => show(form.hidden));
  $("compare").addEventListener("click", () => {
    compare(!isCompared);
    if (isCompared) show(true);
    onChange();
  });
  for (const side of ["a", "b"]) $(`side-${side}`).addEventListener("click", () => showSide(side));
}
