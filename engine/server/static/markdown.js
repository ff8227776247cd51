// Markdown, block by block: paragraphs, headings, lists, quotes, tables, fences, math, rules.
//
// A line is {text, at}: `at` is the offset of its first character in the source, so that every
// character of a block can be traced to the token it came from. Blocks do not depend on text after
// the first line of the next block: an answer that grows is parsed again from the last block that
// begins before its unfinished line.

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = [["$$", "$$"], ["\\[", "\\]"]];
const MAX_DEPTH = 12; // nested lists and quotes

export function linesOf(text, at = 0) {
  return text.split("\n").map((line) => {
    const found = { text: line, at };
    at += line.length + 1;
    return found;
  });
}

// Returns blocks; each has a `kind`, and its offset `at` in the source.
export function blocksOf(lines, depth = 0) {
  const blocks = [];
  let next = 0;
  while (next < lines.length) {
    if (isBlank(lines[next])) {
      next++;
      continue;
    }
    const [block, stop] = blockAt(lines, next, depth);
    blocks.push({ ...block, at: lines[next].at });
    next = stop;
  }
  return blocks;
}

const isBlank = (line) => !line.text.trim();

function cut(line, count) {
  return { text: line.text.slice(count), at: line.at + Math.min(count, line.text.length) };
}

function blockAt(lines, start, depth) {
  const { text } = lines[start];
  const fence = FENCE.exec(text);
  if (fence) return fenceAt(lines, start, fence);
  const math = MATH.find(([open]) => text.trimStart().startsWith(open));
  if (math) {
    const found = mathAt(lines, start, math);
    if (found) return found;
  }
  const heading = HEADING.exec(text);
  if (heading) return [headingOf(lines[start], heading), start + 1];
  if (RULE.test(text)) return [{ kind: "rule" }, start + 1];
  if (isTable(lines, start)) return tableAt(lines, start);
  if (depth < MAX_DEPTH && QUOTE.test(text)) return quoteAt(lines, start, depth);
  if (depth < MAX_DEPTH && ITEM.test(text)) return listAt(lines, start, depth);
  return paragraphAt(lines, start);
}

function fenceAt(lines, start, [, indent, marker, info]) {
  const closing = new RegExp(`^ {0,3}\\${marker[0]}{${marker.length},}[ \t]*$`);
  let stop = start + 1;
  while (stop < lines.length && !closing.test(lines[stop].text)) stop++;
  const own = lines.slice(start + 1, stop).map((line) => cut(line, indentOf(line, indent.length)));
  return [{ kind: "code", language: info.trim().split(/\s/)[0], lines: own }, stop + 1];
}

function indentOf({ text }, most) {
  return Math.min(most, text.length - text.trimStart().length);
}

// Display math ends with its closing mark; without one before a blank line it is a paragraph. No
// line of that begins another block: in a formula whose end has not arrived, "+ b" is no list.
// Returns null if text follows the closing mark.
function mathAt(lines, start, [open, close]) {
  const first = lines[start].text.indexOf(open) + open.length;
  const own = [];
  let at = start;
  for (; at < lines.length && !isBlank(lines[at]); at++) {
    const line = at === start ? cut(lines[at], first) : lines[at];
    const end = line.text.indexOf(close);
    if (end >= 0 && line.text.slice(end + close.length).trim()) return null;
    own.push(end >= 0 ? { text: line.text.slice(0, end), at: line.at } : line);
    if (end >= 0) return [{ kind: "math", lines: own.filter((one) => !isBlank(one)) }, at + 1];
  }
  return [{ kind: "paragraph", lines: lines.slice(start, at) }, at];
}

