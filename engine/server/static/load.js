// Something to look at: a few requests whose prompts begin alike.

import { request } from "./api.js";

const BEGINNING = "You are a careful writer who answers in plain words and short sentences. "
  + "You never use lists or headings, and you stop when everything is said. ";
const TOPICS = [
  "Describe a harbour in the morning.", "Tell how bread is made.", "Explain why leaves fall.",
  "Describe a walk through snow.", "Tell the story of a lost key.", "Explain how a clock works.",
  "Describe the sound of rain.", "Tell what a lighthouse keeper does.",
];

// Resolves when all answers have arrived; they are not kept.
export async function sendLoad(model, count) {
  const asked = TOPICS.slice(0, count).map(async (topic, at) => {
    const messages = [{ role: "system", content: BEGINNING }, { role: "user", content: topic }];
    const body = { model, messages, max_tokens: 48 + 24 * at, temperature: 0.8, stream: false };
    await (await request("v1/chat/completions", { body })).arrayBuffer();
  });
  const failed = (await Promise.allSettled(asked)).find((one) => one.status === "rejected");
  if (failed) throw failed.reason;
}
