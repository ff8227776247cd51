// Sample load for the Watch view: prompts with a common prefix.

import { request } from "./api.js";

const BEGINNING = "This is a book of short texts in plain words. Each of them is about one thing, "
  + "begins with what can be seen, and ends when everything is said. ";
// Two prompts per request, since browsers open at most six connections per server.
const PAIRS = [
  ["The harbour in the morning:", "How bread is made:"],
  ["Why leaves fall:", "A walk through snow:"],
  ["The story of a lost key:", "How a clock works:"],
  ["The sound of rain:", "The keeper of the lighthouse:"],
];
const MAX_TOKENS = [64, 96, 128, 160];

// Resolves when all texts have arrived; they are discarded.
export async function sendLoad(model) {
  const asked = PAIRS.map(async (pair, at) => {
    const prompt = pair.map((title) => BEGINNING + title);
    const body = { model, prompt, max_tokens: MAX_TOKENS[at], temperature: 0.8 };
    await (await request("v1/completions", { body })).arrayBuffer();
  });
  const failed = (await Promise.allSettled(asked)).find((one) => one.status === "rejected");
  if (failed) throw failed.reason;
}
