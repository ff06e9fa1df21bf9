// The charts of the report page: canvases that share their steps, their cursor and their zoom. No dependency.
"use strict";
(() => {
  const began = performance.now();
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const UNKNOWN = 0, FROZEN = 1, NO_GRADIENT = 2, ZERO = 3, FIRST = 4, LAST = 253, INF = 254, NAN = 255;
  const MANY_ROWS = 80, MAX_GROUPS = 60, OCTAVES = 6, RIGHT = 18, AXIS = 20;
  const FONT = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";

  // ---- small things -------------------------------------------------------------------------------------------
  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text) => new Float64Array(bytes(text).buffer);
  const whole = (v) => (Math.round(v) || 0).toLocaleString("en-US"); // never "-0"

  function compact(v) {
    if (Number.isNaN(v)) return "NaN";
    if (!Number.isFinite(v)) return v > 0 ? "Inf" : "-Inf";
    const size = Math.abs(v);
    if (size === 0) return "0";
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

  function ticks(low, high, log, num) {
    const out = [];
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
      if (out.length > 1 || high / low > 1.5) return out;
    }
    const raw = (high - low) / num, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
    for (let i = Math.ceil(low / step); i * step <= high; i++) out.push(i * step || 0);
    return out;
  }

  // ---- one tooltip for everything ---------------------------------------------------------------------------------
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

  // ---- a section: all charts of one optimizer, with the view they share -------------------------------------------
  class Section {
    constructor(node, info) {
      Object.assign(this, { node, info, cursor: null, parts: [] });
      this.full = [info.first - 0.5, info.last + 0.5];
      this.view = [...this.full];
      this.line = node.querySelector(".cursor");
      this.area = node.querySelector(".selection");
      this.resetButton = node.querySelector(".reset");
      this.resetButton.addEventListener("click", () => this.zoom(...this.full));
      this.marks = [
        ...info.incidents.flatMap((i) => i.steps.map((step) => ({ step, text: `Incident ${i.number}\n${i.text}`, hue: `--${i.severity}` }))),
        ...info.deeds.map((d) => ({ step: d.at, text: `Done ${d.text}`, hue: "--done", dashed: true })),
      ];
      node.querySelectorAll(".panel").forEach((figure, i) => this.parts.push(new Panel(this, figure, info.panels[i])));
      this.recorded = this.parts.length ? this.parts[0].series[0].steps : null;
      const heat = node.querySelector(".heat");
      if (heat) this.parts.push(new Heat(this, heat, info.heat));
      this.draw();
    }
    get width() { return this.node.clientWidth; }
    get left() { return this.width < 700 ? 92 : 236; }
    x(step) {
      const [low, high] = this.view;
      return this.left + ((step - low) / (high - low)) * (this.width - this.left - RIGHT);
    }
    stepAt(x) {
      const [low, high] = this.view;
      return low + ((x - this.left) / (this.width - this.left - RIGHT)) * (high - low);
    }
    zoom(low, high) {
      const least = Math.min(3, this.full[1] - this.full[0]);
      if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
      low = Math.max(low, this.full[0]);
      high = Math.min(high, this.full[1]);
      this.view = [low, high];
      this.resetButton.hidden = low <= this.full[0] && high >= this.full[1];
      this.draw();
    }
    draw() {
      this.drawRail();
      for (const part of this.parts) part.draw();
      this.point(this.cursor);
    }
    point(step) { // set the cursor, or take it away with null
      if (step !== null && this.recorded) step = this.nearest(this.recorded, step);
      this.cursor = step;
      const at = step === null ? -1 : this.x(step);
      const seen = step !== null && step >= this.view[0] && step <= this.view[1];
      this.line.hidden = !seen;
      if (seen) {
        const rail = this.node.querySelector(".rail"), last = this.parts[this.parts.length - 1].node;
        this.line.style.left = `${at}px`;
        this.line.style.top = `${rail.offsetTop + rail.offsetHeight}px`;
        this.line.style.height = `${last.offsetTop + last.offsetHeight - rail.offsetTop - rail.offsetHeight}px`;
      }
      this.node.querySelector(".at").textContent = step === null ? "" : `step ${whole(step)}`;
      for (const part of this.parts) if (part.read) part.read(step);
    }
    nearest(steps, wanted) {
      let best = steps[0];
      for (let i = 0; i < steps.length; i++) if (Math.abs(steps[i] - wanted) < Math.abs(best - wanted)) best = steps[i];
      return best;
    }
    say(text) { this.node.querySelector(".spoken").textContent = text; }
    markNear(x) { // the texts of all marks under the pointer
      const close = this.marks.filter((m) => Math.abs(this.x(m.step) - x) < 4);
      return [...new Set(close.map((m) => m.text))].slice(0, 4).join("\n\n");
    }
    drawRail() {
      const track = this.node.querySelector(".rail-track");
      track.replaceChildren();
      const inView = (step) => step >= this.view[0] && step <= this.view[1];
      const put = (items, gap, build) => { // neighbours that would overlap become one
        let group = [];
        const flush = () => { if (group.length) track.append(build(group)); group = []; };
        for (const item of items) {
          if (group.length && this.x(item.at) - this.x(group[group.length - 1].at) > gap) flush();
          group.push(item);
        }
        flush();
      };
      const rank = ["warn", "error", "fatal"];
      put(this.info.incidents.map((i) => ({ ...i, at: i.from })).filter((i) => inView(i.at)), 26, (group) => {
        const worst = rank[Math.max(...group.map((i) => rank.indexOf(i.severity)))];
        const first = group[0], last = group[group.length - 1];
        const flag = make("a", `flag ${worst}`, group.length > 1 ? `${first.number}–${last.number}` : `${first.number}`);
        flag.href = `#incident-${first.number}`;
        const words = group.slice(0, 3).map((i) => `Incident ${i.number}, ${i.severity}\n${i.text}`).join("\n\n");
        return this.tipped(flag, words + (group.length > 3 ? `\n\n… and ${group.length - 3} more` : ""), first.at);
      });
      put(this.info.deeds.filter((d) => inView(d.at)), 12, (group) => {
        const flag = make("button", "flag deed");
        flag.type = "button";
        const words = [...new Set(group.map((d) => `Done ${d.text}`))];
        return this.tipped(flag, words.slice(0, 4).join("\n\n"), group[0].at);
      });
    }
    tipped(flag, text, step) {
      flag.style.left = `${this.x(step)}px`;
      flag.setAttribute("aria-label", text);
      const show = () => { const box = flag.getBoundingClientRect(); showTip(text, box.left, box.bottom - 12); };
      for (const event of ["mouseenter", "focus"]) flag.addEventListener(event, show);
      for (const event of ["mouseleave", "blur"]) flag.addEventListener(event, hideTip);
      return flag;
    }
    listen(canvas, { hover, keys }) { // pointer and keys, the same for every canvas
      let start = null;
      const at = (event) => clamp(event.clientX - canvas.getBoundingClientRect().left, this.left, this.width - RIGHT);
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button || event.clientX - canvas.getBoundingClientRect().left < this.left) return;
        start = at(event);
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        const x = at(event);
        this.point(this.stepAt(x));
        if (start !== null && Math.abs(x - start) > 4) {
          hideTip();
          const box = canvas.closest("figure");
          this.area.hidden = false;
          this.area.style.left = `${Math.min(x, start)}px`;
          this.area.style.width = `${Math.abs(x - start)}px`;
          this.area.style.top = `${box.offsetTop}px`;
          this.area.style.height = `${box.offsetHeight}px`;
          return;
        }
        const text = (hover && hover(event, x)) || this.markNear(x);
        if (text) showTip(text, event.clientX, event.clientY); else hideTip();
      });
      const end = (event) => {
        if (start === null) return;
        const x = at(event), from = start;
        start = null;
        this.area.hidden = true;
        if (event.type === "pointerup" && Math.abs(x - from) > 4) this.zoom(this.stepAt(Math.min(x, from)), this.stepAt(Math.max(x, from)));
      };
      canvas.addEventListener("pointerup", end);
      canvas.addEventListener("pointercancel", end);
      canvas.addEventListener("pointerleave", () => { if (start === null) { this.point(null); hideTip(); } });
      canvas.addEventListener("blur", () => { this.point(null); hideTip(); });
      canvas.addEventListener("dblclick", () => this.zoom(...this.full));
      canvas.addEventListener("keydown", (event) => {
        const [low, high] = this.view, now = this.cursor === null ? (low + high) / 2 : this.cursor;
        const stride = Math.max(1, Math.round((high - low) / 200)) * (event.shiftKey ? 10 : 1);
        const go = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: low, End: high }[event.key];
        if (go !== undefined) this.point(clamp(go, this.info.first, this.info.last));
        else if (event.key === "+" || event.key === "=") this.zoom(now - (high - low) / 4, now + (high - low) / 4);
        else if (event.key === "-") this.zoom(now - (high - low), now + (high - low));
        else if (event.key === "Escape") this.zoom(...this.full);
        else if (!keys || !keys(event.key)) return;
        event.preventDefault();
        if (keys && go !== undefined) keys(event.key);
        else if (go !== undefined) {
          const marks = this.markNear(this.x(this.cursor));
          this.say(`step ${whole(this.cursor)}. ${this.parts.map((p) => (p.words ? p.words() : "")).join(" ")} ${marks}`);
        }
      });
    }
    frame(ctx, top, bottom) { // steps below, what was found and done as vertical marks
      const right = this.width - RIGHT;
      ctx.textAlign = "center";
      ctx.textBaseline = "top";
      ctx.fillStyle = colour("--muted");
      for (const step of ticks(this.view[0], this.view[1], false, clamp((right - this.left) / 110, 2, 10))) {
        if (Number.isInteger(step)) ctx.fillText(whole(step), clamp(this.x(step), this.left + 8, right - 12), bottom + 5);
      }
      ctx.save();
      ctx.beginPath();
      ctx.rect(this.left, top, right - this.left, bottom - top);
      ctx.clip();
      for (const i of this.info.incidents) {
        ctx.fillStyle = colour(`--${i.severity}`);
        ctx.globalAlpha = 0.08;
        ctx.fillRect(this.x(i.from - 0.5), top, Math.max(2, this.x(i.to + 0.5) - this.x(i.from - 0.5)), bottom - top);
      }
      ctx.globalAlpha = 0.5;
      for (const mark of this.marks) {
        const x = Math.round(this.x(mark.step)) + 0.5;
        if (x < this.left || x > right) continue;
        ctx.strokeStyle = colour(mark.hue);
        ctx.setLineDash(mark.dashed ? [3, 3] : []);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, bottom);
        ctx.stroke();
      }
      ctx.restore();
    }
  }

  // ---- a chart of lines, points and ticks ---------------------------------------------------------------------------
  class Panel {
    constructor(section, node, info) {
      Object.assign(this, { section, node, log: info.log, title: info.title });
      this.canvas = node.querySelector("canvas");
      const dim = info.title === "Gradient norm" && info.series.length > 1;
      let hue = 0;
      this.series = info.series.map((s, i) => ({
        name: s.name, as: s.as, steps: floats(s.steps), values: floats(s.values),
        hue: s.as === "ticks" ? "--error" : s.as === "points" ? "--s3" : dim && i === 0 ? "--faint" : `--s${(hue++ % 6) + 1}`,
      }));
      const lines = this.series.filter((s) => s.as !== "ticks");
      this.numBad = lines.reduce((sum, s) => sum + s.values.reduce((n, v) => n + !Number.isFinite(v), 0), 0);
      this.canLog = lines.some((s) => s.values.some((v) => v > 0 && Number.isFinite(v)));
      if (!this.canLog) this.log = false;
      this.button = node.querySelector(".scale");
      this.button.hidden = !this.canLog;
      this.button.addEventListener("click", () => { this.log = !this.log; this.draw(); });
      this.legend();
      section.listen(this.canvas, {});
      if (info.title === "Loss") node.classList.add("tall");
    }
    legend() {
      const list = this.node.querySelector(".legend");
      for (const s of this.series) {
        const item = make("li"), swatch = make("span", `swatch ${s.as}`);
        swatch.style.setProperty("--hue", `var(${s.hue})`);
        const name = make("span", "name", s.name);
        name.title = s.name;
        s.out = make("span", "value");
        item.append(swatch, name, s.out);
        list.append(item);
      }
      if (this.numBad) {
        const item = make("li");
        item.append(make("span", "swatch cross", "✕"), make("span", "name", "NaN or Inf"), make("span", "value bad", `${this.numBad}`));
        list.append(item);
      }
    }
    near(s, step) { // the point to read at a step; the newest where a run went back
      let best = -1;
      for (let i = 0; i < s.steps.length; i++) {
        if (best < 0 || Math.abs(s.steps[i] - step) <= Math.abs(s.steps[best] - step)) best = i;
      }
      return best;
    }
    read(step) {
      for (const s of this.series) {
        if (s.as === "ticks") {
          s.out.textContent = step === null ? whole(s.steps.length) : s.steps.includes(step) ? "here" : "";
          continue;
        }
        const value = s.values[step === null ? s.values.length - 1 : this.near(s, step)];
        s.out.textContent = compact(value);
        s.out.classList.toggle("bad", !Number.isFinite(value));
      }
    }
    words() { return `${this.title}: ${this.series.map((s) => `${s.name} ${s.out.textContent}`).join(", ")}.`; }
    range() {
      const [from, to] = this.section.view;
      let low = Infinity, high = -Infinity;
      for (const s of this.series) {
        if (s.as === "ticks") continue;
        for (let i = 0; i < s.values.length; i++) {
          const v = s.values[i];
          if (s.steps[i] < from || s.steps[i] > to || !Number.isFinite(v) || (this.log && v <= 0)) continue;
          if (v < low) low = v;
          if (v > high) high = v;
        }
      }
      if (low > high) return this.log ? [0.1, 1] : [0, 1];
      if (this.log) {
        const pad = Math.max((high / low) ** 0.06, 1.05);
        return [low / pad, high * pad];
      }
      if (low > 0 && low < 0.4 * high) low = 0;
      const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low === 0 ? 0 : low - pad, high + pad];
    }
    draw() {
      this.button.textContent = this.log ? "log scale" : "linear scale";
      this.button.setAttribute("aria-pressed", String(this.log));
      const height = this.canvas.clientHeight, ctx = fit(this.canvas, height), section = this.section;
      const top = 14, bottom = height - AXIS - 4, right = section.width - RIGHT;
      const [low, high] = this.range(), bend = this.log ? Math.log : (v) => v;
      const y = (v) => bottom - ((bend(v) - bend(low)) / (bend(high) - bend(low))) * (bottom - top);
      ctx.clearRect(0, 0, section.width, height);
      ctx.lineWidth = 1;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      for (const v of ticks(low, high, this.log, Math.max(2, Math.floor((bottom - top) / 30)))) {
        const at = Math.round(y(v)) + 0.5;
        ctx.strokeStyle = colour("--grid");
        ctx.beginPath();
        ctx.moveTo(section.left, at);
        ctx.lineTo(right, at);
        ctx.stroke();
        ctx.fillStyle = colour("--muted");
        ctx.fillText(compact(v), section.left - 8, at);
      }
      section.frame(ctx, top, bottom);
      const bad = [];
      ctx.save();
      ctx.beginPath();
      ctx.rect(section.left - 1, top - 2, right - section.left + 2, bottom - top + 3);
      ctx.clip();
      for (const s of this.series) {
        ctx.strokeStyle = ctx.fillStyle = colour(s.hue);
        if (s.as === "points") this.points(ctx, s, y, bad);
        else if (s.as === "ticks") this.marks(ctx, s, bottom);
        else this.line(ctx, s, (v) => (this.log && v <= 0 ? bottom : clamp(y(v), -1e4, 1e4)), bad);
      }
      ctx.restore();
      ctx.strokeStyle = colour("--error");
      ctx.lineWidth = 2;
      let last = -Infinity;
      for (const x of bad.sort((a, b) => a - b)) { // a value that has no place on the axis: a cross at the top edge
        if (x - last < 7 || x < section.left - 1 || x > right + 1) continue;
        last = x;
        ctx.beginPath();
        for (const side of [-1, 1]) { ctx.moveTo(x - 4 * side, 3); ctx.lineTo(x + 4 * side, 11); }
        ctx.stroke();
      }
    }
    line(ctx, s, y, bad) { // lowest and highest of each pixel column, so that no spike is lost
      const ratio = window.devicePixelRatio || 1;
      let pen = false, column = null, first = 0, low = 0, high = 0, last = 0;
      const flush = () => {
        if (column === null) return;
        if (pen) ctx.lineTo(column, first); else { ctx.moveTo(column, first); ctx.lineTo(column + 0.01, first); }
        if (low !== high) { ctx.lineTo(column, low); ctx.lineTo(column, high); ctx.lineTo(column, last); }
        pen = true;
        column = null;
      };
      ctx.lineWidth = 1.5;
      ctx.lineJoin = "round";
      ctx.lineCap = "round";
      ctx.beginPath();
      for (let i = 0; i < s.steps.length; i++) {
        const raw = this.section.x(s.steps[i]), v = s.values[i];
        if (i && s.steps[i] < s.steps[i - 1]) { flush(); pen = false; } // the run went back: a new line
        if (!Number.isFinite(v)) { flush(); pen = false; bad.push(raw); continue; }
        const x = Math.round(raw * ratio) / ratio, at = y(v);
        if (x !== column) { flush(); column = x; first = low = high = at; }
        low = Math.min(low, at);
        high = Math.max(high, at);
        last = at;
      }
      flush();
      ctx.stroke();
    }
    points(ctx, s, y, bad) {
      for (let i = 0; i < s.steps.length; i++) {
        const x = this.section.x(s.steps[i]), v = s.values[i];
        if (!Number.isFinite(v)) { bad.push(x); continue; }
        if (this.log && v <= 0) continue;
        ctx.beginPath();
        ctx.arc(x, y(v), s.steps.length > 150 ? 2 : 3.5, 0, 7);
        ctx.fill();
      }
    }
    marks(ctx, s, bottom) {
      for (const step of s.steps) {
        const x = this.section.x(step);
        ctx.beginPath();
        ctx.moveTo(x - 4, bottom);
        ctx.lineTo(x + 4, bottom);
        ctx.lineTo(x, bottom - 7);
        ctx.fill();
      }
    }
  }

  // ---- the heat map ---------------------------------------------------------------------------------------------------
  const STOPS = {
    relative: ["--cold2", "--cold1", "--even", "--hot1", "--hot2"],
    absolute: ["--low2", "--low1", "--mid", "--high1", "--high2"],
  };
  function ramp(mode) { // 65 colours between the stops
    const stops = STOPS[mode].map((name) => colour(name).match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16)));
    return Array.from({ length: 65 }, (_, i) => {
      const at = (i / 64) * (stops.length - 1), k = Math.min(Math.floor(at), stops.length - 2), f = at - k;
      return `rgb(${stops[k].map((c, j) => Math.round(c + (stops[k + 1][j] - c) * f)).join(",")})`;
    });
  }
  function pattern(ctx, code) { // what is no number is told apart by its drawing, not only by its colour
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
      this.drawKey();
    }
    steps(column) {
      const from = this.info.first + column * this.info.width;
      return [from, Math.min(from + this.info.width - 1, this.section.info.last)];
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
      const colours = ramp(this.mode), [low, high] = this.span;
      const fills = { [FROZEN]: pattern(ctx, FROZEN), [NO_GRADIENT]: pattern(ctx, NO_GRADIENT), [ZERO]: pattern(ctx, ZERO) };
      const from = this.columnAt(section.left), to = this.columnAt(right);
      const edges = [];
      for (let c = from; c <= to + 1; c++) edges.push(clamp(Math.round(section.x(this.info.first + c * this.info.width - 0.5)), section.left, right));
      const bad = [];
      ctx.save();
      ctx.beginPath();
      ctx.rect(0, 0, section.width, this.shown);
      ctx.clip();
      const labels = `${Math.min(11.5, this.height - 1)}px ui-monospace, "DejaVu Sans Mono", Menlo, monospace`;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      for (let r = Math.floor(offset / this.height); r < this.rows.length && r * this.height < offset + this.shown; r++) {
        const y = r * this.height - offset, h = this.height - 1;
        ctx.font = labels;
        ctx.fillStyle = colour("--muted");
        ctx.fillText(this.cut(ctx, this.rows[r].label, section.left - 16), section.left - 8, y + h / 2 + 0.5);
        for (let c = from; c <= to; c++) {
          const at = r * this.info.columns + c, code = this.code[at], x = edges[c - from], w = edges[c - from + 1] - x;
          if (code === UNKNOWN) continue;
          if (code >= INF) { bad.push([x, y, w, h]); continue; }
          ctx.fillStyle = code === FIRST ? colours[clamp(Math.round(((this.value[at] - low) / (high - low || 1)) * 64), 0, 64)] : fills[code];
          ctx.fillRect(x, y, Math.max(w, 1), h);
        }
      }
      for (const [x, y, w, h] of bad) { // last, and never too narrow to be seen
        const wide = Math.max(w, 7);
        alarm(ctx, clamp(x + w / 2 - wide / 2, section.left, right - wide), y, wide, h);
      }
      ctx.restore();
      ctx.font = FONT;
      section.frame(ctx, this.shown, this.shown);
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

  // ---- start ------------------------------------------------------------------------------------------------------------
  const sections = [...document.querySelectorAll(".charts")].map((node) => new Section(node, data.sections[Number(node.dataset.section)]));
  const redraw = () => {
    for (const section of sections) {
      for (const part of section.parts) if (part.drawKey) part.drawKey();
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
})();
