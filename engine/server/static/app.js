// Page frame: view switch, model list, API key.

import { models, onMissingKey, saveKey } from "./api.js";
import { showProblem, startChat } from "./chat.js";
import { startWatch } from "./watch.js";

const $ = (id) => document.getElementById(id);

// ---- views

const TABS = ["chat", "watch"];
const WATCH = "#view=watch"; // must not be an element's id: browsers would move the focus there
const watch = startWatch();

function show(name, takeFocus = false) {
  for (const tab of TABS) {
    const button = $(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    $(tab).hidden = tab !== name;
  }
  if (takeFocus) $(`tab-${name}`).focus();
  watch.setVisible(name === "watch" && !document.hidden);
  history.replaceState(null, "", name === "watch" ? WATCH : location.pathname);
}

const wanted = () => (location.hash === WATCH ? "watch" : "chat");
const shown = () => TABS.find((tab) => !$(tab).hidden);

for (const tab of TABS) $(`tab-${tab}`).addEventListener("click", () => show(tab));
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  show(TABS[(TABS.indexOf(shown()) + step + TABS.length) % TABS.length], true);
});
document.addEventListener("visibilitychange", () => show(shown()));
addEventListener("hashchange", () => show(wanted()));

// ---- API key

let asking = null;

function ask(wasRefused) {
  asking ??= new Promise((resolve) => openKeyDialog(wasRefused, resolve)).finally(() => {
    asking = null;
  });
  return asking;
}

function openKeyDialog(wasRefused, resolve) {
  const dialog = $("key-dialog");
  let key = null;
  $("key").value = "";
  $("key-problem").hidden = !wasRefused;
  $("key-form").onsubmit = (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    saveKey(key);
    dialog.close();
  };
  $("key-cancel").onclick = () => dialog.close();
  dialog.onclose = () => resolve(key);
  dialog.showModal();
}

onMissingKey(ask);
$("change-key").addEventListener("click", async () => {
  if ((await ask(false)) !== null) listModels();
});

// ---- models

async function fillModels() {
  const select = $("model");
  const before = sessionStorage.getItem("engine.model") ?? select.value;
  const names = await models();
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) select.value = before;
}

async function listModels() {
  try {
    await fillModels();
    showProblem("");
  } catch (error) {
    showProblem(error.message);
  }
}

// Loads the model list if the server was unreachable when the page loaded.
async function chosenModel() {
  if (!$("model").value) await fillModels();
  return $("model").value;
}

$("model").addEventListener("change", () => {
  sessionStorage.setItem("engine.model", $("model").value);
});

startChat({ model: chosenModel });
show(wanted());
listModels();
