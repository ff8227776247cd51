// List of conversations: open, delete, export, keep on this device.

import { current, open } from "./chat.js";
import { $, button, make } from "./dom.js";
import { showProblem } from "./problem.js";
import * as store from "./store.js";
import { exportJson, exportMarkdown } from "./transcript.js";

const SHOWN = "engine.sidebar";
const isWide = () => matchMedia("(min-width: 62rem)").matches;

// Shows the list anew; the conversation on screen is marked.
export function listConversations() {
  const { id: shown } = current();
  const rows = store.list().map((entry) => {
    const row = make("li");
    const choose = make("button", "choose", entry.title || "Untitled");
    choose.type = "button";
    if (entry.id === shown) choose.setAttribute("aria-current", "true");
    choose.addEventListener("click", () => {
      open(entry);
      if (!isWide()) show(false);
    });
    row.append(choose, deleteButton(entry));
    return row;
  });
  $("conversation-list").replaceChildren(...rows);
  $("no-conversations").hidden = rows.length > 0;
  $("keep").checked = store.isKept();
  const isEmpty = current().messages.length === 0;
  for (const name of ["export-json", "export-markdown"]) $(name).disabled = isEmpty;
}

// The first click asks, the second one deletes.
function deleteButton(entry) {
  let isAsked = false;
  const made = button("×", `Delete “${entry.title}”`, () => {
    if (!isAsked) {
      isAsked = true;
      made.textContent = "Delete?";
      made.removeAttribute("aria-label");
      return;
    }
    store.remove(entry.id);
    if (entry.id === current().id) open(null, { isDeleted: true });
    listConversations();
    $("sidebar-new").focus();
  });
  made.addEventListener("blur", () => {
    isAsked = false;
    made.textContent = "×";
    made.setAttribute("aria-label", `Delete “${entry.title}”`);
  });
  return made;
}

function show(isShown, takesFocus = false) {
  $("conversations").hidden = !isShown;
  $("toggle-sidebar").setAttribute("aria-expanded", String(isShown));
  sessionStorage.setItem(SHOWN, isShown ? "1" : "");
  if (takesFocus) (isShown ? $("sidebar-new") : $("toggle-sidebar")).focus();
}

export function startSidebar() {
  $("toggle-sidebar").addEventListener("click", () => show($("conversations").hidden, true));
  $("sidebar-new").addEventListener("click", () => {
    open(null);
    if (!isWide()) show(false);
  });
  $("conversations").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isWide()) show(false, true);
  });
  $("sidebar-close").addEventListener("click", () => show(false, true));
  $("keep").addEventListener("change", () => {
    const isSaved = store.setKept($("keep").checked);
    showProblem(isSaved ? "" : "The browser has no room for all conversations: some were not kept.");
    listConversations();
  });
  $("export-json").addEventListener("click", () => exportJson(current()));
  $("export-markdown").addEventListener("click", () => exportMarkdown(current()));
  store.onOtherTab(listConversations);
  const saved = sessionStorage.getItem(SHOWN);
  show(isWide() && (saved === null ? store.isKept() : saved === "1"));
  listConversations();
}
