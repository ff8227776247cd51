// Markdown within a block: code, bold, italics, strikethrough, links, math, escapes.
//
// `inlineOf(text)` returns nodes: {kind: "text" | "code" | "math", from, to} with a range of the
// text, or {kind: "strong" | "em" | "del" | "link", nodes, href?}.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const URL_TEXT = /https?:\/\/[^\s<>]+/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]+)>/y;
const KINDS = { 1: "em", 2: "strong" };
const MAX_DEPTH = 16;

// Returns the address if it may be opened: http and https only.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

export function inlineOf(text, from = 0, to = text.length, depth = 0) {
  return new Reader(text, from, to, depth).read();
}

class Reader {
  nodes = [];
  absent = new Set(); // closing marks that do not occur before the end

  constructor(text, from, to, depth) {
    Object.assign(this, { text: text.slice(0, to), at: from, to, depth, begun: from });
  }

  read() {
    while (this.at < this.to) {
      const found = this.nodeAt(this.at);
      if (found) {
        this.endText(this.at);
        if (found.node) this.nodes.push(found.node);
        this.at = found.stop;
        this.begun = found.begun ?? this.at;
      } else {
        this.at += this.markLength(this.at);
      }
    }
    this.endText(this.to);
    return this.nodes;
  }

  endText(to) {
    if (this.begun < to) this.nodes.push({ kind: "text", from: this.begun, to });
  }

  // A run of the same mark that opens nothing is skipped as a whole.
  markLength(at) {
    const char = this.text[at];
    if (!"*_~`".includes(char)) return 1;
    return this.runOf(at, char);
  }

  runOf(at, char) {
    let stop = at;
    while (this.text[stop] === char) stop++;
    return stop - at;
  }

  nodeAt(at) {
    switch (this.text[at]) {
      case "\\": return this.escape(at);
      case "`": return this.code(at);
      case "$": return this.dollars(at);
      case "*":
      case "_":
      case "~": return this.emphasis(at);
      case "!": return this.text[at + 1] === "[" ? this.link(at, at + 1) : null;
      case "[": return this.link(at, at);
      case "<": return this.address(at, AUTOLINK, 1);
      case "h": return WORD.test(this.text[at - 1] ?? " ") ? null : this.address(at, URL_TEXT, 0);
      default: return null;
    }
  }

  inner(from, to) {
    if (this.depth >= MAX_DEPTH) return [{ kind: "text", from, to }];
    return inlineOf(this.text, from, to, this.depth + 1);
  }

  // Returns the place of a mark before the end, or -1; remembers that there is none.
  find(mark, from) {
    if (this.absent.has(mark)) return -1;
    const at = this.text.indexOf(mark, from);
    if (at < 0) this.absent.add(mark);
    return at;
  }

