// The heat map, layers over time; then everything is drawn.
const UNKNOWN = 0, FROZEN = 1, NO_GRADIENT = 2, ZERO = 3, FIRST = 4, LAST = 253, INF = 254, NAN = 255; // as in heat.py
const MANY_ROWS = 80, MAX_GROUPS = 60, OCTAVES = 6;

const STOPS = {
  relative: ["--cold2", "--cold1", "--even", "--hot1", "--hot2"],
  absolute: ["--low2", "--low1", "--mid", "--high1", "--high2"],
};
function ramp(mode) { // 65 colours between the stops
  const stops = STOPS[mode].map((name) => colour(name).match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16)));
  return Array.from({ length: 65 }, (_, i) => {
    const at = (i / 64) * (stops.length - 1), k = Math.min(Math.floor(at), stops.length - 2), f = at - k;
    return stops[k].map((c, j) => Math.round(c + (stops[k + 1][j] - c) * f));
  });
}
function pattern(ctx, code) { // a non-finite value has a pattern of its own, not only a colour
  const tile = make("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.fillStyle = colour("--none-bg");
  t.fillRect(0, 0, 8, 8);
  t.strokeStyle = t.fillStyle = colour(code === ZERO ? "--ink" : "--none-ink");
  if (code === FROZEN) {
    t.beginPath();
    for (const d of [-8, 0, 8]) { t.moveTo(d, 8); t.lineTo(d + 8, 0); }
    t.stroke();
  } else if (code === NO_GRADIENT) {
    for (const [a, b] of [[1, 1], [5, 5]]) t.fillRect(a, b, 2, 2);
  } else {
    for (const b of [1, 5]) t.fillRect(0, b, 8, 1);
  }
  return ctx.createPattern(tile, "repeat");
}
function alarm(ctx, x, y, w, h) {
  ctx.fillStyle = colour("--alarm");
  ctx.fillRect(x, y, w, h);
  const size = Math.min(w, h, 9) / 2 - 1, cx = x + w / 2, cy = y + h / 2;
  ctx.strokeStyle = "#fff";
  ctx.lineWidth = 1.4;
  ctx.beginPath();
  for (const side of [-1, 1]) { ctx.moveTo(cx - size * side, cy - size); ctx.lineTo(cx + size * side, cy + size); }
  ctx.stroke();
}
function grouped(names) { // the finest modules of which there are few enough
  const paths = names.map((n) => n.split("."));
  for (let depth = Math.max(...paths.map((p) => p.length)); depth > 0; depth--) {
    const groups = new Map();
    paths.forEach((p, row) => {
      const key = p.slice(0, depth).join(".");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    });
    if (groups.size <= MAX_GROUPS || depth === 1) return [...groups].map(([label, rows]) => ({ label, rows }));
  }
  return [];
}

class Heat {
  constructor(section, node, info) {
    Object.assign(this, { section, node, info, mode: "relative", row: 0 });
    this.codes = bytes(info.codes);
    this.canvas = node.querySelector(".spacer canvas");
    this.scroller = node.querySelector(".scroller");
    this.usual = info.names.map((_, row) => this.median(row));
    this.many = info.names.length > MANY_ROWS;
    this.setRows(this.many ? "grouped" : "all");
    node.querySelector(".rows").hidden = !this.many;
    for (const button of node.querySelectorAll(".choice button")) {
      button.addEventListener("click", () => {
        for (const other of button.parentNode.children) other.setAttribute("aria-pressed", String(other === button));
        if (button.dataset.mode) this.mode = button.dataset.mode; else this.setRows(button.dataset.rows);
        this.score();
        this.draw();
      });
    }
    this.scroller.addEventListener("scroll", () => this.draw());
    section.listen(this.canvas, {
      hover: (event, x) => {
        const y = event.clientY - this.canvas.getBoundingClientRect().top;
        return event.offsetX >= section.left && y < this.shown ? this.tell(this.rowAt(y), this.columnAt(x)) : this.label(y);
      },
      keys: (key) => this.key(key),
    });
    this.score();
  }
  log(row, code) {
    const { low, high } = this.info;
    return low[row] + ((code - FIRST) / (LAST - FIRST)) * (high[row] - low[row]);
  }
  median(row) {
    const counts = new Uint32Array(256), start = row * this.info.columns;
    let num = 0;
    for (let i = start; i < start + this.info.columns; i++) {
      const c = this.codes[i];
      if (c >= FIRST && c <= LAST) { counts[c]++; num++; }
    }
    let seen = 0;
    for (let c = FIRST; c <= LAST; c++) if ((seen += counts[c]) * 2 > num) return this.log(row, c);
    return 0;
  }
  setRows(which) {
    const each = () => this.info.names.map((label, row) => ({ label, rows: [row] }));
    this.rows = which === "grouped" ? grouped(this.info.names) : each();
    this.height = this.rows.length > MANY_ROWS ? 15 : clamp(Math.floor(560 / this.rows.length), 11, 20);
    this.shown = this.rows.length > MANY_ROWS ? 37 * this.height : this.rows.length * this.height;
    this.scroller.scrollTop = 0;
  }
  score() { // of each cell its worst code, the colour value, and which parameter it is from
    const { columns } = this.info, num = this.rows.length * columns;
    this.code = new Uint8Array(num);
    this.value = new Float32Array(num).fill(-Infinity);
    this.who = new Int32Array(num);
    this.rows.forEach(({ rows }, r) => {
      for (const row of rows) {
        for (let c = 0; c < columns; c++) {
          const code = this.codes[row * columns + c], at = r * columns + c;
          if (code >= FIRST && code <= LAST) {
            const value = this.log(row, code) - (this.mode === "relative" ? this.usual[row] : 0);
            if (this.code[at] < INF && value > this.value[at]) { this.code[at] = FIRST; this.value[at] = value; this.who[at] = row; }
          } else if (code > this.code[at]) { this.code[at] = code; this.who[at] = row; }
        }
      }
    });
    const known = this.value.filter((v, i) => this.code[i] === FIRST);
    this.span = this.mode === "relative" || !known.length ? [-OCTAVES, OCTAVES]
      : [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    this.paint();
  }
  paint() { // one pixel per cell: drawn once, stretched at every zoom
    const { columns } = this.info, colours = ramp(this.mode), [low, high] = this.span;
    this.image = make("canvas");
    this.image.width = columns;
    this.image.height = this.rows.length;
    const ctx = this.image.getContext("2d"), pixels = ctx.createImageData(columns, this.rows.length);
    for (let at = 0; at < this.code.length; at++) {
      if (this.code[at] !== FIRST) continue;
      const hue = colours[clamp(Math.round(((this.value[at] - low) / (high - low || 1)) * 64), 0, 64)];
      pixels.data.set(hue, 4 * at);
      pixels.data[4 * at + 3] = 255;
    }
    ctx.putImageData(pixels, 0, 0);
    this.drawKey();
  }
  steps(column) {
    const from = this.info.first + column * this.info.width;
    return [Math.max(from, this.section.info.first), Math.min(from + this.info.width - 1, this.section.info.last)];
  }
  columnAt(x) {
    return clamp(Math.floor((this.section.stepAt(x) + 0.5 - this.info.first) / this.info.width), 0, this.info.columns - 1);
  }
  rowAt(y) { return clamp(Math.floor((y + this.scroller.scrollTop) / this.height), 0, this.rows.length - 1); }
  label(y) { return y < this.shown ? this.rows[this.rowAt(y)].label : ""; }
  tell(r, c) {
    const at = r * this.info.columns + c, code = this.code[at], row = this.rows[r], [from, to] = this.steps(c);
    const who = row.rows.length > 1 && code !== UNKNOWN ? `\nin ${this.info.names[this.who[at]]}` : "";
    const size = row.rows.length > 1 ? ` (${row.rows.length} parameters)` : "";
    let what = { [UNKNOWN]: "not recorded", [FROZEN]: "frozen: it does not want a gradient", [NO_GRADIENT]: "no gradient",
      [ZERO]: "exactly zero", [INF]: "Inf", [NAN]: "NaN" }[code];
    if (code === FIRST) {
      const member = this.who[at], log = this.value[at] + (this.mode === "relative" ? this.usual[member] : 0);
      what = `norm ${compact(2 ** log)}, ${compact(2 ** (log - this.usual[member]))} times its usual`;
    }
    return `${row.label}${size}\n${from === to ? `step ${whole(from)}` : `steps ${whole(from)} to ${whole(to)}`}: ${what}${who}`;
  }
  key(key) {
    const move = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (move) this.row = clamp(this.row + move, 0, this.rows.length - 1);
    else if (key !== "ArrowLeft" && key !== "ArrowRight") return false;
    if (this.section.cursor === null) this.section.point(this.section.info.first);
    const top = this.row * this.height;
    if (top < this.scroller.scrollTop || top + this.height > this.scroller.scrollTop + this.shown) this.scroller.scrollTop = top - this.shown / 2;
    const x = this.section.x(this.section.cursor), box = this.canvas.getBoundingClientRect();
    const text = this.tell(this.row, this.columnAt(x));
    showTip(text, box.left + x, box.top + top - this.scroller.scrollTop + this.height);
    this.section.say(text);
    return true;
  }
  draw() {
    const section = this.section, height = this.shown + AXIS + 2;
    this.canvas.style.width = `${section.width}px`;
    this.canvas.style.height = `${height}px`;
    this.scroller.style.height = `${height}px`;
    this.node.querySelector(".spacer").style.height = `${this.rows.length * this.height + AXIS + 2}px`;
    const ctx = fit(this.canvas, height), offset = this.scroller.scrollTop, right = section.width - RIGHT;
    ctx.clearRect(0, 0, section.width, height);
    const fills = { [FROZEN]: pattern(ctx, FROZEN), [NO_GRADIENT]: pattern(ctx, NO_GRADIENT), [ZERO]: pattern(ctx, ZERO) };
    const from = this.columnAt(section.left), to = this.columnAt(right), bad = [];
    const edge = (c) => section.x(this.info.first + c * this.info.width - 0.5);
    ctx.save();
    ctx.beginPath();
    ctx.rect(section.left, 0, right - section.left, this.shown);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.image, from, 0, to + 1 - from, this.rows.length, edge(from), -offset, edge(to + 1) - edge(from), this.rows.length * this.height);
    for (let r = Math.floor(offset / this.height); r < this.rows.length && r * this.height < offset + this.shown; r++) {
      const y = r * this.height - offset, h = this.height - 1;
      for (let c = from; c <= to; c++) {
        const code = this.code[r * this.info.columns + c];
        if (code === FIRST || code === UNKNOWN) continue;
        const x = Math.floor(edge(c)), w = Math.ceil(edge(c + 1)) - x;
        if (code >= INF) { bad.push([x, y, w, h]); continue; }
        ctx.fillStyle = fills[code];
        ctx.fillRect(x, y, w, h);
      }
      ctx.fillStyle = colour("--bg");
      ctx.fillRect(section.left, y + h, right - section.left, 1);
    }
    for (const [x, y, w, h] of bad) { // last, and never too narrow to be seen
      const wide = Math.max(w, 7);
      alarm(ctx, clamp(x + w / 2 - wide / 2, section.left, right - wide), y, wide, h);
    }
    ctx.restore();
    this.labels(ctx, offset);
    section.frame(ctx, this.shown, this.shown);
  }
  labels(ctx, offset) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, 0, this.section.left, this.shown);
    ctx.clip();
    ctx.font = `${Math.min(11.5, this.height - 1)}px ui-monospace, "DejaVu Sans Mono", Menlo, monospace`;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillStyle = colour("--muted");
    for (let r = Math.floor(offset / this.height); r < this.rows.length && r * this.height < offset + this.shown; r++) {
      const text = this.cut(ctx, this.rows[r].label, this.section.left - 16);
      ctx.fillText(text, this.section.left - 8, (r + 0.5) * this.height - offset);
    }
    ctx.restore();
  }
  cut(ctx, text, room) { // the end of a name says more than its beginning
    if (ctx.measureText(text).width <= room) return text;
    let from = 1;
    while (from < text.length && ctx.measureText(`…${text.slice(from)}`).width > room) from++;
    return `…${text.slice(from)}`;
  }
  drawKey() {
    const list = this.node.querySelector(".key"), present = new Set(this.code);
    list.replaceChildren();
    const scale = make("li");
    const ends = this.mode === "relative" ? [`1/${2 ** OCTAVES}`, `${2 ** OCTAVES} times its usual`] : this.span.map((v) => compact(2 ** v));
    scale.append(make("span", "", ends[0]), make("span", `ramp ${this.mode}`), make("span", "", ends[1]));
    if (present.has(FIRST)) list.append(scale);
    const words = [[NAN, "NaN or Inf"], [ZERO, "exactly zero"], [NO_GRADIENT, "no gradient"], [FROZEN, "frozen"]];
    for (const [code, text] of words) {
      if (!present.has(code) && !(code === NAN && present.has(INF))) continue;
      const item = make("li"), swatch = make("canvas");
      item.append(swatch, make("span", "", text));
      list.append(item);
      const ctx = fit(swatch, 13);
      if (code === NAN) alarm(ctx, 0, 0, 22, 13);
      else { ctx.fillStyle = pattern(ctx, code); ctx.fillRect(0, 0, 22, 13); }
    }
    if (present.has(UNKNOWN)) list.append(make("li", "", "blank: not recorded"));
  }
}

// ---- start
const data = JSON.parse(document.getElementById("data").textContent);
const sections = [...document.querySelectorAll(".charts")].map((node) => new Section(node, data.sections[Number(node.dataset.section)]));
for (const section of sections) section.draw();
const redraw = () => {
  palette.clear();
  for (const section of sections) {
    for (const part of section.parts) if (part.paint) part.paint();
    section.draw();
  }
};
let wanted = 0;
const soon = () => { cancelAnimationFrame(wanted); wanted = requestAnimationFrame(redraw); };
window.addEventListener("resize", soon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
window.addEventListener("beforeprint", () => { root.classList.add("paper"); redraw(); });
window.addEventListener("afterprint", () => { root.classList.remove("paper"); redraw(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { hideTip(); for (const s of sections) s.zoom(...s.full); } });
root.dataset.drawMs = (performance.now() - began).toFixed(1);
requestAnimationFrame(() => setTimeout(() => { root.dataset.paintedMs = performance.now().toFixed(1); }));
