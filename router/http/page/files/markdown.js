// Markdown as elements. A text becomes text nodes and elements of the kinds below, never markup, so
// that nothing in it can run. Links lead to http, https and mailto alone; images become links, as
// loading one would tell its server of the conversation. The time is linear in the text's length.

import { h } from "./dom.js";
import { inline } from "./inline.js";

const MAX_CHARS = 400000;
const MAX_DEPTH = 6;
const MAX_CELLS = 5000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: (.*))?$/;

// A text that grows: blocks that stay the same keep their elements.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  // Shows a text in place of the earlier one.
  update(text) {
    if (text.length > MAX_CHARS) {
      this.sources = [];
      this.element.replaceChildren(h("pre", {}, text));
      return;
    }
    const blocks = blocksOf(text.replaceAll("\r\n", "\n").split("\n"), 0);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(block.element());
    this.sources = blocks.map((block) => block.source);
  }
}

// The blocks of some lines, each with its source and a function that makes its element.
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [end, element] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), element });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => headingOf(heading)];
  if (isRule(line)) return [at + 1, () => h("hr")];
  if (depth < MAX_DEPTH && line.startsWith(">")) return quoteAt(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at, depth);
}

function codeAt(lines, at, fence) {
  const [, ticks, info] = fence;
  const indent = lines[at].length - lines[at].trimStart().length;
  let end = at + 1;
  while (end < lines.length && !isFenceEnd(lines[end], ticks)) end += 1;
  const body = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent));
  return [Math.min(end + 1, lines.length), () => codeBlock(body.join("\n"), info.trim())];
}

function isFenceEnd(line, ticks) {
  const text = line.trim();
  return text.length >= ticks.length && text === ticks[0].repeat(text.length);
}

// A block of code, with its language and a button that copies it.
export function codeBlock(code, language) {
  const copy = h("button", { type: "button", class: "small", "data-action": "copy-code" }, "Copy");
  const head = h("figcaption", { class: "row small dim" },
    h("span", { class: "grow" }, language.slice(0, 40) || "code"), copy);
  return h("figure", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, code)));
}

function headingOf([, marks, text]) {
  // The page's own headings are h1 and h2.
  return h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(text.replace(/ #+ *$/, "")));
}

function isRule(line) {
  const text = line.replaceAll(" ", "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, ""));
  return [end, () => h("blockquote", {}, elementsOf(inner, depth + 1))];
}

function elementsOf(lines, depth) {
  return blocksOf(lines, depth).map((block) => block.element());
}

function listAt(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = marker.length > 1;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1 && !isRule(lines[end])) {
      if (item[2].length > 1 !== isOrdered || item[1].length < indent.length) break;
      items.push([item[3] ?? ""]);
    } else if (!continuesItem(lines, end, indent.length)) {
      break;
    } else {
      items.at(-1).push(withoutIndent(lines[end], indent.length + marker.length + 1));
    }
    end += 1;
  }
  return [end, () => listOf(items, isOrdered ? Number.parseInt(marker, 10) : null, depth)];
}

// Whether a line that begins no item of this list belongs to its last one.
function continuesItem(lines, at, indent) {
  if (lines[at].trim() === "") return at + 1 < lines.length && isIndented(lines[at + 1], indent + 1);
  return isIndented(lines[at], indent + 1) || (lines[at - 1].trim() !== "" && isPlain(lines[at]));
}

function isIndented(line, width) {
  return line.trim() !== "" && line.length - line.trimStart().length >= width;
}

// Whether a line begins nothing but a paragraph.
function isPlain(line) {
  const startsBlock = FENCE.test(line) || HEADING.test(line) || isRule(line) || ITEM.test(line);
  return line.trim() !== "" && !startsBlock && !line.startsWith(">");
}

function withoutIndent(line, width) {
  const indent = line.length - line.trimStart().length;
  return line.slice(Math.min(indent, width));
}

function listOf(items, start, depth) {
  const children = items.map((lines) => h("li", {}, itemChildren(lines, depth)));
  return start === null ? h("ul", {}, children) : h("ol", { start: start === 1 ? null : start }, children);
}

// A first paragraph needs no element of its own, which would have a margin.
function itemChildren(lines, depth) {
  const nodes = elementsOf(lines, depth + 1);
  const isTight = nodes[0]?.nodeName === "P";
  return isTight ? [[...nodes[0].childNodes], nodes.slice(1)] : nodes;
}

function cellsOf(line) {
  const cells = line.trim().replaceAll("\\|", "\u0000").split("|");
  if (cells[0].trim() === "") cells.shift();
  if (cells.length && cells.at(-1).trim() === "") cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\u0000", "|"));
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  const isDelimiter = marks.length > 0 && marks.every((mark) => /^:?-+:?$/.test(mark));
  return isDelimiter && marks.length === cellsOf(lines[at]).length && lines[at + 1].includes("|");
}

function tableAt(lines, at) {
  const head = cellsOf(lines[at]);
  const maxRows = Math.floor(MAX_CELLS / head.length);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && end - at < maxRows) end += 1;
  const aligns = cellsOf(lines[at + 1]).map(alignOf);
  return [end, () => tableOf(head, lines.slice(at + 2, end), aligns)];
}

function alignOf(mark) {
  if (!mark.endsWith(":")) return null;
  return mark.startsWith(":") ? "center" : "right";
}

function tableOf(head, lines, aligns) {
  const row = (cells, tag) =>
    h("tr", {}, aligns.map((align, i) => h(tag, { class: align }, inline(cells[i] ?? ""))));
  const body = lines.map((line) => row(cellsOf(line), "td"));
  const table = h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, body));
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && continuesParagraph(lines, end, depth)) end += 1;
  return [end, () => h("p", {}, inline(lines.slice(at, end).join("\n")))];
}

function continuesParagraph(lines, at, depth) {
  if (lines[at].trim() === "" || isTable(lines, at)) return false;
  return isPlain(lines[at]) || (depth >= MAX_DEPTH && !FENCE.test(lines[at]));
}
