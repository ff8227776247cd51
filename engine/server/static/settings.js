// Form of sampling parameters: kept until the tab is closed, validated before each request.

const SAVED = "engine.settings";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "presence_penalty",
];
const form = document.getElementById("settings");

function save() {
  const values = {};
  for (const input of form.elements) {
    if (input.name) values[input.name] = input.type === "checkbox" ? input.checked : input.value;
  }
  sessionStorage.setItem(SAVED, JSON.stringify(values));
}

function restore() {
  const values = JSON.parse(sessionStorage.getItem(SAVED) ?? "{}");
  for (const [name, value] of Object.entries(values)) {
    const input = form.elements[name];
    if (input?.type === "checkbox") input.checked = value;
    else if (input) input.value = value;
  }
}

function labelOf(input) {
  return form.querySelector(`label[for="${input.id}"]`).textContent;
}

function wordsFor(input) {
  const { min, max, step } = input;
  const kind = Number.isInteger(Number(step)) ? "a whole number" : "a number";
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  return `${labelOf(input)} must be ${kind} ${range}, or empty.`;
}

function isValid(input) {
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = input.validity;
  const isWhole = Number.isInteger(Number(input.step));
  return !(badInput || rangeUnderflow || rangeOverflow || (isWhole && stepMismatch));
}

function check() {
  let first = null;
  for (const name of NUMBERS) {
    const input = form.elements[name];
    const valid = isValid(input);
    input.toggleAttribute("aria-invalid", false);
    if (!valid) input.setAttribute("aria-invalid", "true");
    first ??= valid ? null : input;
  }
  return first;
}

export function startSettings(onChange) {
  restore();
  form.addEventListener("input", () => {
    check();
    save();
    onChange();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset-settings").addEventListener("click", () => {
    form.reset();
    check();
    save();
    onChange();
  });
}

export const systemPrompt = () => form.elements.system.value.trim();
export const isShaded = () => form.elements.shade.checked;

// Returns the non-empty request fields; throws an Error with a message for the user.
export function fields() {
  const wrong = check();
  if (wrong) throw new Error(wordsFor(wrong));
  const found = {};
  for (const name of NUMBERS) {
    const { value } = form.elements[name];
    if (value !== "") found[name] = Number(value);
  }
  if (form.elements.stop.value) found.stop = [form.elements.stop.value];
  if (form.elements.logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  return found;
}
