// Conversations, kept until the tab is closed, or on this device if the user has asked for it.
//
// A conversation is {id, title, time, messages}. The list of conversations holds no messages.

const LIST = "engine.conversations";
const KEPT = "engine.keep"; // in localStorage: conversations are there too
const CURRENT = "engine.current";
const keyOf = (id) => `engine.conversation.${id}`;

export const isKept = () => localStorage.getItem(KEPT) !== null;
const storage = () => (isKept() ? localStorage : sessionStorage);

// Returns a stored array; an empty one if there is none, or one that this page has not written.
function read(key) {
  try {
    const found = JSON.parse(storage().getItem(key));
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

// Newest first.
export const list = () => read(LIST);
export const load = (id) => read(keyOf(id));

export const currentId = () => sessionStorage.getItem(CURRENT);
export const setCurrentId = (id) => sessionStorage.setItem(CURRENT, id);

// Another tab may have changed the list in the meantime, so it is read each time.
export function save({ id, title, time, messages }) {
  const others = list().filter((each) => each.id !== id);
  const isStored = messages.length > 0;
  if (!isStored) storage().removeItem(keyOf(id));
  const entries = isStored ? [{ id, title, time }, ...others] : others;
  entries.sort((one, other) => other.time - one.time);
  return (!isStored || write(keyOf(id), messages, others)) && put(LIST, entries);
}

export function remove(id) {
  storage().removeItem(keyOf(id));
  put(LIST, list().filter((each) => each.id !== id));
}

// The alternatives of tokens take most of the space: the oldest conversations lose theirs first.
function write(key, messages, others) {
  if (put(key, messages)) return true;
  for (const { id } of [...others].reverse()) {
    put(keyOf(id), load(id).map(wordsOf));
    if (put(key, messages)) return true;
  }
  return put(key, messages.map(wordsOf));
}

const wordsOf = ({ pieces, thoughts, ids, ...words }) => words;

// Returns false if the browser's quota is exceeded.
function put(key, value) {
  try {
    storage().setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// Moves all conversations to this device, or back to the tab; returns false if they do not fit.
export function setKept(wanted) {
  const entries = list();
  const whole = entries.map((each) => ({ ...each, messages: load(each.id) }));
  for (const { id } of entries) storage().removeItem(keyOf(id));
  storage().removeItem(LIST);
  if (wanted) localStorage.setItem(KEPT, "1");
  else localStorage.removeItem(KEPT);
  return whole.reverse().map(save).every(Boolean); // one that does not fit keeps no other one out
}

// Calls `take` when another tab has changed the conversations kept on this device.
export function onOtherTab(take) {
  addEventListener("storage", ({ key }) => {
    if (key === LIST || key === KEPT || key === null) take();
  });
}
