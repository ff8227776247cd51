// Tool calls of a conversation, and their results.

import { sideOf } from "./transcript.js";

// Returns {side?, call} of the first call without a result: the next message is its result.
export function pendingCall(messages) {
  const results = new Set(messages.filter((one) => one.role === "tool").map(keyOf));
  const lastUser = messages.findLastIndex((one) => one.role === "user");
  for (const message of messages.slice(lastUser + 1)) {
    for (const { id, name } of message.reason === "tool_calls" ? message.calls : []) {
      const found = { ...(message.side && { side: message.side }), call: { id, name } };
      if (!results.has(keyOf(found))) return found;
    }
  }
  return null;
}

const keyOf = (result) => `${sideOf(result)} ${result.call.id}`;

// Returns the sides whose last message is a result, once no call waits for one.
export function answeredSides(messages) {
  if (pendingCall(messages)) return [];
  const own = (side) => messages.filter((one) => one.role !== "user" && sideOf(one) === side);
  return ["a", "b"].filter((side) => own(side).at(-1)?.role === "tool");
}
