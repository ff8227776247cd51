// Reads the stream of one answer and measures its speed.

import { ApiError, events, request } from "./api.js";
import { TokenPairing, tokensOf } from "./tokens.js";

// Calls `take(kind, pieces)` as text arrives; kind is "content" or "reasoning_content". The ids of
// all tokens are added to `message.ids`, and tool calls to `message.calls`.
// Returns {reason, stats}. Throws an ApiError, or an AbortError if `signal` aborts; both carry `stats`.
export async function streamAnswer(body, signal, message, take) {
  const measured = new Measures();
  try {
    return { reason: await readAnswer(body, signal, message, take, measured), stats: measured.stats() };
  } catch (error) {
    error.stats = measured.stats();
    throw error;
  }
}

async function readAnswer(body, signal, message, take, measured) {
  const pairings = { content: new TokenPairing(), reasoning_content: new TokenPairing() };
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: asked, signal });
  let reason = null;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 0);
    if (chunk.usage) measured.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    deliver(choice, message, pairings, measured, take);
  }
  if (!reason) throw new ApiError("The connection was lost before the answer was finished.", 0);
  return reason;
}

function deliver({ delta = {}, logprobs, token_ids: ids = [] }, message, pairings, measured, take) {
  const tokens = tokensOf(logprobs, ids.length ? message.ids.length : Number.NaN);
  message.ids.push(...ids);
  for (const call of delta.tool_calls ?? []) addCall(message.calls, call);
  const kind = delta.reasoning_content ? "reasoning_content" : "content";
  const text = delta[kind] ?? "";
  if (text || tokens.length || delta.tool_calls) measured.count(tokens.length || 1);
  const pieces = pairings[kind].feed(text, tokens);
  if (pieces.length || delta.tool_calls) take(kind, pieces);
}

// A call arrives in parts: its name and id, then its arguments.
function addCall(calls, { index, id, function: called = {} }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  calls[index].id += id ?? "";
  calls[index].name += called.name ?? "";
  calls[index].arguments += called.arguments ?? "";
}

class Measures {
  started = performance.now();
  first = null;
  last = null;
  numTokens = 0;
  numFirst = 0;
  usage = null;

  count(numTokens) {
    this.last = performance.now();
    this.numTokens += numTokens;
    if (this.first !== null) return;
    this.first = this.last;
    this.numFirst = numTokens;
  }

  stats() {
    if (this.first === null) return {};
    const after = this.numTokens - this.numFirst;
    const seconds = (this.last - this.first) / 1000;
    return {
      tokens: this.usage?.completion_tokens ?? this.numTokens,
      rate: after > 0 && seconds > 0 ? after / seconds : null,
      firstMs: this.first - this.started,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }
}

const REASONS = {
  stopped: "stopped",
  length: "cut off at the token limit",
  tool_calls: "waits for the results of its calls",
  abort: "ended by the server",
  error: "failed",
};

export function inWords({ reason, stats = {} }) {
  const parts = [];
  if (stats.tokens) parts.push(stats.tokens === 1 ? "1 token" : `${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 100 ? 1 : 0)} tokens/s`);
  if (stats.firstMs) parts.push(`first after ${duration(stats.firstMs)}`);
  if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (REASONS[reason]) parts.push(REASONS[reason]);
  return parts.join(" · ");
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
