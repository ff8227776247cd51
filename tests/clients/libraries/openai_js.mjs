// A session of openai and @anthropic-ai/sdk for Node.js; prints one line of JSON.
// Usage: node openai_js.mjs URL KEY, with NODE_PATH or a node_modules folder beside it.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.env.CLIENTS_JS + "/"));
const OpenAI = require("openai").default;
const Anthropic = require("@anthropic-ai/sdk").default;
const [url, key] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model: "smollm2", temperature: 0, max_tokens: 12 };
const long = [{ role: "user", content: "word ".repeat(2000) }];
const found = {};

const chat = await openai.chat.completions.create({ ...greedy, messages });
found.chat = chat.choices[0].message.content;
found.stream = "";
const usage = { include_usage: true };
const stream = { ...greedy, messages, stream: true, stream_options: usage };
for await (const chunk of await openai.chat.completions.create(stream)) {
  found.stream += chunk.choices[0]?.delta?.content ?? "";
  found.usage = chunk.usage?.completion_tokens;
}
const response = { model: "smollm2", input: messages, temperature: 0, max_output_tokens: 12 };
found.responses = (await openai.responses.create(response)).output_text;
found.message = (await anthropic.messages.create({ ...greedy, messages })).content[0].text;
found.message_stream = await anthropic.messages.stream({ ...greedy, messages }).finalText();
const embedding = { model: "smollm2", input: "one" };
found.embedding = (await openai.embeddings.create(embedding)).data[0].embedding.length;
try {
  await openai.chat.completions.create({ ...greedy, messages: long });
} catch (error) {
  found.error = [error.status, error.code, error.param, typeof error.requestID];
}
try {
  await anthropic.messages.create({ ...greedy, messages: long });
} catch (error) {
  found.anthropic_error = [error.status, error.message, typeof error.requestID];
}
console.log(JSON.stringify(found));
