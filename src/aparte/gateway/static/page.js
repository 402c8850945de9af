// A chat with the gateway. Text from the model is only ever put into text nodes.

const get = (id) => document.getElementById(id);
const place = get("conversation");
let messages = [];
let running = null; // the AbortController of the answer under way
let model = "";

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = get("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function complain(text) {
  get("problem").textContent = text;
  get("problem").hidden = !text;
}

async function describe() {
  try {
    const reply = await fetch("/v1/models", { headers: headers() });
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error.message);
    const card = body.data[0];
    model = card.id;
    const where = {
      split: `cut ${card.aparte.cut}: the cloud gets hidden states, from which text can be reconstructed`,
      draft: "draft mode: the cloud sees the text",
      local: "all of it on this machine",
    };
    get("about").textContent = `${model}, ${where[card.aparte.target]}`;
    complain("");
  } catch (error) {
    get("about").textContent = "not connected";
    complain(`${error.message} If this gateway has a key, give it in the settings.`);
  }
}

function add(role, title) {
  const article = element("article", role);
  article.append(element("h2", "", title));
  const text = element("div", "text");
  article.append(text);
  place.append(article);
  return { article, text };
}

// Paragraphs, fenced code and `code`; everything else stays as it was written.
function render(into, source) {
  into.replaceChildren();
  source.split(/^```[^\n]*\n?/m).forEach((part, number) => {
    if (number % 2) {
      const block = element("pre");
      block.tabIndex = 0; // it may scroll
      block.append(element("code", "", part.replace(/\n$/, "")));
      into.append(block);
      return;
    }
    for (const paragraph of part.split(/\n{2,}/)) {
      if (!paragraph.trim()) continue;
      const shown = element("p");
      paragraph.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).forEach((piece) => {
        if (/^`.+`$/.test(piece)) shown.append(element("code", "", piece.slice(1, -1)));
        else if (/^\*\*.+\*\*$/.test(piece)) shown.append(element("strong", "", piece.slice(2, -2)));
        else shown.append(piece);
      });
      into.append(shown);
    }
  });
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      yield JSON.parse(part.slice(6));
    }
  }
}

function request() {
  const number = (id) => Number(get(id).value);
  const system = get("system").value;
  return {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    top_p: number("top_p"),
    seed: number("seed"),
    max_tokens: number("max_tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Where the time of all round trips went, as a bar.
function timeBar(times) {
  const total = times.network + times.device + times.cloud;
  const bar = element("div", "bar");
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("viewBox", "0 0 100 1");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  const words = Object.entries(times).map(([name, ms]) => `${name} ${Math.round(ms)} ms`).join(", ");
  drawing.setAttribute("aria-label", `Time: ${words}`);
  let left = 0;
  for (const [name, ms] of Object.entries(times)) {
    const width = total ? (100 * ms) / total : 0;
    const box = document.createElementNS(space, "rect");
    box.setAttribute("class", name);
    for (const [key, value] of Object.entries({ x: left, y: 0, width, height: 1 })) box.setAttribute(key, value);
    drawing.append(box);
    left += width;
  }
  bar.append(drawing);
  return { bar, words };
}

function summarize(footer, usage, times) {
  const took = usage.aparte;
  const { bar, words } = timeBar(times);
  const shown = took.revealed;
  const seen = {
    hidden_states: `hidden states of ${shown.positions} positions, after ${shown.after_layer} layers; no text`,
    tokens: `text: ${shown.positions} tokens`,
    nothing: "nothing",
  };
  footer.replaceChildren(
    bar,
    element("span", "", `${usage.completion_tokens} tokens in ${took.round_trips} round trips (${took.mat.toFixed(2)} each)`),
    element("span", "", words),
    element("span", "", `${Math.round(took.bytes_up / 1e3)} kB up, ${Math.round(took.bytes_down / 1e3)} kB down`),
    element("span", "", `The cloud saw ${seen[shown.kind]}.`),
  );
}

async function answer() {
  running = new AbortController();
  busy(true);
  complain("");
  const { article, text } = add("assistant", "aparte");
  const trips = element("div", "trips");
  text.append(trips);
  const footer = element("footer");
  article.append(footer);
  const times = { network: 0, device: 0, cloud: 0 };
  let written = "";
  let usage = null;
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      for (const choice of event.choices || []) {
        const piece = choice.delta.content || "";
        written += piece;
        if (!choice.aparte) continue;
        const trip = choice.aparte;
        times.network += trip.rtt_ms;
        times.device += trip.device_ms;
        times.cloud += trip.cloud_ms;
        const span = element("span", "", piece);
        span.title = `round trip ${trip.round_trip}: ${trip.tokens} tokens, ${Math.round(trip.step_ms)} ms`;
        trips.append(span);
        article.scrollIntoView({ block: "end" });
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  }
  running = null;
  busy(false);
  if (!written) {
    article.remove();
    return;
  }
  messages.push({ role: "assistant", content: written });
  finish(article, text, trips, footer, { written, usage, times });
}

function finish(article, text, trips, footer, { written, usage, times }) {
  if (usage) summarize(footer, usage, times);
  else footer.append(element("span", "", "stopped"));
  const formatted = element("div");
  render(formatted, written);
  formatted.hidden = true;
  text.append(formatted);
  const toggle = element("button", "", "Formatted");
  toggle.type = "button";
  toggle.setAttribute("aria-pressed", "false");
  toggle.addEventListener("click", () => {
    formatted.hidden = !formatted.hidden;
    trips.hidden = !formatted.hidden;
    toggle.setAttribute("aria-pressed", String(trips.hidden));
  });
  const again = element("button", "again", "Regenerate");
  again.type = "button";
  again.addEventListener("click", () => {
    if (running || article !== place.lastElementChild) return;
    messages.pop();
    article.remove();
    get("seed").value = Number(get("seed").value) + 1;
    answer();
  });
  footer.append(toggle, again);
}

function busy(is) {
  get("send").hidden = is;
  get("stop").hidden = !is;
}

function ask() {
  const question = get("question").value.trim();
  if (!question || running) return;
  get("question").value = "";
  add("user", "You").text.textContent = question;
  messages.push({ role: "user", content: question });
  answer();
}

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
get("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
get("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
get("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  place.replaceChildren();
  get("question").focus();
});
get("key").addEventListener("change", describe);
describe();
