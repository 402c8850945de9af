// What left this device, drawn: the lengths of the hidden states that were sent, and where the time went.

import { make } from "./markdown.js";

const SPACE = "http://www.w3.org/2000/svg";
const MOST_BARS = 240;

export function bytes(count) {
  if (count < 1000) return `${count} B`;
  return count < 1e6 ? `${(count / 1e3).toFixed(count < 1e4 ? 1 : 0)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}

export function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function drawing(label, width, height) {
  const made = document.createElementNS(SPACE, "svg");
  made.setAttribute("viewBox", `0 0 ${width} ${height}`);
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  return made;
}

function shape(name, className, attributes) {
  const made = document.createElementNS(SPACE, name);
  made.setAttribute("class", className);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A bar per position; `groups` are lists of lengths by round trip, number 0 is the prompt.
export function strip(groups) {
  const all = groups.flatMap(({ trip, norms }) => norms.map((norm) => ({ trip, norm })));
  const [low, high] = [Math.min(...all.map(({ norm }) => norm)), Math.max(...all.map(({ norm }) => norm))];
  const step = Math.max(1, Math.ceil(all.length / MOST_BARS));
  const bars = all.filter((_, index) => index % step === 0);
  const span = Math.log(high / low) || 1;
  const paths = { prompt: "", even: "", odd: "" };
  for (const [place, { trip, norm }] of bars.entries()) {
    const height = 4 + 20 * (low > 0 ? Math.log(norm / low) / span : norm / high);
    const name = trip === 0 ? "prompt" : trip % 2 ? "odd" : "even";
    paths[name] += `M${place} 24v${-height.toFixed(2)}h.8v${height.toFixed(2)}z`;
  }
  const label = `${all.length} hidden states, with lengths from ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
  const made = drawing(label, Math.max(bars.length, 32), 24);
  made.classList.add("strip");
  for (const [name, d] of Object.entries(paths)) if (d) made.append(shape("path", name, { d }));
  return made;
}

// The first bytes of a state, in pairs.
export function sample(hex) {
  const made = make("p", "sample");
  made.append(make("span", "", "The last one begins "), make("code", "", hex.replace(/(....)/g, "$1 ").trim()));
  return made;
}

// What the parts of an answer's time are called; together they are all of it.
const PARTS = {
  latency: "network",
  up: "upload",
  down: "download",
  device: "this device",
  codec: "number formats",
  cloud: "cloud",
  queue: "cloud's queue",
  rest: "the rest",
};

// The parts of several round trips together.
export function allParts(trips) {
  const sum = {};
  for (const parts of trips) for (const [name, ms] of Object.entries(parts)) sum[name] = (sum[name] || 0) + ms;
  return sum;
}

// Where the time of an answer went, as a bar and in words.
export function timeBar(parts) {
  const shown = Object.keys(PARTS).filter((name) => parts.mbps || (name !== "up" && name !== "down"));
  const took = (name) => parts[`${name}_ms`];
  const words = shown.map((name) => `${PARTS[name]} ${seconds(took(name))}`);
  const whole = `${seconds(parts.total_ms)} in all`;
  const bar = drawing(`Time: ${words.join(", ")}; ${whole}`, 100, 1);
  bar.classList.add("bar");
  const legend = make("ul", "legend");
  let left = 0;
  for (const [place, name] of shown.entries()) {
    const width = parts.total_ms ? (100 * took(name)) / parts.total_ms : 0;
    bar.append(shape("rect", name, { x: left, y: 0, width, height: 1 }));
    left += width;
    legend.append(make("li", name, words[place]));
  }
  legend.append(make("li", "whole", whole));
  const made = make("div", "times");
  made.append(bar, legend);
  return made;
}

// Every round trip as a row.
export function tripTable(trips) {
  const made = make("table");
  const head = make("tr");
  for (const name of ["trip", "tokens", "drafted", "network", "device", "cloud", "up", "down"]) {
    const cell = make("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  made.append(head);
  for (const trip of trips) {
    const row = make("tr", trip.round_trip % 2 ? "odd" : "even");
    row.dataset.trip = trip.round_trip;
    const number = make("th", "", String(trip.round_trip));
    number.scope = "row";
    const values = [
      trip.tokens,
      trip.drafted,
      seconds(trip.rtt_ms),
      seconds(trip.device_ms),
      seconds(trip.cloud_ms + trip.queue_ms),
      bytes(trip.bytes_up),
      bytes(trip.bytes_down),
    ];
    row.append(number, ...values.map((value) => make("td", "", String(value))));
    made.append(row);
  }
  return made;
}
