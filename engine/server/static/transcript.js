// Conversations as requests need them, and as files.

import { download } from "./dom.js";

export const sideOf = (message) => message.side ?? "a";

// Returns the messages that the model of one side has seen or said, in OpenAI's form.
export function historyOf(messages, side, system) {
  const own = messages.filter((one) => one.role === "user" || sideOf(one) === side);
  const said = own.filter((one) => one.content || one.calls?.length || one.role === "tool");
  const lines = said.map(lineOf);
  return system ? [{ role: "system", content: system }, ...lines] : lines;
}

function lineOf({ role, content, calls, call }) {
  if (role === "tool") return { role, content, tool_call_id: call.id };
  if (!calls?.length) return { role, content };
  const tool_calls = calls.map(({ id, name, arguments: given }) => (
    { id, type: "function", function: { name, arguments: given } }
  ));
  return { role, content: content || null, tool_calls };
}

export function exportJson({ title, messages }) {
  const lines = messages.map((message) => ({
    ...lineOf(message),
    ...(message.reasoning && { reasoning_content: message.reasoning }),
    ...(message.asked && { model: message.asked.model }),
    ...(message.side && { side: message.side }),
  }));
  const whole = { title, exported: new Date().toISOString(), messages: lines };
  download(fileName(title, "json"), `${JSON.stringify(whole, null, 2)}\n`, "application/json");
}

export function exportMarkdown({ title, messages }) {
  const parts = [`# ${title}`, ...messages.map(markdownOf)];
  download(fileName(title, "md"), `${parts.join("\n\n")}\n`, "text/markdown");
}

function markdownOf({ role, content, reasoning, calls, call, asked }) {
  if (role === "user") return `## You\n\n${content}`;
  if (role === "tool") return `## Result of ${call.name}\n\n${fence(content)}`;
  const parts = [`## ${asked?.label ?? "Answer"}`];
  if (reasoning) parts.push(reasoning.replace(/^/gm, "> "));
  if (content) parts.push(content);
  for (const one of calls ?? []) parts.push(`Call of ${one.name}:\n\n${fence(one.arguments, "json")}`);
  return parts.join("\n\n");
}

// A fence longer than any run of backticks in the text.
function fence(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const marks = "`".repeat(longest + 1);
  return `${marks}${language}\n${text}\n${marks}`;
}

function fileName(title, ending) {
  const words = title.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  return `${words.slice(0, 6).join("-") || "conversation"}.${ending}`;
}
