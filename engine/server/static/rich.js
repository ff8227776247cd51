// Draws Markdown as elements whose text keeps its tokens.

import { copyButton, make } from "./dom.js";
import { inlineOf } from "./inline.js";
import { blocksOf, linesOf } from "./markdown.js";
import { nodesOf } from "./tokens.js";

const TOP_LEVEL = 2; // of the heading of a message

// Finds the pieces of a text by offset; pieces may be appended between calls.
class PieceMap {
  starts = [];
  end = 0;

  constructor(text, pieces) {
    this.text = text;
    this.pieces = pieces;
    this.update(text);
  }

  update(text) {
    this.text = text;
    while (this.starts.length < this.pieces.length) {
      this.starts.push(this.end);
      this.end += this.pieces[this.starts.length - 1].text.length;
    }
  }

  // Returns the nodes of the text [from, to): a span per token, plain text without tokens.
  nodes(from, to) {
    if (!this.pieces.length) return [this.text.slice(from, to)];
    const nodes = [];
    for (let index = this.indexAt(from); index < this.pieces.length && this.starts[index] < to; index++) {
      const start = this.starts[index];
      const { text } = this.pieces[index];
      nodes.push(...nodesOf(this.pieces[index], text.slice(Math.max(0, from - start), to - start)));
    }
    return nodes;
  }

  indexAt(offset) {
    let low = 0;
    let high = this.starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= offset) low = middle;
      else high = middle;
    }
    return low;
  }
}

// A text that grows: only its last blocks are drawn again.
export class RichText {
  tail = 0; // offset of the first block that is drawn again
  numDone = 0; // elements before it
  level = TOP_LEVEL; // of the last heading before it

  constructor(element, pieces) {
    this.element = element;
    this.map = new PieceMap("", pieces);
  }

  draw(text) {
    this.map.update(text);
    const blocks = blocksOf(linesOf(text.slice(this.tail), this.tail));
    const levels = setLevels(blocks, this.level);
    while (this.element.childNodes.length > this.numDone) this.element.lastChild.remove();
    this.element.append(...blocks.map((block) => elementOf(block, this.map)));
    // A block that begins in the last line may belong to the one before: "-" begins "-|-", a table's.
    const lastLine = text.lastIndexOf("\n") + 1;
    const numDone = blocks.findLastIndex(({ at }) => at < lastLine);
    if (numDone < 1) return;
    this.tail = blocks[numDone].at;
    this.numDone += numDone;
    this.level = levels[numDone - 1];
  }
}

// Gives each heading its level on the page: below the message's own heading, without gaps. Returns
// the level after each block.
function setLevels(blocks, level) {
  return blocks.map((block) => {
    if (block.kind === "heading") {
      level = Math.min(6, TOP_LEVEL + block.level, level + 1);
      block.shown = level;
    }
    return level;
  });
}

// ---- blocks

const BUILDERS = {
  paragraph: (block, map) => wrap("p", inline(block.lines, map)),
  heading: ({ level, shown, lines }, map) => (
    // Within lists and quotes a heading has no level of its own.
    wrap(shown ? `h${shown}` : "p", inline(lines, map), `heading level-${level}`)
  ),
  rule: () => make("hr"),
  quote: (block, map) => wrap("blockquote", block.blocks.map((one) => elementOf(one, map))),
  math: (block, map) => wrap("p", sourceOf(block.lines, map), "math"),
  code: codeElement,
  list: listElement,
  table: tableElement,
};

function elementOf(block, map) {
  return BUILDERS[block.kind](block, map);
}

function wrap(name, nodes, className) {
  const made = make(name, className);
  made.append(...nodes);
  return made;
}

function codeElement({ language, lines }, map) {
  const made = make("div", "code");
  const head = make("div", "code-head");
  const text = lines.map((line) => line.text).join("\n");
  head.append(make("span", "", language || "text"), copyButton("Copy the code", () => text));
  const body = wrap("pre", [wrap("code", sourceOf(lines, map))]);
  body.tabIndex = 0; // scrolls sideways
  body.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  body.setAttribute("role", "group");
  made.append(head, body);
  return made;
}

function listElement({ first, items }, map) {
  const made = make(first === null ? "ul" : "ol");
  if (first !== null && first !== 1) made.start = first;
  made.append(...items.map((blocks) => wrap("li", itemNodes(blocks, map))));
  return made;
}

// The first paragraph of an item stands beside its mark.
function itemNodes([first, ...others], map) {
  if (!first) return [];
  const isText = first.kind === "paragraph";
  const own = isText ? [wrap("span", inline(first.lines, map), "item")] : [elementOf(first, map)];
  return [...own, ...others.map((one) => elementOf(one, map))];
}

function tableElement({ alignments, rows }, map) {
  const [head, ...body] = rows.map((cells, row) => {
    const columns = alignments.map((align, at) => {
      const cell = wrap(row ? "td" : "th", cells[at] ? inline([cells[at]], map) : []);
      if (align !== "left") cell.className = align;
      if (!row) cell.scope = "col";
      return cell;
    });
    return wrap("tr", columns);
  });
  const table = wrap("table", [wrap("thead", [head]), wrap("tbody", body)]);
  const made = wrap("div", [table], "table");
  made.tabIndex = 0; // scrolls sideways
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", "Table");
  return made;
}

// ---- text

// Returns the nodes of whole lines, with the line breaks between them.
function sourceOf(lines, map) {
  return lines.flatMap(({ text, at }, row) => {
    const isLast = row === lines.length - 1;
    const nodes = map.nodes(at, at + text.length);
    return isLast ? nodes : [...nodes, "\n"];
  });
}

function inline(lines, map) {
  const text = lines.map((line) => line.text).join("\n");
  const starts = [];
  let start = 0;
  for (const line of lines) {
    starts.push(start);
    start += line.text.length + 1;
  }
  // A range may span lines, whose beginnings in the source (list indents, quote marks) are left out.
  const plain = (from, to) => lines.flatMap((line, row) => {
    const low = Math.max(from, starts[row]);
    const high = Math.min(to, starts[row] + line.text.length);
    const nodes = low < high ? map.nodes(line.at + low - starts[row], line.at + high - starts[row]) : [];
    const end = starts[row] + line.text.length; // the place of the line break
    return from <= end && end < to ? [...nodes, "\n"] : nodes;
  });
  return inlineOf(text).map((node) => inlineElement(node, plain));
}

const NAMES = { code: "code", math: "span", strong: "strong", em: "em", del: "del", link: "a" };

function inlineElement(node, plain) {
  if (node.kind === "text") {
    const text = document.createDocumentFragment();
    text.append(...plain(node.from, node.to));
    return text;
  }
  const nodes = node.nodes?.map((one) => inlineElement(one, plain)) ?? plain(node.from, node.to);
  const made = wrap(NAMES[node.kind], nodes, node.kind === "math" ? "math" : "");
  if (node.kind === "link") Object.assign(made, { href: node.href, target: "_blank", rel: "noopener noreferrer" });
  return made;
}
