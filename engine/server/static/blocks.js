// KV cache blocks as a grid of squares, colored by owner.
//
// A snapshot contains the number of blocks per owner. Squares keep their owner until they are
// released; a growing owner takes the first free squares.

import { colorOf, fit, isCalm, themeColor } from "./palette.js";

const TREE = "\0tree"; // never a request id: ids cannot contain this character
const MAX_HEIGHT = 264; // pixels
const MIN_CELL = 8;
const MAX_CELL = 22;
const GAP = 2;
const FADE = 350; // ms

export class BlockGrid {
  owners = []; // owner of each square; null: free
  before = []; // previous owner of each square, and the time of the change
  changed = [];
  total = 0;
  highlighted = null;

  constructor(canvas) {
    this.canvas = canvas;
  }

  highlight(id) {
    this.highlighted = id;
    this.draw();
  }

  // Returns the blocks held by requests, the blocks held only by the prefix tree, and blocks per square.
  take(snapshot) {
    const shares = sharesOf(snapshot);
    if (this.total !== snapshot.num_blocks) this.total = snapshot.num_blocks;
    this.lay();
    this.assign(shares.owned);
    this.draw();
    return { held: shares.held, cached: shares.cached, perCell: this.perCell };
  }

  // Chooses the size of a square and the blocks per square to fit the available space.
  lay() {
    const width = this.canvas.clientWidth || 1;
    let cell = MAX_CELL;
    const rows = (size) => Math.ceil(this.total / Math.floor((width + GAP) / (size + GAP)));
    while (cell > MIN_CELL && rows(cell) * (cell + GAP) > MAX_HEIGHT) cell--;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor((width + GAP) / (cell + GAP)));
    const most = this.columns * Math.floor((MAX_HEIGHT + GAP) / (cell + GAP));
    const perCell = Math.max(1, Math.ceil(this.total / most));
    if (perCell !== this.perCell) this.owners = [];
    this.perCell = perCell;
    this.numCells = Math.ceil(this.total / perCell);
    const height = Math.ceil(this.numCells / this.columns) * (cell + GAP);
    this.canvas.style.height = `${height}px`;
    this.resize();
  }

  resize() {
    for (const list of [this.owners, this.before, this.changed]) list.length = this.numCells;
    for (let at = 0; at < this.numCells; at++) {
      this.owners[at] ??= null;
      this.before[at] ??= null;
      this.changed[at] ??= -FADE;
    }
  }

  assign(owned) {
    const wanted = new Map();
    for (const [id, blocks] of owned) wanted.set(id, Math.round(blocks / this.perCell) || (blocks > 0 ? 1 : 0));
    const now = performance.now();
    const kept = new Map();
    this.owners.forEach((id, at) => {
      if (id === null) return;
      const count = (kept.get(id) ?? 0) + 1;
      if (count > (wanted.get(id) ?? 0)) this.change(at, null, now);
      else kept.set(id, count);
    });
    let at = 0;
    for (const [id, count] of wanted) {
      for (let lacking = count - (kept.get(id) ?? 0); lacking > 0; lacking--) {
        while (at < this.numCells && this.owners[at] !== null) at++;
        if (at === this.numCells) return;
        this.change(at, id, now);
      }
    }
  }

  change(at, id, now) {
    // A square that changes owner several times within a snapshot fades only once.
    if (this.changed[at] !== now) this.before[at] = this.owners[at];
    this.owners[at] = id;
    this.changed[at] = now;
  }

  animate() {
    const now = performance.now();
    if (this.changed.some((time) => now - time < FADE + 50)) this.draw();
  }

  draw() {
    if (!this.total) return;
    const { context } = fit(this.canvas);
    const now = performance.now();
    for (let at = 0; at < this.numCells; at++) {
      const age = isCalm() ? 1 : Math.min(1, (now - this.changed[at]) / FADE);
      if (age < 1) this.paint(context, at, this.before[at], 1);
      this.paint(context, at, this.owners[at], age);
    }
    context.globalAlpha = 1;
  }

  paint(context, at, id, alpha) {
    const pitch = this.cell + GAP;
    const x = (at % this.columns) * pitch;
    const y = Math.floor(at / this.columns) * pitch;
    const isDimmed = this.highlighted !== null && id !== null && id !== this.highlighted;
    context.globalAlpha = isDimmed ? 0.25 * alpha : alpha;
    context.fillStyle = id === null ? themeColor("--free") : colorOfOwner(id);
    context.beginPath();
    context.roundRect(x, y, this.cell, this.cell, Math.min(4, this.cell / 4));
    context.fill();
  }
}

const colorOfOwner = (id) => (id === TREE ? themeColor("--kept") : colorOf(id));

// Shared blocks are assigned to the tree, all other blocks to their request.
function sharesOf({ num_blocks: total, num_free_blocks: free, block_size: size, requests }) {
  const used = total - free;
  const owned = [];
  let held = 0;
  for (const request of requests) {
    const shared = Math.floor(request.num_cached / size);
    const own = Math.min(Math.max(0, request.num_blocks - shared), used - held);
    held += own;
    if (own) owned.push([request.id, own]);
  }
  owned.push([TREE, used - held]);
  return { owned, held, cached: used - held };
}
