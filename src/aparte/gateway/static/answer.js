// One question and one answer on the page, with what the cloud saw of each beside it.

import { blocks, copyText, make } from "./markdown.js";
import { allParts, bytes, sample, strip, timeBar, tripTable } from "./seen.js";

const ENDS = { length: "cut off at the most tokens allowed", stopped: "stopped", failed: "unfinished" };
const FOUND = "connection lost and found again"; // said from then on

function columns(article, text) {
  const seen = make("aside", "seen");
  seen.hidden = true;
  const row = make("div", "columns");
  row.append(text, seen);
  article.append(row);
  return seen;
}

// A heading and strips in the panel `seen`; `groups` as for strip().
function showStrip(seen, heading, groups, words) {
  seen.hidden = false;
  seen.replaceChildren(make("h3", "", heading));
  if (groups.some(({ norms }) => norms.length)) seen.append(strip(groups));
  for (const text of words) seen.append(typeof text === "string" ? make("p", "", text) : text);
}

// Words of the gateway, which may have code in them.
function formatted(text, className) {
  return blocks(text).map((block) => {
    const element = block.build((into, piece) => into.append(piece.text));
    element.className = className;
    return element;
  });
}

export class Question {
  constructor(text) {
    this.article = make("article", "question");
    this.article.append(make("h2", "", "You"));
    this.seen = columns(this.article, make("div", "text", text));
    this.isShown = false;
  }

  // What the first round trip sent for it, and for what came before it since the last answer.
  show(norms, width, size) {
    this.isShown = true;
    const states = norms.length === 1 ? "1 new hidden state" : `${norms.length} new hidden states`;
    const words = `${states} of the prompt: ${norms.length} × ${width} numbers, ${bytes(size)}`;
    showStrip(this.seen, "What the cloud saw", [{ trip: 0, norms }], [words]);
  }
}

export class Answer {
  constructor(card, question) {
    this.card = card;
    this.question = question;
    this.text = "";
    this.trips = [];
    this.usage = null;
    this.ends = []; // where in the text each round trip's tokens end
    this.groups = []; // lengths of what was sent, by round trip
    this.found = false;
    this.sent = { messages: 0, positions: 0, last: null };
    this.shown = []; // the blocks on the page
    this.started = performance.now();

    this.article = make("article", "answer");
    const head = make("h2", "", "aparte ");
    this.state = make("span", "state", "sending …");
    head.append(this.state);
    this.article.append(head);
    const main = make("div", "main");
    this.body = make("div", "text");
    this.under = make("footer");
    main.append(this.body, this.under);
    this.seen = columns(this.article, main);
    this.body.addEventListener("pointerover", (event) => this.#point(event.target.dataset.trip));
    this.body.addEventListener("pointerleave", () => this.#point());
  }

  // A comment of the stream: signs of life while nothing is written.
  comment(text) {
    const read = /^reading the prompt, (\d+) of (\d+)/.exec(text);
    if (read) this.state.textContent = `reading the prompt, ${read[1]} of ${read[2]} tokens …`;
    else if (text === "keep-alive") this.state.textContent = "waiting for the cloud …";
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      this.text += choice.delta.content || "";
      if (choice.finish_reason) this.reason = choice.finish_reason;
      if (choice.aparte) this.#trip(choice.aparte);
      else if (this.ends.length) this.ends[this.ends.length - 1] = this.text.length; // held back until the end
    }
    this.#drawSoon();
  }

  #trip(trip) {
    this.firstMs ??= performance.now() - this.started;
    this.trips.push(trip);
    this.ends.push(this.text.length);
    this.found ||= trip.reconnects > 0;
    this.state.textContent = this.found ? FOUND : "";
    const norms = trip.sent.flatMap((message) => message.norms);
    this.sent.messages += trip.sent.length;
    this.sent.positions += norms.length;
    this.sent.last = trip.sent.at(-1) || this.sent.last;
    if (trip.round_trip === 1 && norms.length) {
      const share = 1 - trip.drafted / norms.length;
      const size = Math.round(share * trip.sent.reduce((sum, message) => sum + message.bytes_up, 0));
      const prompt = norms.splice(0, norms.length - trip.drafted);
      if (this.question.isShown) this.groups.push({ trip: 0, norms: prompt });
      else this.question.show(prompt, this.sent.last.width, size);
    }
    this.groups.push({ trip: trip.round_trip, norms });
  }

  // The answer ended; `why` is a key of ENDS, or nothing if all is well.
  finish(why) {
    this.state.textContent = [ENDS[why || this.reason], this.found && FOUND].filter(Boolean).join("; ");
    this.article.classList.add("done");
    this.#draw();
    this.#account();
  }

