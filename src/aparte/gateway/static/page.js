// The chat: what is said, the settings, the keys. Nothing of what is said is stored anywhere.

import { answer, describe, useKey } from "./api.js";
import { Answer, Question } from "./answer.js";
import { make } from "./markdown.js";

const get = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
const KEPT = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "frequency_penalty", "presence_penalty"];

let card = null; // what the gateway says of its model
let messages = [];
let running = null; // the AbortController of the answer under way
let last = null; // the latest question and answer

// -- the model -------------------------------------------------------------------------------------

async function connect() {
  try {
    card = await describe();
  } catch (error) {
    get("about").textContent = "not connected";
    complain(error, connect);
    return;
  }
  settle();
  const { target, cut, defence, pseudonyms } = card.aparte;
  const where = {
    split: `cut ${cut}: the first and last layers run here, the middle on the cloud`,
    draft: "draft mode: the cloud runs the model and sees the text",
    local: "all of it on this machine",
  }[target];
  const more = [defence === "none" ? "" : `, ${defence} on what is sent`, pseudonyms ? ", names replaced" : ""];
  get("about").replaceChildren(make("strong", "", card.id), ` · ${where}${more.join("")}`);
}

// -- what went wrong -------------------------------------------------------------------------------

function settle() {
  for (const problem of document.querySelectorAll(".problem")) problem.remove();
}

function complain(error, again) {
  settle();
  const box = make("div", "problem");
  box.setAttribute("role", "alert");
  box.append(make("p", "", error.message));
  const button = (name, act) => {
    const made = make("button", "", name);
    made.type = "button";
    made.addEventListener("click", act);
    box.append(made);
  };
  if (error.status === 401) button("Give the key", () => openSettings("key"));
  button("Try again", again);
  get("messages").append(box);
  box.scrollIntoView({ block: "nearest" });
}

// -- asking ----------------------------------------------------------------------------------------

function request() {
  const body = { model: card.id, messages };
  const system = get("system").value.trim();
  if (system) body.messages = [{ role: "system", content: system }, ...messages];
  for (const id of KEPT) if (get(id).value !== "") body[id] = Number(get(id).value);
  const stop = get("stop_strings").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  return body;
}

function ask() {
  const text = get("prompt").value.trim();
  if (!text || running) return;
  get("prompt").value = "";
  grow();
  get("welcome").hidden = true;
  messages.push({ role: "user", content: text });
  const question = new Question(text);
  get("messages").append(question.article);
  write(question);
}

async function write(question) {
  settle();
  last?.again?.remove();
  if (!card) await connect();
  if (!card) return;
  const shown = new Answer(card, question);
  last = shown;
  get("messages").append(shown.article);
  follow(true);
  running = new AbortController();
  busy(true);
  let failure = null;
  try {
    for await (const chunk of answer(request(), running.signal)) {
      if ("comment" in chunk) shown.comment(chunk.comment);
      else shown.take(chunk);
      follow();
    }
  } catch (error) {
    failure = error;
  }
  running = null;
  busy(false);
  end(shown, question, failure);
}

function end(shown, question, failure) {
  const stopped = failure?.name === "AbortError";
  shown.finish(failure && (stopped ? "stopped" : "failed"));
  if (!shown.article.isConnected) return; // a new conversation was begun meanwhile
  const again = () => {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    shown.article.remove();
    write(question);
  };
  if (shown.text) messages.push({ role: "assistant", content: shown.text });
  else if (!shown.trips.length) shown.article.remove();
  if (failure && !stopped) complain(failure, again);
  if (shown.actions) shown.again = shown.action("Regenerate", again);
  else if (stopped) complain({ message: "Stopped before anything was written." }, again);
  announce(failure ? "The answer ended early." : `Answered: ${shown.text.slice(0, 400)}`);
  follow();
}

function busy(is) {
  get("send").hidden = is;
  get("stop").hidden = !is;
  get("messages").setAttribute("aria-busy", String(is));
  if (is) announce("The answer is being written.");
}

function announce(text) {
  get("announce").textContent = text;
}

// Keep the end in sight, unless somebody scrolled away from it.
let atEnd = true;
function follow(always = false) {
  if (always || atEnd) window.scrollTo(0, document.documentElement.scrollHeight);
}
window.addEventListener("scroll", () => {
  atEnd = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 80;
});

function grow() {
  const box = get("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, window.innerHeight / 3)}px`;
}

function newConversation() {
  running?.abort();
  messages = [];
  last = null;
  get("messages").replaceChildren();
  get("welcome").hidden = false;
  get("prompt").focus();
}

// -- settings: those of sampling and the looks are kept in this browser, nothing else ---------------

function recall(name) {
  try {
    return localStorage.getItem(`aparte.${name}`);
  } catch {
    return null; // not allowed here
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`aparte.${name}`, value);
  } catch {
    // Then they hold until the page is left.
  }
}

function openSettings(field) {
  get("settings").showModal();
  get(field || "temperature").focus();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  get("theme").textContent = `Theme: ${theme}`;
  keep("theme", theme);
}

function setMarks(on) {
  document.body.classList.toggle("marks", on);
  get("marks").setAttribute("aria-pressed", String(on));
  keep("marks", on ? "on" : "off");
}

for (const id of KEPT) {
  get(id).value = recall(id) ?? get(id).value;
  get(id).addEventListener("change", () => keep(id, get(id).value));
}
setTheme(THEMES.includes(recall("theme")) ? recall("theme") : "auto");
setMarks(recall("marks") !== "off");

get("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
get("marks").addEventListener("click", () => setMarks(!document.body.classList.contains("marks")));
get("open-settings").addEventListener("click", () => openSettings());
get("close-settings").addEventListener("click", () => get("settings").close());
get("settings").addEventListener("close", () => {
  useKey(get("key").value);
  get("prompt").focus();
  if (!card) connect();
});
get("defaults").addEventListener("click", () => {
  for (const id of KEPT) {
    get(id).value = get(id).defaultValue;
    keep(id, get(id).value);
  }
});

// -- keys and clicks -------------------------------------------------------------------------------

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
get("prompt").addEventListener("input", grow);
get("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
get("stop").addEventListener("click", () => running?.abort());
get("new").addEventListener("click", newConversation);
document.addEventListener("keydown", (event) => {
  if (get("settings").open) return;
  if (event.key === "Escape") running?.abort();
  const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    get("prompt").focus();
  }
});
for (const example of document.querySelectorAll("#welcome button")) {
  example.addEventListener("click", () => {
    get("prompt").value = example.textContent;
    ask();
  });
}
connect();