  escape(at) {
    const next = this.text[at + 1];
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", at + 2);
      if (end >= 0) return { node: { kind: "math", from: at + 2, to: end }, stop: end + 2 };
    }
    if (next && PUNCTUATION.test(next)) return { stop: at + 2, begun: at + 1 };
    return null;
  }

  code(at) {
    const size = this.runOf(at, "`");
    const mark = `run ${size}`;
    if (this.absent.has(mark)) return null;
    for (let end = at + size; (end = this.text.indexOf("`", end)) >= 0; ) {
      const length = this.runOf(end, "`");
      if (length === size) return { node: this.codeNode(at + size, end), stop: end + size };
      end += length;
    }
    this.absent.add(mark);
    return null;
  }

  codeNode(from, to) {
    const isPadded = this.text[from] === " " && this.text[to - 1] === " " && to - from > 2;
    return { kind: "code", from: from + Number(isPadded), to: to - Number(isPadded) };
  }

  // "$5 and $10" is no math: the closing mark follows no space and precedes no digit.
  dollars(at) {
    const size = Math.min(2, this.runOf(at, "$"));
    const mark = "$".repeat(size);
    if (/\s/.test(this.text[at + size] ?? " ")) return null;
    for (let end = at + size; (end = this.find(mark, end)) >= 0; end += size) {
      const isEnd = end > at + size && !/[\s\\]/.test(this.text[end - 1]);
      if (!isEnd || (size === 1 && /[\d$]/.test(this.text[end + 1] ?? ""))) continue;
      return { node: { kind: "math", from: at + size, to: end }, stop: end + size };
    }
    return null;
  }

  // An opening mark has text after it, a closing one text before it; "_" stands at word ends only.
  emphasis(at) {
    const char = this.text[at];
    const run = this.runOf(at, char);
    if (run > 3 || (char === "~" && run !== 2) || !this.opens(at, run)) return null;
    const end = this.closing(char, run, at + run);
    if (end < 0) return null;
    const nodes = this.inner(at + run, end);
    if (char === "~") return { node: { kind: "del", nodes }, stop: end + run };
    if (run === 3) {
      return { node: { kind: "strong", nodes: [{ kind: "em", nodes }] }, stop: end + run };
    }
    return { node: { kind: KINDS[run], nodes }, stop: end + run };
  }

  opens(at, run) {
    const before = this.text[at - 1] ?? " ";
    const after = this.text[at + run] ?? " ";
    return !/\s/.test(after) && (this.text[at] !== "_" || !WORD.test(before));
  }

  closing(char, run, from) {
    const mark = `${char}${run}`;
    if (this.absent.has(mark)) return -1;
    for (let at = from; at < this.to; ) {
      if (this.text[at] === "\\") {
        at += 2;
      } else if (this.text[at] === "`") {
        at = this.code(at)?.stop ?? at + this.runOf(at, "`");
      } else if (this.text[at] === char) {
        const length = this.runOf(at, char);
        if (this.closes(at, length, run)) return at + (length > run ? length - run : 0);
        at += length;
      } else {
        at++;
      }
    }
    this.absent.add(mark);
    return -1;
  }

  closes(at, length, run) {
    const fits = length === run || (length === 3 && run < 3);
    const isAfterText = !/\s/.test(this.text[at - 1]);
    return fits && isAfterText && (this.text[at] !== "_" || !WORD.test(this.text[at + length] ?? " "));
  }

  // An image is shown as a link to it: the page loads nothing from other hosts.
  link(start, open) {
    const close = this.closingBracket(open);
    if (close === undefined || this.text[close + 1] !== "(") return null;
    const rest = this.text.slice(close + 2);
    const found = /^\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+"[^"]*")?\s*\)/.exec(rest);
    const href = found && safeAddress(found[1]);
    if (!href) return null;
    const nodes = this.inner(open + 1, close);
    return { node: { kind: "link", href, nodes }, stop: close + 2 + found[0].length };
  }

  // Returns the place of the bracket that closes `open`; undefined if none does, as in "[0, 1)".
  closingBracket(open) {
    this.brackets ??= this.matchBrackets();
    return this.brackets.get(open);
  }

  matchBrackets() {
    const matches = new Map();
    const opened = [];
    for (let at = this.at; at < this.to; at++) {
      if (this.text[at] === "\\") at++;
      else if (this.text[at] === "[") opened.push(at);
      else if (this.text[at] === "]" && opened.length) matches.set(opened.pop(), at);
    }
    return matches;
  }

  address(at, pattern, border) {
    pattern.lastIndex = at;
    const found = pattern.exec(this.text);
    if (!found) return null;
    const whole = border ? found[0] : trimmed(found[0]);
    const href = safeAddress(border ? found[1] : whole);
    if (!href) return null;
    const stop = at + whole.length;
    const nodes = [{ kind: "text", from: at + border, to: stop - border }];
    return { node: { kind: "link", href, nodes }, stop };
  }
}

// Drops punctuation after an address, and closing brackets that it does not open.
function trimmed(address) {
  let end = address.length;
  let surplus = address.split(")").length - address.split("(").length; // closing brackets
  for (; ; end--) {
    const last = address[end - 1];
    if (last === ")" && surplus > 0) surplus--;
    else if (!".,;:!?'\"*_~]".includes(last)) return address.slice(0, end);
  }
}
