// Prefix tree, drawn left to right: a bar's length is its number of blocks, branches are stacked,
// and bars in use by a request are highlighted.

import { fit, themeColor } from "./palette.js";

const MAX_HEIGHT = 280; // pixels
const ROW = 16;
const INDENT = 14; // pixels; width of a branch's curve

export class PrefixTree {
  roots = [];
  numLeaves = 0;
  depth = 1; // end of the deepest node, in blocks
  levels = 1;

  constructor(canvas) {
    this.canvas = canvas;
  }

  take(tree, blockSize) {
    this.blockSize = blockSize;
    this.build(tree.nodes);
    this.row = Math.max(3, Math.min(ROW, MAX_HEIGHT / Math.max(1, this.numLeaves)));
    this.canvas.style.height = `${Math.ceil(this.numLeaves * this.row) + 4}px`;
    this.draw();
  }

  build(list) {
    const nodes = new Map();
    this.roots = [];
    for (const [id, parent, blocks, references] of list) {
      const node = { blocks, isUsed: references > 0, children: [] };
      nodes.set(id, node);
      const above = nodes.get(parent);
      if (above) above.children.push(node);
      else this.roots.push(node);
    }
    this.numLeaves = 0;
    this.depth = 1;
    this.levels = 1;
    for (const root of this.roots) this.lay(root, 0, 0);
  }

  // Sets each node's start, in blocks, and row; the recursion depth is the tree's.
  lay(node, start, level) {
    node.start = start;
    node.level = level;
    const end = start + node.blocks;
    this.depth = Math.max(this.depth, end);
    this.levels = Math.max(this.levels, level + 1);
    if (!node.children.length) {
      node.at = this.numLeaves++;
      return;
    }
    const inner = node.children.length > 1 ? level + 1 : level; // an only child keeps its parent's row
    for (const child of node.children) this.lay(child, end, inner);
    node.at = node.children[0].at;
  }

  draw() {
    if (!this.numLeaves) return;
    const { context, width } = fit(this.canvas);
    const indent = Math.min(INDENT, (0.4 * width) / this.levels);
    const scale = (width - indent * this.levels) / this.depth;
    this.place = (node) => ({
      x: node.start * scale + node.level * indent,
      y: (node.at + 0.5) * this.row + 2,
      length: Math.max(2, node.blocks * scale),
    });
    for (const root of this.roots) this.drawNode(context, root);
    context.globalAlpha = 1;
  }

  drawNode(context, node) {
    const { x, y, length } = this.place(node);
    if (node.children.length > 1) {
      for (const child of node.children) this.drawBranch(context, x + length, y, child);
    }
    const thick = Math.max(2, Math.min(10, this.row - 4));
    context.fillStyle = themeColor(node.isUsed ? "--accent" : "--tree");
    context.beginPath();
    context.roundRect(x, y - thick / 2, length, thick, thick / 2);
    context.fill();
    for (const child of node.children) this.drawNode(context, child);
  }

  drawBranch(context, x, y, child) {
    const to = this.place(child);
    const middle = (x + to.x) / 2;
    context.strokeStyle = themeColor(child.isUsed ? "--accent" : "--tree");
    context.lineWidth = 1.2;
    context.beginPath();
    context.moveTo(x - 1, y);
    context.bezierCurveTo(middle, y, middle, to.y, to.x + 1, to.y);
    context.stroke();
  }
}