function headingOf(line, [whole, marks]) {
  const rest = cut(line, whole.length);
  const text = rest.text.replace(/(^|[ \t]+)#+[ \t]*$/, "");
  return { kind: "heading", level: marks.length, lines: [{ text, at: rest.at }] };
}

function quoteAt(lines, start, depth) {
  let stop = start;
  while (stop < lines.length && QUOTE.test(lines[stop].text)) stop++;
  const own = lines.slice(start, stop).map((line) => cut(line, QUOTE.exec(line.text)[0].length));
  return [{ kind: "quote", blocks: blocksOf(own, depth + 1) }, stop];
}

const isOrdered = (marker) => /\d/.test(marker);

// A list ends at a line that is neither an item of its kind nor indented below one.
function listAt(lines, start, depth) {
  const [, , marker] = ITEM.exec(lines[start].text);
  const items = [];
  let stop = start;
  while (stop < lines.length) {
    const item = ITEM.exec(lines[stop].text);
    if (!item || isOrdered(item[2]) !== isOrdered(marker) || RULE.test(lines[stop].text)) break;
    const [own, next] = itemAt(lines, stop, item);
    items.push(blocksOf(own, depth + 1));
    stop = next;
  }
  const first = isOrdered(marker) ? Number.parseInt(marker, 10) : null;
  return [{ kind: "list", first, items }, stop];
}

function itemAt(lines, start, [whole, , marker]) {
  const width = Math.min(whole.length, whole.indexOf(marker) + marker.length + 4);
  const own = [cut(lines[start], width)];
  let stop = start + 1;
  while (stop < lines.length) {
    const line = lines[stop];
    const indent = line.text.length - line.text.trimStart().length;
    const isBelow = indent >= 2 && indent >= Math.min(width, 4) - (isOrdered(marker) ? 1 : 0);
    if (!isBlank(line) && !isBelow && (isBlank(lines[stop - 1]) || startsBlock(lines, stop))) break;
    own.push(cut(line, indentOf(line, width)));
    stop++;
  }
  return [own, stop];
}

const startsBlock = (lines, at) => {
  const { text } = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => one.test(text)) || isTable(lines, at);
};

// A number other than 1 does not begin a list within a paragraph: it may be a year.
function endsParagraph(lines, at) {
  const item = ITEM.exec(lines[at].text);
  if (item && (!item[3] || (isOrdered(item[2]) && Number.parseInt(item[2], 10) !== 1))) return false;
  return startsBlock(lines, at) || MATH.some(([open]) => lines[at].text.startsWith(open));
}

function paragraphAt(lines, start) {
  let stop = start + 1;
  while (stop < lines.length && !isBlank(lines[stop]) && !endsParagraph(lines, stop)) stop++;
  return [{ kind: "paragraph", lines: lines.slice(start, stop) }, stop];
}

// ---- tables

function isTable(lines, at) {
  const next = lines[at + 1];
  if (!next || !lines[at].text.includes("|") || !DELIMITERS.test(next.text)) return false;
  return next.text.includes("-") && cellsOf(lines[at]).length === cellsOf(next).length;
}

function tableAt(lines, start) {
  const alignments = cellsOf(lines[start + 1]).map(({ text }) => {
    if (text.endsWith(":")) return text.startsWith(":") ? "center" : "right";
    return "left";
  });
  let stop = start + 2;
  while (stop < lines.length && lines[stop].text.includes("|")) stop++;
  const rows = [lines[start], ...lines.slice(start + 2, stop)].map(cellsOf);
  return [{ kind: "table", alignments, rows }, stop];
}

// Splits a row at each bar that is neither escaped nor in a code span.
function cellsOf(line) {
  const inner = /^[ \t]*\|?/.exec(line.text)[0].length;
  const cells = [];
  let from = inner;
  let isCode = false;
  for (let at = inner; at <= line.text.length; at++) {
    const char = line.text[at];
    if (char === "\\") at++;
    else if (char === "`") isCode = !isCode;
    else if (char === undefined || (char === "|" && !isCode)) {
      if (char || line.text.slice(from).trim()) cells.push(cellOf(line, from, at));
      from = at + 1;
    }
  }
  return cells;
}

function cellOf(line, from, to) {
  const text = line.text.slice(from, to);
  const lead = text.length - text.trimStart().length;
  return { text: text.trim(), at: line.at + from + lead };
}
