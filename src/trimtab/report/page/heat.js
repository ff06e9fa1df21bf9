// The heat map, layers over time; then everything is drawn.
const UNKNOWN = 0, FROZEN = 1, NO_GRADIENT = 2, ZERO = 3, FIRST = 4, LAST = 253, INF = 254, NAN = 255; // as in figures.py
const MANY_ROWS = 34, FEW_ROWS = 24, OCTAVES = 6;

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
function grow(names) { // the module tree; a module with one part is one with it
  const top = { path: "", label: "", rows: [], parts: new Map(), leaf: null };
  names.forEach((name, row) => {
    let node = top;
    const words = name.split(".");
    words.forEach((word, i) => {
      node.rows.push(row);
      if (!node.parts.has(word)) node.parts.set(word, { path: words.slice(0, i + 1).join("."), label: word, rows: [], parts: new Map(), leaf: null });
      node = node.parts.get(word);
    });
    node.rows.push(row);
    node.leaf = row;
  });
  return top;
}

class Heat {
  constructor(section, node, info) {
    Object.assign(this, { section, node, heats: info.heats, mode: "layers", sort: "depth", query: "", row: 0, metric: 0 });
    this.named = new Set(info.named);
    this.canvas = node.querySelector(".spacer canvas");
    this.scroller = node.querySelector(".scroller");
    this.labels = node.querySelector(".labels");
    this.choose(0);
    this.listen();
    section.listen(this.canvas, {
      hover: (event, x) => {
        const y = event.clientY - this.canvas.getBoundingClientRect().top;
        return event.offsetX >= section.left && y < this.shown ? this.tell(this.rowAt(y), this.columnAt(x)) : "";
      },
      keys: (key) => this.key(key),
    });
  }
  listen() {
    const on = (selector, event, act) => this.node.querySelector(selector).addEventListener(event, (e) => { act(e.target); this.arrange(); this.draw(); });
    on(".metric", "change", (select) => {
      this.choose(Number(select.value));
      const metric = this.info.metric.replace("Gradient RMS", "Gradient norm"); // as the page calls it at first
      this.node.querySelector("h3").textContent = `${metric} by layer`;
    });
    on(".sort", "change", (select) => { this.sort = select.value; this.scroller.scrollTop = 0; });
    on(".search", "input", (input) => { this.query = input.value.trim().toLowerCase(); this.scroller.scrollTop = 0; });
    for (const button of this.node.querySelectorAll("[data-mode]")) {
      button.addEventListener("click", () => { press(button); this.mode = button.dataset.mode; this.arrange(); this.draw(); });
    }
    for (const button of this.node.querySelectorAll("[data-fold]")) {
      button.addEventListener("click", () => {
        this.open = new Set();
        if (button.dataset.fold === "none") this.walk(this.tree, (part) => this.open.add(part.path));
        this.arrange();
        this.draw();
      });
    }
    this.scroller.addEventListener("scroll", () => this.draw());
  }
  take(info) {
    this.heats = info.heats;
    this.named = new Set(info.named);
    this.choose(this.metric);
    this.arrange();
  }
  choose(number) { // another metric: its rows may differ
    this.metric = number;
    const info = this.info = this.heats[number];
    this.codes = bytes(info.codes);
    this.usual = info.names.map((_, row) => this.median(row));
    this.level = this.middles = Array.from({ length: info.columns }, (_, column) => this.middle(column));
    this.tree = grow(info.names);
    if (!this.open) {
      this.open = new Set();
      const few = info.names.length <= FEW_ROWS;
      if (few) this.walk(this.tree, (part) => this.open.add(part.path));
      this.arrange();
      const first = this.rows.findIndex((r) => r.marked);
      this.aim = first * this.height > this.shown - 3 * this.height ? first * this.height - this.shown / 2 : 0;
    }
  }
  walk(part, act) { for (const child of part.parts.values()) { if (child.parts.size) act(child); this.walk(child, act); } }
  log(row, code) {
    const { low, high } = this.info;
    return low[row] + ((code - FIRST) / (LAST - FIRST)) * (high[row] - low[row]);
  }
  median(row) { // of a row over time
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
  middle(column) { // of all layers at one time
    const found = [];
    for (let row = 0; row < this.info.names.length; row++) {
      const code = this.codes[row * this.info.columns + column];
      if (code >= FIRST && code <= LAST) found.push(this.log(row, code));
    }
    return found.length ? found.sort((a, b) => a - b)[found.length >> 1] : 0;
  }
  against(row, column) { return this.mode === "own" ? this.usual[row] : this.mode === "layers" ? this.middles[column] : 0; }
  worst(row) { // how far a row is from what it is compared with, at its worst
    let most = 0;
    for (let c = 0; c < this.info.columns; c++) {
      const code = this.codes[row * this.info.columns + c];
      if (code >= INF) return Infinity;
      if (code >= FIRST && code <= LAST) most = Math.max(most, Math.abs(this.log(row, code) - this.against(row, c)));
    }
    return most;
  }
  arrange() { // which rows are shown, in which order
    const { names } = this.info, leaf = (row) => ({ label: names[row], rows: [row], depth: 0, marked: this.named.has(names[row]) });
    if (this.query || this.sort !== "depth") {
      const found = names.map((_, row) => row).filter((row) => names[row].toLowerCase().includes(this.query));
      if (this.sort === "name") found.sort((a, b) => names[a].localeCompare(names[b], "en", { numeric: true }));
      if (this.sort === "worst") {
        const score = new Map(found.map((row) => [row, this.worst(row)]));
        found.sort((a, b) => (score.get(b) === score.get(a) ? a - b : score.get(b) > score.get(a) ? 1 : -1));
      }
      this.rows = found.map(leaf);
    } else {
      this.rows = [];
      const add = (part, depth, lead) => {
        for (const child of part.parts.values()) {
          let node = child, label = lead + child.label;
          while (node.leaf === null && node.parts.size === 1) { node = [...node.parts.values()][0]; label += `.${node.label}`; }
          const folds = node.parts.size > 0, open = this.open.has(node.path);
          this.rows.push({ label, path: node.path, rows: node.rows, depth, folds, open, marked: !open && node.rows.some((r) => this.named.has(names[r])) });
          if (folds && open) add(node, depth + 1, "");
        }
      };
      add(this.tree, 0, "");
    }
    this.height = this.rows.length > MANY_ROWS ? 15 : clamp(Math.floor(520 / Math.max(this.rows.length, 1)), 14, 20);
    this.shown = Math.max(Math.min(this.rows.length, MANY_ROWS), 1) * this.height;
    this.row = Math.min(this.row, Math.max(this.rows.length - 1, 0));
    this.score();
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
            const value = this.log(row, code) - (this.mode === "own" ? this.usual[row] : 0);
            if (this.code[at] < INF && value > this.value[at]) { this.code[at] = FIRST; this.value[at] = value; this.who[at] = row; }
          } else if (code > this.code[at]) { this.code[at] = code; this.who[at] = row; }
        }
      }
    });
    if (this.mode === "layers") this.level = this.centre();
    let low = Infinity, high = -Infinity;
    for (let i = 0; i < num; i++) if (this.code[i] === FIRST) { low = Math.min(low, this.value[i]); high = Math.max(high, this.value[i]); }
    this.span = this.mode !== "absolute" || low > high ? [-OCTAVES, OCTAVES] : [low, high];
    this.paint();
  }
  centre() { // take from every column the middle of the rows that are shown: what is like the others has no colour
    const { columns } = this.info;
    return Array.from({ length: columns }, (_, c) => {
      const found = [];
      this.rows.forEach((row, r) => { if (!row.open && this.code[r * columns + c] === FIRST) found.push(this.value[r * columns + c]); });
      const level = found.length ? found.sort((a, b) => a - b)[found.length >> 1] : 0;
      for (let r = 0; r < this.rows.length; r++) this.value[r * columns + c] -= level;
      return level;
    });
  }
  paint() { // one pixel per cell: drawn once, stretched at every zoom
    const { columns } = this.info, colours = ramp(this.mode === "absolute" ? "absolute" : "relative"), [low, high] = this.span;
    this.image = make("canvas");
    this.image.width = columns;
    this.image.height = Math.max(this.rows.length, 1);
    const ctx = this.image.getContext("2d"), pixels = ctx.createImageData(columns, this.image.height);
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
  tell(r, c) {
    const row = this.rows[r];
    if (!row) return "";
    const name = row.path || row.label;
    const at = r * this.info.columns + c, code = this.code[at], [from, to] = this.steps(c);
    const who = row.rows.length > 1 && code !== UNKNOWN ? `\nin ${this.info.names[this.who[at]]}` : "";
    const size = row.rows.length > 1 ? ` (${row.rows.length} parameters)` : "";
    const base = (member) => (this.mode === "own" ? this.usual[member] : this.mode === "layers" ? this.level[c] : 0);
    let what = { [UNKNOWN]: "not recorded", [FROZEN]: "frozen: it does not want a gradient", [NO_GRADIENT]: "no gradient",
      [ZERO]: "exactly zero", [INF]: "Inf", [NAN]: "NaN" }[code];
    if (code === FIRST) {
      const member = this.who[at], log = this.value[at] + base(member);
      what = `${this.info.metric.toLowerCase().replace("rms", "RMS")} ${compact(2 ** log)}, ${compact(2 ** (log - this.level[c]))} times the middle layer, ${compact(2 ** (log - this.usual[member]))} times its usual`;
    }
    return `${name}${size}\n${from === to ? `step ${whole(from)}` : `steps ${whole(from)} to ${whole(to)}`}: ${what}${who}`;
  }
  key(key) {
    const move = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (key === "Enter" || key === " ") return this.fold(this.rows[this.row]);
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
  fold(row) {
    if (!row || !row.folds) return false;
    if (!this.open.delete(row.path)) this.open.add(row.path);
    this.arrange();
    this.draw();
    return true;
  }
  draw() {
    const section = this.section, height = this.shown + AXIS + 2;
    this.canvas.style.width = `${section.width}px`;
    this.canvas.style.height = `${height}px`;
    this.scroller.style.height = `${height}px`;
    this.node.querySelector(".spacer").style.height = `${this.rows.length * this.height + AXIS + 2}px`;
    if (this.aim) { this.scroller.scrollTop = this.aim; this.aim = 0; }
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
    ctx.drawImage(this.image, from, 0, to + 1 - from, this.image.height, edge(from), -offset, edge(to + 1) - edge(from), this.image.height * this.height);
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
    this.drawLabels(offset);
    section.frame(ctx, this.shown, this.shown);
  }
  drawLabels(offset) { // real buttons for what folds, so that every way of reading the page has them
    const first = Math.floor(offset / this.height), focused = document.activeElement && document.activeElement.dataset.path;
    const last = Math.min(this.rows.length, Math.ceil((offset + this.shown) / this.height));
    this.labels.style.height = `${this.shown}px`;
    this.labels.style.width = `${this.section.left - 4}px`;
    this.labels.replaceChildren(...this.rows.slice(first, last).map((row, i) => {
      const node = make(row.folds ? "button" : "span", `row-label${row.marked ? " marked" : ""}`);
      const text = make("span", "text", row.label);
      if (row.folds) {
        node.type = "button";
        node.dataset.path = row.path;
        node.setAttribute("aria-expanded", String(row.open));
        node.append(make("span", "twist", row.open ? "▾" : "▸"));
        node.addEventListener("click", () => this.fold(row));
      }
      node.append(text);
      if (row.folds && !row.open) node.append(make("span", "size", `${row.rows.length}`));
      node.title = row.path || row.label;
      node.style.top = `${(first + i) * this.height - offset}px`;
      node.style.height = node.style.lineHeight = `${this.height}px`;
      node.style.paddingLeft = `${4 + 10 * row.depth + (row.folds ? 0 : 12)}px`;
      return node;
    }));
    if (focused) for (const node of this.labels.children) if (node.dataset.path === focused) node.focus({ preventScroll: true });
    const more = this.node.querySelector(".more"), all = this.rows.length;
    const seen = `rows ${first + 1} to ${Math.min(last, first + Math.round(this.shown / this.height))} of ${all}`;
    const words = !all ? `No layer is called “${this.query}”.` : all * this.height > this.shown ? `${seen}: scroll for more ${last < all ? "↓" : "↑"}` : "";
    if (more.textContent !== words) more.textContent = words;
    this.scroller.classList.toggle("below", all * this.height - offset > this.shown + 1);
  }
  drawKey() {
    const list = this.node.querySelector(".key"), present = new Set(this.code);
    list.replaceChildren();
    const scale = make("li"), times = { layers: "the middle layer", own: "its usual" }[this.mode];
    const ends = times ? [`1/${2 ** OCTAVES}`, `${2 ** OCTAVES} times ${times}`] : this.span.map((v) => compact(2 ** v));
    scale.append(make("span", "", ends[0]), make("span", `ramp ${times ? "relative" : "absolute"}`), make("span", "", ends[1]));
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
    if (this.named.size) { const item = make("li"); item.append(make("span", "dot", "●"), make("span", "", "named by a finding")); list.append(item); }
    if (this.info.width > 1) list.append(make("li", "", `each cell: the largest of ${whole(this.info.width)} steps`));
    if (present.has(UNKNOWN)) list.append(make("li", "", "blank: not recorded"));
  }
}

// ---- a run that goes on: `trimtab ui` hands over the page as it is now
const shape = (d) => JSON.stringify(d.sections.map((s) => [s.axes, s.panels, s.heats].map((all) => all.map((one) => one.name || one.title || one.metric))));
const blocks = (body) => [...body.querySelectorAll("body > header, main > :not(.charts)")];

function takePage(text) { // false where it has other charts than this one and has to be loaded
  const fresh = new DOMParser().parseFromString(text, "text/html"), block = fresh.getElementById("data");
  const next = block ? JSON.parse(block.textContent) : null;
  if (!next || shape(next) !== shape(data)) return false;
  const top = () => (sections.length ? sections[0].node.getBoundingClientRect().top : 0);
  const before = top(), scrolled = window.scrollY > 0;
  takeTexts(fresh);
  fresh.querySelectorAll(".charts canvas").forEach((canvas, i) => {
    document.querySelectorAll(".charts canvas[role]")[i].setAttribute("aria-label", canvas.getAttribute("aria-label"));
  });
  data = next;
  sections.forEach((section) => section.take(next.sections[Number(section.node.dataset.section)]));
  document.title = fresh.title;
  if (scrolled) window.scrollBy(0, top() - before); // what was above the charts may have grown
  return true;
}
function viewNow() { return sections.map((s) => (s.zoomed ? s.view : null)); } // for a page that takes the place of this one
function takeView(views) { sections.forEach((s, i) => { if (views && views[i]) s.zoom(...views[i]); }); }
function takeTexts(fresh) { // everything but the charts; what has not changed is not touched, what was unfolded stays so
  const main = document.querySelector("main"), charts = [...main.querySelectorAll(".charts")];
  const name = (details) => `${(details.closest("[id]") || main).id} ${details.className} ${details.querySelector("summary").textContent.slice(0, 20)}`;
  const open = new Map([...document.querySelectorAll("details")].map((one) => [name(one), one.open]));
  const known = new Map(blocks(document).map((node) => [source.get(node), node]));
  const place = (node) => {
    const html = node.outerHTML, kept = known.get(html), put = kept || document.importNode(node, true);
    known.delete(html);
    source.set(put, html);
    if (!kept) for (const one of put.querySelectorAll("details")) if (open.has(name(one))) one.open = open.get(name(one));
    return put;
  };
  const header = place(fresh.querySelector("body > header")), old = document.querySelector("body > header");
  if (header !== old) old.replaceWith(header);
  const places = [...fresh.querySelector("main").children].map((node) => (node.matches(".charts") ? charts.shift() : place(node)));
  for (const node of known.values()) node.remove();
  places.forEach((node, i) => { // before the next one that is there already: moving the charts would lose focus and scroll position
    if (!node.isConnected) main.insertBefore(node, places.slice(i + 1).find((later) => later.isConnected) || null);
  });
}

// ---- start
let data = JSON.parse(document.getElementById("data").textContent);
const sections = [...document.querySelectorAll(".charts")].map((node) => new Section(node, data.sections[Number(node.dataset.section)]));
const source = new Map(blocks(document).map((node) => [node, node.outerHTML])); // as it came, before anything was unfolded
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
