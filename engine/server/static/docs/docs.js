// The page of the API: every endpoint of openapi.json, with its fields and a curl command.

import { onMissingKey, request, saveKey } from "../static/api.js";
import { $, copyButton } from "../static/dom.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const MAX_DEPTH = 6; // of nested objects; schemas may contain themselves

let schemas = {};
let entries = [];

function element(tag, { text, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

// ---- schemas

function resolved(schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? { name, ...schemas[name] } : schema ?? {};
}

// Returns the alternatives of a schema without null, which stands for the default.
function alternatives(schema) {
  const found = resolved(schema);
  return (found.anyOf ?? [found]).map(resolved).filter((one) => one.type !== "null");
}

function typeOf(schema) {
  const names = alternatives(schema).map((one) => {
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (one.const !== undefined) return JSON.stringify(one.const);
    if (one.anyOf) return typeOf(one);
    if (one.type === "array") return `list of ${one.items ? typeOf(one.items) : "anything"}`;
    return one.name ?? one.title ?? one.type ?? "anything";
  });
  return [...new Set(names)].join(" or ");
}

function rangeOf(schema) {
  for (const one of alternatives(schema)) {
    const low = one.minimum ?? one.exclusiveMinimum;
    if (low === undefined && one.maximum === undefined) continue;
    const above = one.exclusiveMinimum === undefined ? "" : "above ";
    if (one.maximum === undefined) return above ? `above ${low}` : `at least ${low}`;
    return low === undefined ? `at most ${one.maximum}` : `${above}${low} to ${one.maximum}`;
  }
  return "";
}

// Returns the objects that a schema consists of: itself, alternatives, or items of lists.
function objectsOf(schema) {
  return alternatives(schema).flatMap((one) => {
    if (one.anyOf) return objectsOf(one);
    if (one.type === "array" && one.items) return objectsOf(one.items);
    return one.properties ? [one] : [];
  });
}

function namesIn(schema, depth = 0) {
  if (depth > MAX_DEPTH) return [];
  return objectsOf(schema).flatMap((one) =>
    Object.entries(one.properties).flatMap(([name, own]) => [name, ...namesIn(own, depth + 1)])
  );
}

// ---- the page

function table(head, rows) {
  const headings = element("tr", {}, ...head.map((text) => element("th", { text, scope: "col" })));
  const lines = rows.map((cells) =>
    element("tr", {}, ...cells.map((cell) => {
      const made = element("td");
      made.append(cell);
      return made;
    }))
  );
  const body = element("tbody", {}, ...lines);
  const made = element("table", {}, element("thead", {}, headings), body);
  return element("div", { className: "scroll" }, made);
}

function fields(object, seen) {
  const required = new Set(object.required ?? []);
  const names = Object.keys(object.properties);
  names.sort((a, b) => required.has(b) - required.has(a)); // required ones first
  const rows = names.map((name) => {
    const schema = object.properties[name];
    const type = element("div", { text: typeOf(schema) });
    for (const own of objectsOf(schema)) {
      const isNew = own.name && !seen.includes(own.name) && seen.length < MAX_DEPTH;
      if (isNew) type.append(nested(own, [...seen, own.name]));
    }
    const fallback = required.has(name) ? "required"
      : schema.default == null ? "" : JSON.stringify(schema.default);
    return [name, type, rangeOf(schema), fallback];
  });
  return table(["field", "type", "range", "default"], rows);
}

// The table is built when it is opened: schemas refer to each other in many places.
function nested(object, seen) {
  const made = element("details", { className: "nested" });
  made.append(element("summary", { text: object.name }));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(fields(object, seen));
  });
  return made;
}

function schemaOf(content) {
  return content?.["application/json"]?.schema;
}

