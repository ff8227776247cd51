// Requests in flight as bars: cached tokens, the rest of the prompt, the output so far.

import { hueOf } from "./palette.js";

const MAX_ROWS = 48;
const STATES = { running: 0, swapped: 1, waiting: 2 };

function make(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

class Row {
  constructor(id, onPoint) {
    this.element = make("li", "request");
    this.name = make("span", "name");
    this.bar = make("span", "track");
    this.parts = ["cached", "prompt", "output"].map((kind) => make("i", kind));
    this.numbers = make("span", "numbers");
    this.bar.append(...this.parts);
    this.element.append(this.name, this.bar, this.numbers);
    this.name.textContent = id.length > 12 ? `…${id.slice(-8)}` : id;
    this.name.title = id;
    this.element.style.setProperty("--hue", hueOf(id));
    this.element.addEventListener("pointerenter", () => onPoint(id));
    this.element.addEventListener("pointerleave", () => onPoint(null));
  }

  show(request, longest) {
    const { num_prompt: prompt, num_cached: cached, num_output: output, state } = request;
    const lengths = [cached, prompt - cached, output];
    this.parts.forEach((part, at) => {
      part.style.width = `${(100 * lengths[at]) / longest}%`;
    });
    this.element.dataset.state = state;
    const numbers = state === "running" ? `${prompt} + ${output}` : state;
    if (this.numbers.textContent !== numbers) this.numbers.textContent = numbers;
  }
}

export class RequestList {
  rows = new Map();

  constructor(list, onPoint) {
    this.list = list;
    this.onPoint = onPoint;
    this.rest = make("li", "rest");
  }

  take(requests) {
    const order = (request) => STATES[request.state] ?? 3;
    const sorted = [...requests].sort((one, other) => order(one) - order(other));
    const shown = sorted.slice(0, MAX_ROWS);
    const longest = Math.max(1, ...shown.map((one) => one.num_prompt + one.num_output));
    this.dropOthers(new Set(shown.map((one) => one.id)));
    shown.forEach((request, at) => this.show(request, at, longest));
    const hidden = requests.length - shown.length;
    this.rest.textContent = `and ${hidden} more`;
    if (hidden) this.list.append(this.rest);
    else this.rest.remove();
    this.list.hidden = requests.length === 0;
    document.getElementById("no-requests").hidden = requests.length > 0;
  }

  dropOthers(ids) {
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
      this.onPoint(null);
    }
  }

  show(request, at, longest) {
    let row = this.rows.get(request.id);
    if (!row) {
      row = new Row(request.id, this.onPoint);
      this.rows.set(request.id, row);
    }
    const here = this.list.children[at];
    if (here !== row.element) this.list.insertBefore(row.element, here ?? null);
    row.show(request, longest);
  }
}
