// HTTP client of the page: API key, error messages, server-sent events.

const KEY = "engine.key";

const GONE = `The server at ${location.host} cannot be reached. Is \`engine serve\` still running, and this `
  + "device still in the network? Nothing of the conversation is lost.";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

let askForKey = async () => null;

// `ask(wasRefused)` resolves to a key, or to null if the user cancels. It is called only if the
// server requires a key.
export function onMissingKey(ask) {
  askForKey = ask;
}

// Fetches a path relative to the page; asks for the key if the server requires one.
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = savedKey();
    const response = await send(path, key, body, signal);
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    await response.body?.cancel();
    if (savedKey() === key && !(await askForKey(key !== ""))) {
      throw new ApiError("The server requires an API key. Enter it with the button Key.", 401);
    }
  }
}

async function send(path, key, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, document.baseURI), {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(GONE, 0);
  }
}

async function errorOf(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    // not the server's JSON error, but for example a proxy's HTML page
  }
  const wait = Number(response.headers.get("Retry-After"));
  return new ApiError(inWords(response.status, said, wait), response.status);
}

function inWords(status, said, wait) {
  const says = said && ` It says: ${said}.`;
  const later = wait ? ` Try again in ${wait} s.` : " Try again in a moment.";
  if (status === 429) return `The server is busy.${says}${later}`;
  if (status === 503) return `The server takes no requests now.${says}${wait ? later : ""}`;
  if (status === 404 && !said) return "The server does not know this address.";
  if (status === 413 && !said) return "The conversation is longer than the server accepts.";
  return said || `The server answered with status ${status}.`;
}

// Yields a response's events as {event, data}; skips comments and empty events.
export async function* events(response) {
  let event = "message";
  let data = [];
  for await (const line of lines(response)) {
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n") };
      event = "message";
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    } else if (line.startsWith("event:")) {
      event = line.slice(6).trim();
    }
  }
}

async function* lines(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop();
      for (const part of parts) yield part.endsWith("\r") ? part.slice(0, -1) : part;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Returns the server's models: {id, default_sampling_params?, ...}.
export async function models() {
  return (await (await request("v1/models")).json()).data;
}