function section(title, schema) {
  const objects = objectsOf(schema);
  if (!objects.length) return [];
  const tables = objects.map((one) => fields(one, one.name ? [one.name] : []));
  return [element("h3", { text: title }), ...tables];
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

function curl(method, path, operation, { isStream = false } = {}) {
  const address = new URL(path.replace(/^\//, ""), document.baseURI).href
    .replaceAll("%7B", "{").replaceAll("%7D", "}");
  const verb = method === "get" ? "" : ` -X ${method.toUpperCase()}`;
  const lines = [`curl -s${isStream ? "N" : ""}${verb} ${quoted(address)}`];
  if (operation.security) lines.push(`  -H "Authorization: Bearer $API_KEY"`);
  const example = operation.requestBody?.content["application/json"].example;
  if (example) {
    const body = isStream ? { ...example, stream: true } : example;
    lines.push(`  -H 'Content-Type: application/json'`, `  -d ${quoted(JSON.stringify(body))}`);
  }
  return lines.join(" \\\n");
}

function command(text) {
  const copy = copyButton("Copy the command", () => text);
  copy.className = "copy";
  return [element("pre", { tabIndex: 0 }, element("code", { text })), copy];
}

function details(method, path, operation) {
  const made = element("div");
  const answer = operation.responses["200"].content;
  const streams = "text/event-stream" in answer;
  made.append(element("h3", { text: "curl" }), ...command(curl(method, path, operation)));
  if (streams) {
    made.append(element("p", { className: "about", text: "As server-sent events:" }));
    made.append(...command(curl(method, path, operation, { isStream: true })));
  }
  if (operation.parameters) {
    const rows = operation.parameters.map((one) => [one.name, one.in, typeOf(one.schema)]);
    made.append(element("h3", { text: "Parameters" }), table(["name", "in", "type"], rows));
  }
  made.append(...section("Request", schemaOf(operation.requestBody?.content)));
  made.append(...section("Response", schemaOf(answer)));
  return made;
}

function entry(method, path, operation) {
  const made = element("details", { className: "endpoint", id: operation.operationId });
  const note = operation.security ? " (needs a key)" : "";
  made.append(element("summary", {},
    element("span", { className: "method", text: method.toUpperCase() }),
    element("span", { className: "path", text: path }), " ",
    element("span", { className: "about", text: operation.summary + note })));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(details(method, path, operation));
  });
  const names = [
    ...(operation.parameters ?? []).map((one) => one.name),
    ...namesIn(schemaOf(operation.requestBody?.content)),
    ...namesIn(schemaOf(operation.responses["200"].content)),
  ];
  const words = `${method} ${path} ${operation.summary} ${[...new Set(names)].join(" ")}`;
  return { made, group: groupOf(path), words: words.toLowerCase() };
}

function groupOf(path) {
  if (/messages/.test(path)) return "Anthropic's protocol";
  if (/completions|responses|generate/.test(path)) return "Generation";
  if (/embeddings|score|rerank/.test(path)) return "Embeddings and ranking";
  if (/tokeniz/.test(path)) return "Tokens";
  if (/models|version|openapi/.test(path)) return "Models and this description";
  if (/health|ping|ready|metrics/.test(path)) return "Operation";
  return "For admins";
}

function show(found) {
  schemas = found.components.schemas;
  $("version").textContent = found.info.version;
  entries = Object.entries(found.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => entry(method, path, item[method]))
  );
  const sections = [...grouped(entries)].sort(([a], [b]) => order(a) - order(b)).map(([title, own]) =>
    element("section", {}, element("h2", { text: title }), ...own.map((one) => one.made))
  );
  $("endpoints").replaceChildren(...sections);
  search();
  openLinked();
}

function grouped(items) {
  const groups = new Map();
  for (const one of items) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}

function order(title) {
  const first = ["Generation", "Anthropic's protocol", "Embeddings and ranking", "Tokens"];
  return first.includes(title) ? first.indexOf(title) : first.length + (title === "For admins");
}

// Every word must occur; the order does not matter.
function search() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const one of entries) {
    const matches = words.every((word) => one.words.includes(word));
    one.made.hidden = !matches;
    count += matches;
  }
  for (const part of document.querySelectorAll("main > section")) {
    part.hidden = ![...part.children].some((one) => one.className === "endpoint" && !one.hidden);
  }
  $("count").textContent = words.length ? `${count} of ${entries.length} endpoints` : "";
}

function openLinked() {
  const linked = location.hash && $(decodeURIComponent(location.hash.slice(1)));
  if (linked) {
    linked.open = true;
    linked.scrollIntoView();
  }
}

// Resolves to whether a key was entered.
function askForKey() {
  const form = $("key-form");
  form.hidden = false;
  $("key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      saveKey($("key").value.trim());
      $("key").value = "";
      form.hidden = true;
      resolve(true);
    }, { once: true });
  });
}

async function load() {
  try {
    show(await (await request("openapi.json")).json());
  } catch (error) {
    $("problem").hidden = false;
    $("problem").textContent = error.message;
  }
}

onMissingKey(askForKey);
$("search").addEventListener("input", search);
window.addEventListener("hashchange", openLinked);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/input|textarea/i.test(event.target.tagName)) {
    event.preventDefault();
    $("search").focus();
  }
});
load();
