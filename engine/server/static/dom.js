// Helpers to build elements. All text is inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(text, label, onClick) {
  const made = make("button", "quiet small", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

export function folded(className, title, ...content) {
  const made = make("details", className);
  made.append(make("summary", "", title), ...content);
  return made;
}

// Returns a button that copies what `textOf` returns, and says whether it could.
export function copyButton(label, textOf) {
  const made = button("Copy", label, async () => {
    made.textContent = (await copyText(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => {
      made.textContent = "Copy";
    }, 1500);
  });
  return made;
}

// Whether Enter was pressed to send a text, not to break its line or to choose a character. A phone's
// keyboard has no other key for a line break.
export function isSendKey(event) {
  const breaksLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
  return event.key === "Enter" && !breaksLine;
}

// Browsers allow clipboard access only on pages from localhost or over TLS.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    const before = document.activeElement;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}

// Has the browser save a text as a file.
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
