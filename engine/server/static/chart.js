// Scrolling chart of the last minute: filled lines, or bars.

import { fit, isCalm, themeColor } from "./palette.js";

const WINDOW = 60000; // ms
const DELAY = 300; // ms; the newest sample slides in from the right
const TOP = 14; // pixels above the highest value, reserved for its label

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export class Chart {
  samples = []; // [time, values]
  highest = 0; // top of the vertical axis; shrinks slowly

  constructor(canvas, { layers = 1, bars = false } = {}) {
    this.canvas = canvas;
    this.layers = layers;
    this.bars = bars;
  }

  push(time, values) {
    this.samples.push([time, values]);
    while (this.samples.length > 2 && this.samples[1][0] < time - WINDOW - DELAY) {
      this.samples.shift();
    }
  }

  draw() {
    const { context, width, height } = fit(this.canvas);
    if (!width) return;
    const now = isCalm() ? (this.samples.at(-1)?.[0] ?? 0) : performance.now() - DELAY;
    const total = ([, values]) => values.reduce((sum, value) => sum + value, 0);
    const most = Math.max(1e-9, ...this.samples.map(total));
    const isGrowing = most > this.highest;
    this.highest += (most - this.highest) * (isCalm() || isGrowing ? 1 : 0.08);
    this.x = (time) => width - 1 - ((now - time) / WINDOW) * width;
    this.y = (value) => height - 1 - (value / this.highest) * (height - TOP - 2);
    this.drawAxis(context, width, height, most);
    if (this.bars) this.drawBars(context, width, height);
    else for (let layer = this.layers - 1; layer >= 0; layer--) this.drawLine(context, layer);
  }

  drawAxis(context, width, height, most) {
    context.fillStyle = themeColor("--line");
    context.fillRect(0, height - 1, width, 1);
    if (most < 0.005) return;
    context.font = `10px ${themeColor("--sans")}`;
    context.fillStyle = themeColor("--faint");
    context.textAlign = "right";
    context.fillText(`max ${short.format(most)}`, width - 1, 9);
  }

  drawBars(context, width, height) {
    context.fillStyle = themeColor("--accent");
    const thick = Math.max(1, (250 / WINDOW) * width - 0.6);
    for (const [time, [value]] of this.samples) {
      const x = this.x(time);
      const y = this.y(value);
      if (value > 0 && x < width) context.fillRect(x - thick, y, thick, height - 1 - y);
    }
  }

  // Draws one layer, stacked on the layers below it.
  drawLine(context, layer) {
    if (this.samples.length < 2) return;
    const points = this.samples.map(([time, values]) => {
      const value = values.slice(0, layer + 1).reduce((sum, one) => sum + one, 0);
      return [this.x(time), this.y(value)];
    });
    const color = themeColor(layer ? "--second" : "--accent");
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo(x, y));
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(points.at(-1)[0], this.y(0));
    context.lineTo(points[0][0], this.y(0));
    context.globalAlpha = 0.16;
    context.fillStyle = color;
    context.fill();
    context.globalAlpha = 1;
  }
}
