// What stands within a paragraph: code, emphasis, links. See markdown.js.

import { h } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_URL_CHARS = 2000;
const MAX_LABEL_CHARS = 500;
const DELIMITERS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const SCHEME = /^(https?:\/\/|mailto:)[^\s]/i;
const BARE_URL = /https?:\/\/[^\s<>"'`\\|{}^]{1,2000}/iy;

// The nodes of a text.
export function inline(text, depth = 0) {
  return new Scanner(text, depth).nodes();
}

class Scanner {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.found = [];
    // Ends that were looked for in vain: there is none further on either.
    this.missing = new Set();
  }

  nodes() {
    while (this.at < this.text.length) {
      if (!this.special()) {
        this.plain += this.text[this.at];
        this.at += 1;
      }
    }
    this.flush();
    return this.found;
  }

  // Takes what begins here, unless it is a plain character.
  special() {
    switch (this.text[this.at]) {
      case "\\":
        return this.escaped();
      case "\n":
        return this.push(h("br"), this.at + 1);
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.emphasis();
      case "!":
        return this.text[this.at + 1] === "[" && this.link(this.at + 1, "image: ");
      case "[":
        return this.link(this.at, "");
      case "<":
        return this.bracketedLink();
      case "h":
      case "H":
        return this.bareLink();
      default:
        return false;
    }
  }

  push(node, end) {
    this.flush();
    this.found.push(node);
    this.at = end;
    return true;
  }

  flush() {
    if (this.plain) this.found.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  // The place of `end` from `from` on for which `fits` holds; -1 if there is none.
  search(end, from, fits = () => true) {
    if (this.missing.has(end)) return -1;
    for (let at = this.text.indexOf(end, from); at !== -1; at = this.text.indexOf(end, at + 1)) {
      if (fits(at)) return at;
    }
    this.missing.add(end);
    return -1;
  }

  // The place of `end` among the next characters; -1 if it is not there.
  near(end, from, maxChars) {
    const at = this.text.slice(from, from + maxChars).indexOf(end);
    return at === -1 ? -1 : from + at;
  }

  escaped() {
    const next = this.text[this.at + 1];
    if (next === undefined || !PUNCTUATION.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  run(char, at) {
    let end = at;
    while (this.text[end] === char) end += 1;
    return end - at;
  }

  code() {
    const length = this.run("`", this.at);
    const ticks = "`".repeat(length);
    const start = this.at + length;
    const isWhole = (at) => this.text[at - 1] !== "`" && this.text[at + length] !== "`";
    const end = this.search(ticks, start, isWhole);
    if (end === -1) {
      this.plain += ticks;
      this.at = start;
      return true;
    }
    let code = this.text.slice(start, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    return this.push(h("code", {}, code), end + length);
  }

  emphasis() {
    const char = this.text[this.at];
    const length = Math.min(this.run(char, this.at), 2);
    const mark = char.repeat(length);
    const start = this.at + length;
    const tag = DELIMITERS[mark];
    const opens = tag && this.depth < MAX_DEPTH && this.isText(start) && !this.isInWord(char, this.at - 1);
    const end = opens ? this.search(mark, start + 1, (at) => this.closes(char, length, at)) : -1;
    if (end === -1) {
      this.plain += mark;
      this.at = start;
      return true;
    }
    const inner = inline(this.text.slice(start, end), this.depth + 1);
    return this.push(h(tag, {}, inner), end + length);
  }

  isText(at) {
    return at < this.text.length && at >= 0 && this.text[at].trim() !== "";
  }

  // Whether an underscore stands within a word, as in a name of a variable.
  isInWord(char, neighbour) {
    return char === "_" && neighbour >= 0 && WORD.test(this.text[neighbour] ?? "");
  }

  closes(char, length, at) {
    // Of a longer run of marks the last two end what two marks began.
    const next = this.text[at + length];
    const isEnd = next !== char && (length === 2 || this.text[at - 1] !== char);
    return isEnd && this.isText(at - 1) && !this.isInWord(char, at + length);
  }

  link(open, prefix) {
    const middle = this.near("](", open + 1, MAX_LABEL_CHARS);
    const end = middle === -1 ? -1 : this.near(")", middle + 2, MAX_URL_CHARS);
    if (end === -1) return false;
    const label = this.text.slice(open + 1, middle);
    if (label.includes("[")) return false;
    const target = this.text.slice(middle + 2, end).trim().replace(/[ \n].*$/s, "");
    const words = this.depth < MAX_DEPTH ? inline(label, MAX_DEPTH) : label;
    return this.push(linkTo(target, [prefix, words.length ? words : target]), end + 1);
  }

  bracketedLink() {
    const end = this.near(">", this.at + 1, MAX_URL_CHARS);
    const target = end === -1 ? "" : this.text.slice(this.at + 1, end);
    if (!SCHEME.test(target) || /\s/.test(target)) return false;
    return this.push(linkTo(target, [target]), end + 1);
  }

  bareLink() {
    const before = this.text[this.at - 1];
    if (this.depth >= MAX_DEPTH || (before && WORD.test(before))) return false;
    BARE_URL.lastIndex = this.at;
    const match = BARE_URL.exec(this.text);
    if (!match) return false;
    let target = match[0].replace(/[.,:;!?*_~\]]+$/, "");
    if (target.endsWith(")") && !target.includes("(")) target = target.replace(/\)+$/, "");
    return this.push(linkTo(target, [target]), this.at + target.length);
  }
}

// A link, or its words if it leads to anything but a page or an address of mail.
function linkTo(target, children) {
  if (!SCHEME.test(target)) return h("span", {}, children);
  const attributes = { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" };
  return h("a", attributes, children);
}
