// What every chart needs: numbers as words, ticks, colours of the theme, one tooltip. No dependency.
"use strict";
const began = performance.now();
const root = document.documentElement;
const RIGHT = 18, AXIS = 20; // pixels right of every plot, and below it
const narrow = matchMedia("(max-width: 760px)"); // as in page.css
const FONT = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";

const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};
const palette = new Map(); // emptied when the theme changes
function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(root).getPropertyValue(name).trim());
  return palette.get(name);
}
const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
function bytes(text) {
  const plain = atob(text), out = new Uint8Array(plain.length);
  for (let i = 0; i < plain.length; i++) out[i] = plain.charCodeAt(i);
  return out;
}
const floats = (text) => new Float64Array(bytes(text).buffer);
const whole = (v) => String(Math.round(v) || 0).replace(/\B(?=(\d{3})+$)/g, ","); // never "-0"; Intl takes 30 ms to start

function duration(seconds) {
  const s = Math.abs(seconds), units = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, name] of units) if (s >= size) return `${Number((seconds / size).toPrecision(3))} ${name}`;
  return `${Number(seconds.toPrecision(3))} s`;
}
function below(sorted, value) { // the last index whose value is not above; -1 where all are
  let low = 0, high = sorted.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (sorted[mid] <= value) low = mid + 1; else high = mid;
  }
  return low - 1;
}
function press(button) { // one of a group
  for (const other of button.parentNode.children) other.setAttribute("aria-pressed", String(other === button));
}
function compact(v) {
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "Inf" : "-Inf";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (Number.isInteger(v) && size < 1e6) return v < 0 ? `-${whole(size)}` : whole(v);
  if (size >= 1e6 || size < 1e-3) return v.toExponential(2).replace(/\.?0*e/, "e").replace("e+", "e");
  return String(Number(v.toPrecision(size >= 1000 ? 4 : 3)));
}

function fit(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.font = FONT;
  return ctx;
}

function ticks(low, high, log, num) { // bounded whatever the numbers: a record may hold anything
  const out = [];
  if (!(high > low) || !Number.isFinite(high - low) || (log && !(low > 0))) return out;
  if (log) {
    const a = Math.log10(low), b = Math.log10(high);
    const leap = Math.max(1, Math.ceil((b - a) / num));
    const parts = b - a < 1.3 ? [1, 2, 5] : [1];
    for (let e = Math.floor(a); e <= b; e++) {
      if (leap > 1 && ((e % leap) + leap) % leap) continue;
      for (const p of parts) {
        const v = p * 10 ** e;
        if (v >= low * 0.999 && v <= high * 1.001) out.push(v);
      }
    }
    if (out.length > 1) return out;
    out.length = 0;
  }
  const raw = (high - low) / num, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
  const first = Math.ceil(low / step);
  for (let i = 0; i < 4 * num + 9 && (first + i) * step <= high; i++) out.push((first + i) * step || 0);
  return out;
}

// ---- one tooltip for everything
const tip = make("div", "tip");
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const room = root.clientWidth - tip.offsetWidth - 12;
  tip.style.left = `${clamp(x + 12, 8, Math.max(8, room)) + window.scrollX}px`;
  const below = y + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.top = `${(below ? y + 18 : Math.max(4, y - tip.offsetHeight - 12)) + window.scrollY}px`;
}
const hideTip = () => { tip.hidden = true; };