  // -- the text ----------------------------------------------------------------------------------

  #drawSoon() {
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    const made = blocks(this.text);
    // What is settled stays: text that somebody selects, or code that is scrolled.
    const same = this.shown.findIndex(({ source }, place) => source !== this.#source(made[place]));
    const kept = same < 0 ? this.shown.length : same;
    for (const { element } of this.shown.splice(kept)) element.remove();
    for (const block of made.slice(kept)) {
      const element = block.build((into, text) => this.#put(into, text));
      this.body.append(element);
      this.shown.push({ source: this.#source(block), element });
    }
    this.#line();
    this.#saw();
  }

  #source(block) {
    if (!block) return null;
    // A block at the end may grow, and its last round trip with it.
    return block.end >= this.text.length - 1 ? `${this.ends.length} ${this.text.length}` : this.text.slice(block.start, block.end);
  }

  // Text with the round trips that it came in.
  #put(into, { text, at }) {
    let from = 0;
    while (from < text.length) {
      const trip = this.ends.findIndex((end) => end > at[from]);
      let to = from + 1;
      while (to < text.length && (trip < 0 || at[to] < this.ends[trip])) to += 1;
      const span = make("span", trip % 2 ? "trip even" : "trip odd", text.slice(from, to));
      span.dataset.trip = trip + 1;
      into.append(span);
      from = to;
    }
  }

  #point(trip) {
    for (const lit of this.article.querySelectorAll(".lit")) lit.classList.remove("lit");
    if (!trip || !this.pointed) return;
    for (const one of this.article.querySelectorAll(`[data-trip="${trip}"]`)) one.classList.add("lit");
    const { tokens, step_ms: ms } = this.trips[trip - 1] || {};
    if (tokens) this.pointed.textContent = `Round trip ${trip}: ${tokens} tokens in ${Math.round(ms)} ms.`;
  }

  // -- what it took, and what was seen -----------------------------------------------------------

  #line() {
    const tokens = this.trips.reduce((sum, trip) => sum + trip.tokens, 0);
    if (!tokens) return;
    const elapsed = performance.now() - this.started;
    // The whole answer's account comes at its end, and knows more of the link.
    const parts = this.usage?.aparte.parts || allParts(this.trips.map((trip) => trip.parts));
    this.elapsed = this.article.classList.contains("done") ? (this.elapsed ?? elapsed) : elapsed;
    const trips = this.trips.length;
    const numbers = make("p", "numbers");
    for (const [value, unit] of [
      [tokens, tokens === 1 ? "token" : "tokens"],
      [trips, trips === 1 ? "round trip" : "round trips"],
      [(tokens / trips).toFixed(2), "tokens per round trip"],
      [(tokens / (this.elapsed / 1000)).toFixed(1), "tokens/s"],
      [(this.firstMs / 1000).toFixed(1), "s to the first"],
    ]) {
      const part = make("span");
      part.append(make("strong", "", String(value)), ` ${unit}`);
      numbers.append(part);
    }
    this.under.replaceChildren(numbers, timeBar(parts));
  }

  #saw() {
    if (!this.trips.length) return;
    const { target, verdict } = this.card.aparte;
    const up = this.trips.reduce((sum, trip) => sum + trip.bytes_up, 0);
    const down = this.trips.reduce((sum, trip) => sum + trip.bytes_down, 0);
    const traffic = `${bytes(up)} up, ${bytes(down)} down`;
    const words = { local: ["Nothing: the whole model is on this machine."], draft: [`The text itself: ${traffic}.`] }[target] || [
      `${this.sent.positions} hidden states in ${this.sent.messages} messages, rejected drafts included: ${traffic}`,
    ];
    if (this.sent.last) words.push(sample(this.sent.last.sample));
    const replaced = this.usage?.aparte.pseudonyms;
    if (replaced) words.push(`${replaced} ${replaced === 1 ? "name or number was" : "names and numbers were"} replaced before that.`);
    if (verdict) words.push(...formatted(verdict, "verdict"));
    showStrip(this.seen, "What the cloud saw", this.groups, words);
  }

  #account() {
    if (!this.trips.length) return;
    const details = make("details");
    details.append(make("summary", "", "Every round trip"));
    const frame = make("div", "table");
    frame.tabIndex = 0;
    frame.append(tripTable(this.trips));
    details.append(frame);
    this.actions = make("div", "actions");
    this.pointed = make("span", "pointed");
    const copy = this.action("Copy", () => copyText(this.text, copy));
    this.actions.append(this.pointed);
    this.under.append(this.actions, details);
  }

  action(name, act) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", act);
    this.actions.prepend(button);
    return button;
  }
}
