// Colors for canvases: those of the style sheet, and one hue per request.

const GOLDEN_ANGLE = 137.508;
const MAX_REMEMBERED = 1024;

const hues = new Map();
let numSeen = 0;
let theme = {};

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Returns a style sheet color, such as "--accent".
export function themeColor(name) {
  theme[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return theme[name];
}

export function forgetColors() {
  theme = {};
}

// Assigns distant hues to consecutive requests.
export function hueOf(id) {
  if (!hues.has(id)) {
    if (hues.size >= MAX_REMEMBERED) hues.delete(hues.keys().next().value);
    hues.set(id, (165 + numSeen++ * GOLDEN_ANGLE) % 360);
  }
  return hues.get(id);
}

export function colorOf(id) {
  return `oklch(${themeColor("--request-light")} ${themeColor("--request-chroma")} ${hueOf(id)})`;
}

// Fits a canvas to its box and returns {context, width, height} in CSS pixels.
export function fit(canvas) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const context = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
