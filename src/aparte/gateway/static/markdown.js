// Markdown as chat models write it, straight into DOM nodes: text is only ever put into text nodes, and there
// is no HTML in it. Links lead to http, https and mailto; pictures become links, so nothing is loaded.
//
// Every piece of text knows where in the source it stands, so that the caller can mark it (`put`).

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}(?=\S)| *$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /^!?\[([^\]\n]*)\]\(<?([^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:[ \t]+"[^"]*")?\)/;
const BARE_LINK = /^https?:\/\/[^\s<>"`]*[^\s<>"`.,:;!?)\]*_~]/;
const SAFE_LINK = /^(https?:|mailto:)/i;
const MOST = 20000; // characters of a paragraph that are looked at for emphasis

// The blocks of `source`, in order: where each begins and ends, and `build(put)`, which makes its element.
export function blocks(source) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
  return [...parse(lines)];
}

function* parse(lines) {
  let next = 0;
  while (next < lines.length) {
    if (!lines[next].text.trim()) {
      next += 1;
      continue;
    }
    const { until, build } = blockAt(lines, next);
    const last = lines[until - 1];
    yield { start: lines[next].at, end: last.at + last.text.length, build };
    next = until;
  }
}

function blockAt(lines, start) {
  const { text } = lines[start];
  if (FENCE.test(text)) return codeBlock(lines, start);
  if (HEADING.test(text)) return heading(lines, start);
  if (RULE.test(text)) return { until: start + 1, build: () => document.createElement("hr") };
  if (QUOTE.test(text)) return quote(lines, start);
  if (ITEM.test(text)) return list(lines, start);
  if (text.includes("|") && isTableRule(lines[start + 1], text)) return table(lines, start);
  return paragraph(lines, start);
}

function codeBlock(lines, start) {
  const [, fence, language] = FENCE.exec(lines[start].text);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \t]*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end].text)) end += 1; // an open one is still being written
  return {
    until: Math.min(end + 1, lines.length),
    build(put) {
      const figure = make("figure", "code");
      const code = make("code");
      put(code, joined(lines.slice(start + 1, end)));
      const frame = make("pre");
      frame.tabIndex = 0; // it may have to be scrolled
      frame.append(code);
      const head = make("figcaption", "", language || "text");
      const copy = make("button", "copy", "Copy");
      copy.type = "button";
      copy.setAttribute("aria-label", `Copy code${language ? ` (${language})` : ""}`);
      copy.addEventListener("click", () => copyText(code.textContent, copy));
      head.append(copy);
      figure.append(head, frame);
      return figure;
    },
  };
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function heading(lines, start) {
  const line = lines[start];
  const [marker, hashes] = HEADING.exec(line.text);
  const content = strip(line, marker.length);
  content.text = content.text.replace(/[ \t]+#*[ \t]*$/, "");
  return {
    until: start + 1,
    build(put) {
      const made = make(`h${Math.min(hashes.length + 2, 6)}`); // the page's own headings are above
      inline(made, joined([content]), put);
      return made;
    },
  };
}

function quote(lines, start) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
  const inner = lines.slice(start, end).map((line) => strip(line, QUOTE.exec(line.text)[0].length));
  return { until: end, build: (put) => filled(make("blockquote"), inner, put) };
}

function list(lines, start) {
  const [, , first] = ITEM.exec(lines[start].text);
  const ordered = /\d/.test(first);
  const items = [];
  let loose = false;
  let next = start;
  while (next < lines.length) {
    const match = ITEM.exec(lines[next].text);
    if (!match || /\d/.test(match[2]) !== ordered || RULE.test(lines[next].text)) break;
    const indent = match[1].length + match[2].length + Math.max(1, match[3].length);
    const item = [strip(lines[next], indent)];
    next += 1;
    while (next < lines.length) {
      const { text } = lines[next];
      const inside = text.trim() ? /^ */.exec(text)[0].length >= Math.min(indent, 2) : isInside(lines, next, indent);
      if (!inside) break;
      item.push(strip(lines[next], Math.min(indent, /^ */.exec(text)[0].length)));
      next += 1;
    }
    while (item.length && !item.at(-1).text.trim()) item.pop();
    loose ||= item.some((line) => !line.text.trim());
    items.push(item);
    let after = next; // a blank line between items
    while (after < lines.length && !lines[after].text.trim()) after += 1;
    if (after > next && after < lines.length && ITEM.test(lines[after].text)) next = after;
  }
  return {
    until: next,
    build(put) {
      const made = make(ordered ? "ol" : "ul");
      if (ordered && parseInt(first, 10) !== 1) made.start = parseInt(first, 10);
      for (const item of items) made.append(filled(make("li"), item, put, !loose));
      return made;
    },
  };
}

function isInside(lines, blank, indent) {
  const next = lines.slice(blank).find((line) => line.text.trim());
  return next !== undefined && /^ */.exec(next.text)[0].length >= indent;
}

function isTableRule(line, head) {
  return line !== undefined && TABLE_RULE.test(line.text) && cells(line).length === cells({ text: head, at: 0 }).length;
}

function table(lines, start) {
  let end = start + 2;
  while (end < lines.length && lines[end].text.includes("|")) end += 1;
  const width = cells(lines[start]).length;
  const align = cells(lines[start + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "middle" : "end") : ""));
  return {
    until: end,
    build(put) {
      const made = make("table");
      for (const [number, line] of [lines[start], ...lines.slice(start + 2, end)].entries()) {
        const row = make("tr");
        for (const [column, cell] of cells(line).slice(0, width).entries()) {
          const box = make(number ? "td" : "th", align[column] || "");
          inline(box, joined([cell]), put);
          row.append(box);
        }
        made.append(row);
      }
      const frame = make("div", "table");
      frame.tabIndex = 0;
      frame.append(made);
      return frame;
    },
  };
}

function cells(line) {
  const found = [];
  let from = 0;
  for (let index = 0; index <= line.text.length; index += 1) {
    if (index < line.text.length && (line.text[index] !== "|" || line.text[index - 1] === "\\")) continue;
    const raw = line.text.slice(from, index);
    found.push({ text: raw.trim(), at: line.at + from + raw.length - raw.trimStart().length });
    from = index + 1;
  }
  if (!found[0].text) found.shift();
  if (found.length && !found.at(-1).text) found.pop();
  return found;
}

function paragraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].text.trim() && !interrupts(lines[end].text)) end += 1;
  return {
    until: end,
    build(put) {
      const made = make("p");
      inline(made, joined(lines.slice(start, end)), put);
      return made;
    },
  };
}

function interrupts(text) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(text));
}

// -- inside of a paragraph -------------------------------------------------------------------------

function inline(into, text, put) {
  if (text.text.length > MOST) {
    put(into, text);
    return;
  }
  let plain = 0; // everything from here to `at` is as it is
  let at = 0;
  const flush = () => plain < at && put(into, cut(text, plain, at));
  const skip = (length) => {
    at += length;
    plain = at;
  };
  while (at < text.text.length) {
    const found = markAt(text, at);
    if (!found) {
      at += 1;
      continue;
    }
    flush();
    if (found.tag) {
      const made = make(found.tag);
      if (found.href) {
        made.href = found.href;
        made.rel = "noopener noreferrer";
        made.target = "_blank";
      }
      const content = cut(text, at + found.from, at + found.to);
      if (found.literal) put(made, content);
      else inline(made, content, put);
      into.append(made);
    } else {
      put(into, cut(text, at + found.from, at + found.to));
    }
    skip(found.length);
  }
  flush();
}

// What begins at `at`: its element, where its content is, and how long it is; null if nothing does.
function markAt({ text }, at) {
  const char = text[at];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")) return { from: 1, to: 2, length: 2 };
  if (char === "`") return codeAt(text, at);
  if (char === "*" || char === "_" || char === "~") return emphasisAt(text, at);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return linkAt(text, at);
  if (char === "h" && !/\w/.test(text[at - 1] || "")) {
    const match = BARE_LINK.exec(text.slice(at, at + 2000));
    if (match) return { tag: "a", href: match[0], from: 0, to: match[0].length, length: match[0].length, literal: true };
  }
  return null;
}

function codeAt(text, at) {
  const ticks = /^`+/.exec(text.slice(at))[0].length;
  const close = new RegExp(`(?<!\`)\`{${ticks}}(?!\`)`, "g");
  close.lastIndex = at + ticks;
  const end = close.exec(text);
  if (!end) return { from: 0, to: ticks, length: ticks };
  let [from, to] = [ticks, end.index - at];
  if (to - from > 2 && text[at + from] === " " && text[at + to - 1] === " ") [from, to] = [from + 1, to - 1];
  return { tag: "code", from, to, length: end.index - at + ticks, literal: true };
}

function emphasisAt(text, at) {
  const char = text[at];
  const run = /^(.)\1*/.exec(text.slice(at, at + 4))[0].length;
  const whole = { from: 0, to: run, length: run };
  if (run > 3 || (char === "~" && run !== 2)) return whole;
  const size = run === 3 ? 2 : run; // three are two around one
  if (/\s/.test(text[at + run] || " ")) return whole;
  if (char === "_" && /\w/.test(text[at - 1] || "")) return whole;
  const mark = char.repeat(size);
  for (let end = text.indexOf(mark, at + run); end >= 0; end = text.indexOf(mark, end + 1)) {
    let after = end + size;
    if (size === 1 && (text[end + 1] === char || text[end - 1] === char)) continue;
    while (run === 3 && text[after] === char) after += 1; // the outer one is the last
    if (/\s/.test(text[end - 1]) || (char === "_" && /\w/.test(text[after] || ""))) continue;
    const tag = char === "~" ? "del" : size === 2 ? "strong" : "em";
    return { tag, from: size, to: after - size - at, length: after - at };
  }
  return whole;
}

function linkAt(text, at) {
  const match = LINK.exec(text.slice(at, at + 4000));
  if (!match || !SAFE_LINK.test(match[2])) return null;
  const from = match[0].indexOf("[") + 1;
  if (!match[1]) return { tag: "a", href: match[2], from: from + 2, to: from + 2 + match[2].length, length: match[0].length, literal: true };
  return { tag: "a", href: match[2], from, to: from + match[1].length, length: match[0].length };
}

// -- text that knows where it comes from -----------------------------------------------------------

// Lines as one text, with the place in the source of every character.
function joined(lines) {
  const at = [];
  for (const [number, line] of lines.entries()) {
    if (number) at.push(lines[number - 1].at + lines[number - 1].text.length);
    for (let index = 0; index < line.text.length; index += 1) at.push(line.at + index);
  }
  return { text: lines.map((line) => line.text).join("\n"), at };
}

function cut({ text, at }, from, to) {
  return { text: text.slice(from, to), at: at.slice(from, to) };
}

function strip(line, width) {
  return { text: line.text.slice(width), at: line.at + width };
}

function filled(into, lines, put, tight = false) {
  for (const block of parse(lines)) {
    const made = block.build(put);
    if (tight && made.tagName === "P") into.append(...made.childNodes);
    else into.append(made);
  }
  return into;
}

export function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
