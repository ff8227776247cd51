// Page frame: view switch, model list, API key.

import { models, onMissingKey, saveKey, savedKey } from "./api.js";
import { answerOf, startChat } from "./chat.js";
import { $ } from "./dom.js";
import { loadLimits, openLens, startLens } from "./lens.js";
import { showProblem } from "./problem.js";
import { modelOf, showModels } from "./settings.js";
import { listConversations, startSidebar } from "./sidebar.js";
import { onLens } from "./tokens.js";
import { startWatch } from "./watch.js";

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
  $("toggle-sidebar").disabled = name !== "chat";
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

// Called once the server has asked for a key: only then the page shows its button.
function ask(wasRefused) {
  $("change-key").hidden = false;
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
$("change-key").hidden = !savedKey();
$("change-key").addEventListener("click", async () => {
  if ((await ask(false)) !== null) listModels();
});

// ---- models

let known = [];

async function fillModels() {
  const select = $("model");
  const before = sessionStorage.getItem("engine.model") ?? select.value;
  known = await models();
  const hasLens = await loadLimits();
  onLens(hasLens ? (token) => openLens(answerOf(token), token) : null);
  const names = known.map((model) => model.id);
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) select.value = before;
  showDefaults();
}

function showDefaults() {
  const chosen = known.find((model) => model.id === $("model").value);
  showModels(known.map((model) => model.id), chosen?.default_sampling_params);
}

async function listModels() {
  try {
    await fillModels();
    showProblem("");
  } catch (error) {
    showProblem(error.message, listModels);
  }
}

// Returns the model of a side; loads the list if the server was unreachable when the page loaded.
async function chosenModel(side) {
  if (!$("model").value) await fillModels();
  return side === "b" ? modelOf("b") : $("model").value;
}

$("model").addEventListener("change", () => {
  sessionStorage.setItem("engine.model", $("model").value);
  showDefaults();
});

startChat({ model: chosenModel, changed: listConversations });
startSidebar();
startLens();
show(wanted());
listModels();
