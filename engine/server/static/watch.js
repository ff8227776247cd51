// Watch view: draws engine snapshots, which arrive as server-sent events four times per second.

import { events, request } from "./api.js";
import { BlockGrid } from "./blocks.js";
import { Chart } from "./chart.js";
import { $ } from "./dom.js";
import { sendLoad } from "./load.js";
import { forgetColors, isCalm } from "./palette.js";
import { RequestList } from "./requests.js";
import { PrefixTree } from "./tree.js";

const SILENCE = 5000; // ms without a snapshot before the page reports a problem

const count = new Intl.NumberFormat("en");
const plural = (n, one, many = `${one}s`) => `${count.format(n)} ${n === 1 ? one : many}`;

export function startWatch() {
  const view = new WatchView();
  const connection = new Connection(view);
  let isVisible = false;
  let isPaused = false;
  const apply = () => {
    connection.set(isVisible && !isPaused);
    view.set(isVisible && !isPaused);
  };
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    $("pause").textContent = isPaused ? "Go on" : "Pause";
    if (isPaused) view.state("paused", "paused");
    apply();
  });
  $("send-load").addEventListener("click", () => startLoad(view));
  return {
    setVisible(visible) {
      isVisible = visible;
      apply();
    },
  };
}

async function startLoad(view) {
  const button = $("send-load");
  button.disabled = true;
  try {
    await sendLoad($("model").value);
  } catch (error) {
    view.state("broken", error.message);
  } finally {
    button.disabled = false;
  }
}

// Keeps a snapshot stream open while needed; backs off after failures.
class Connection {
  controller = null;

  constructor(view) {
    this.view = view;
  }

  set(isWanted) {
    if (isWanted === (this.controller !== null)) return;
    if (isWanted) {
      this.controller = new AbortController();
      this.run(this.controller.signal);
    } else {
      this.controller.abort();
      this.controller = null;
    }
  }

  async run(signal) {
    for (let wait = 1000; !signal.aborted; wait = Math.min(2 * wait, 15000)) {
      try {
        this.view.state("connecting", "connecting");
        const response = await request("v1/engine/watch", { signal });
        for await (const { event, data } of events(response)) {
          if (event === "error") throw new Error(`The engine has ended: ${JSON.parse(data).message}`);
          wait = 1000;
          this.view.take(JSON.parse(data));
        }
        this.view.state("broken", "The server ended the stream; reconnecting");
      } catch (error) {
        if (signal.aborted) return;
        this.view.state("broken", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

class WatchView {
  constructor() {
    this.charts = {
      rate: new Chart($("chart-rate")),
      step: new Chart($("chart-step")),
      batch: new Chart($("chart-batch"), { bars: true }),
      running: new Chart($("chart-running"), { layers: 2 }),
    };
    this.blocks = new BlockGrid($("blocks"));
    this.tree = new PrefixTree($("tree"));
    this.requests = new RequestList($("requests"), (id) => this.blocks.highlight(id));
    this.isDrawing = false;
    this.lastArrival = 0;
    addEventListener("resize", () => this.redraw());
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => {
      forgetColors();
      this.redraw();
    });
  }

  set(isDrawing) {
    if (isDrawing === this.isDrawing) return;
    this.isDrawing = isDrawing;
    if (isDrawing) requestAnimationFrame(() => this.frame());
  }

  redraw() {
    if (!this.isDrawing) return;
    this.drawCharts();
    this.blocks.draw();
    this.tree.draw();
  }

  // Animates the charts between snapshots, unless the user prefers reduced motion.
  frame() {
    if (!this.isDrawing) return;
    if (!isCalm()) {
      this.drawCharts();
      this.blocks.animate();
    }
    if (this.lastArrival && performance.now() - this.lastArrival > SILENCE) {
      this.state("broken", "no news from the engine");
    }
    requestAnimationFrame(() => this.frame());
  }

  drawCharts() {
    for (const chart of Object.values(this.charts)) chart.draw();
  }

  state(kind, text) {
    if (kind !== "live") this.lastArrival = 0;
    const element = $("watch-state");
    if (element.dataset.kind === kind && element.textContent === text) return;
    element.dataset.kind = kind;
    element.textContent = text;
  }

  take(snapshot) {
    this.lastArrival = performance.now();
    this.state("live", snapshot.num_running + snapshot.num_waiting ? "at work" : "idle");
    this.takeFigures(snapshot);
    this.requests.take(snapshot.requests);
    const shares = this.blocks.take(snapshot);
    this.tellBlocks(snapshot, shares);
    this.tree.take(snapshot.tree, snapshot.block_size);
    this.tellTree(snapshot);
    if (isCalm()) this.drawCharts();
  }

  takeFigures(snapshot) {
    const { tokens_per_s: rate, step_ms: step, batch } = snapshot;
    const isIdle = snapshot.num_running === 0;
    const now = performance.now();
    this.charts.rate.push(now, [rate]);
    this.charts.step.push(now, [isIdle ? 0 : step]);
    this.charts.batch.push(now, [isIdle ? 0 : batch.num_tokens]);
    this.charts.running.push(now, [snapshot.num_running, snapshot.num_waiting]);
    $("fig-rate").textContent = rate < 20 ? rate.toFixed(1) : count.format(Math.round(rate));
    $("fig-step").textContent = step < 1000 ? step.toPrecision(3) : count.format(Math.round(step));
    $("fig-batch").textContent = count.format(isIdle ? 0 : batch.num_tokens);
    $("note-batch").textContent = isIdle
      ? "nothing to compute"
      : `${plural(batch.num_prefills, "prompt")}, ${plural(batch.num_decodes, "next token")}`;
    $("fig-running").textContent = count.format(snapshot.num_running);
    $("note-running").textContent = snapshot.num_waiting
      ? `${count.format(snapshot.num_waiting)} waiting` : "none waiting";
  }

  tellBlocks(snapshot, { held, cached, perCell }) {
    const { num_blocks: total, num_free_blocks: free, block_size: size } = snapshot;
    const text = `${count.format(total)} blocks of ${plural(size, "token")}`;
    const cell = perCell > 1 ? `; one square is ${perCell} blocks` : "";
    $("blocks-note").textContent = `${text}${cell}. Their number is exact, their place is not.`;
    $("held").textContent = `${count.format(held)} in requests`;
    $("kept").textContent = `${count.format(cached)} shared or kept`;
    $("free").textContent = `${count.format(free)} free`;
    const legend = ["held", "kept", "free"].map((id) => $(id).textContent).join(", ");
    $("blocks").setAttribute("aria-label", `Blocks of the key-value cache: ${legend}`);
  }

  tellTree({ tree }) {
    const shown = tree.nodes.length < tree.num_nodes ? ` (${tree.nodes.length} of them shown)` : "";
    const sizes = [plural(tree.num_nodes, "node") + shown];
    if (tree.num_blocks !== tree.num_nodes) sizes.push(plural(tree.num_blocks, "block"));
    const text = tree.num_nodes
      ? `${sizes.join(", ")}. `
        + "Prompts that begin alike share a branch, which is computed once."
      : "Empty. Prompts that begin alike will share a branch here.";
    if ($("tree-note").textContent !== text) $("tree-note").textContent = text;
    $("tree").setAttribute("aria-label", `Prefix tree: ${text}`);
    $("tree").hidden = tree.num_nodes === 0;
  }
}

