// Charts that share their steps, their cursor and their zoom; a chart of lines, points and ticks.
// ---- a section: all charts of a run, with the view they share
class Section {
  constructor(node, info) {
    Object.assign(this, { node, cursor: null, parts: [] });
    this.measure();
    this.know(info);
    this.view = [...this.full];
    this.line = node.querySelector(".cursor");
    this.area = node.querySelector(".selection");
    this.resetButton = node.querySelector(".reset");
    this.resetButton.addEventListener("click", () => this.zoom(...this.full));
    this.axis = "step";
    for (const button of node.querySelectorAll(".axis button")) {
      button.addEventListener("click", () => { press(button); this.axis = button.dataset.axis; this.draw(); });
    }
    node.querySelectorAll(".panel").forEach((figure, i) => this.parts.push(new Panel(this, figure, info.panels[i])));
    this.recorded = this.parts.length ? this.parts[0].series[0].steps : null;
    const heat = node.querySelector(".heat");
    if (heat) this.parts.push(new Heat(this, heat, info));
  }
  know(info) {
    this.info = info;
    this.full = [info.first - 0.5, info.last + 0.5];
    this.marks = [
      ...info.incidents.flatMap((i) => i.steps.map((step) => ({ step, text: `Incident ${i.number}\n${i.text}`, hue: `--${i.severity}` }))),
      ...info.deeds.map((d) => ({ step: d.at, text: `Done ${d.text}`, hue: "--done", dashed: true })),
    ];
    this.axes = new Map((info.axes || []).map((a) => [a.name, { steps: floats(a.steps), values: floats(a.values) }]));
  }
  get zoomed() { return !this.resetButton.hidden; }
  take(info) { // the run has gone on: what the reader has chosen stays as it is
    const view = this.zoomed ? this.view : null;
    this.know(info);
    this.parts.forEach((part, i) => part.take(part instanceof Panel ? info.panels[i] : info));
    this.recorded = this.parts.length ? this.parts[0].series[0].steps : null;
    this.zoom(...(view || this.full));
  }
  onAxis(step) { // the step as epochs or seconds, between the two that are known
    const { steps, values } = this.axes.get(this.axis);
    const i = clamp(below(steps, step), 0, steps.length - 2), span = steps[i + 1] - steps[i] || 1;
    return values[i] + ((step - steps[i]) / span) * (values[i + 1] - values[i]);
  }
  stepOf(value) { // and back; the first one that reaches it
    const { steps, values } = this.axes.get(this.axis);
    let i = 0;
    while (i < values.length - 2 && values[i + 1] < value) i++;
    const span = values[i + 1] - values[i];
    return span > 0 ? steps[i] + ((value - values[i]) / span) * (steps[i + 1] - steps[i]) : steps[i];
  }
  named(step) {
    if (this.axis === "step") return `Step ${whole(step)}`;
    const value = this.onAxis(step);
    return `Step ${whole(step)}, ${this.axis === "time" ? duration(value) : `epoch ${compact(Number(value.toPrecision(4)))}`}`;
  }
  measure() {
    this.width = this.node.clientWidth;
    this.left = narrow.matches || root.classList.contains("paper") ? 92 : 236;
  }
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
    this.measure();
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
    this.node.querySelector(".at").textContent = step === null ? "At the end" : this.named(step);
    for (const part of this.parts) if (part.read) part.read(step);
  }
  nearest(steps, wanted) {
    let best = steps[0];
    for (let i = 0; i < steps.length; i++) if (Math.abs(steps[i] - wanted) < Math.abs(best - wanted)) best = steps[i];
    return best;
  }
  beyond(now, stride) { // the recorded step that is at least so far away
    let best = stride > 0 ? this.info.last : this.info.first;
    for (const step of this.recorded || []) {
      if ((step - now) / stride >= 1 && Math.abs(step - now) < Math.abs(best - now)) best = step;
    }
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
        const room = group.length > 1 ? 2.4 * gap : gap; // several take more room than one
        if (group.length && this.x(item.at) - this.x(group[0].at) > room) flush();
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
      return this.tipped(flag, words + (group.length > 3 ? `\n\n… and ${group.length - 3} more` : ""), (first.at + last.at) / 2);
    });
    put(this.info.deeds.filter((d) => inView(d.at)), 12, (group) => {
      const flag = make("button", "flag deed");
      flag.type = "button";
      const words = [...new Set(group.map((d) => `Done ${d.text}`))];
      return this.tipped(flag, words.slice(0, 4).join("\n\n"), group[0].at);
    });
  }
  tipped(flag, text, step) {
    flag.style.left = `${(100 * this.x(step)) / this.width}%`; // of the width: it stays in place on paper
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
      const beside = start === null && event.clientX - canvas.getBoundingClientRect().left < this.left;
      this.point(beside ? null : this.stepAt(x));
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
      const text = (hover && hover(event, x)) || (beside ? "" : this.markNear(x));
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
      const stride = Math.max(1, Math.floor((high - low) / 400)) * (event.shiftKey ? 10 : 1);
      const go = { ArrowLeft: this.beyond(now, -stride), ArrowRight: this.beyond(now, stride), Home: low, End: high }[event.key];
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
    const num = clamp((right - this.left) / 110, 2, 10);
    if (this.axis === "step") {
      for (const step of ticks(this.view[0], this.view[1], false, num)) {
        if (Number.isInteger(step)) ctx.fillText(whole(step), Math.min(this.x(step), right - 12), bottom + 5);
      }
    } else {
      const write = this.axis === "time" ? duration : compact;
      const [low, high] = this.view.map((step) => this.onAxis(step));
      const unit = this.axis === "time" ? [86400, 3600, 60].find((size) => high >= 2 * size) || 1 : 1;
      for (const value of ticks(low / unit, high / unit, false, num)) {
        const x = this.x(this.stepOf(value * unit));
        if (x >= this.left - 1 && x <= right + 1) ctx.fillText(write(value * unit), Math.min(x, right - 12), bottom + 5);
      }
    }
    ctx.textAlign = "right";
    ctx.fillText(this.axis, this.left - 8, bottom + 5);
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, top, right - this.left, bottom - top);
    ctx.clip();
    for (const i of this.info.incidents) {
      ctx.fillStyle = colour(`--${i.severity}`);
      ctx.globalAlpha = 0.1;
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

// ---- a chart of lines, points and ticks
const FAR = 8e307; // the difference of two such numbers is still one
const FEW = 60, WINDOW = 25; // points that are drawn as they are; the widest running median

class Panel {
  constructor(section, node, info) {
    Object.assign(this, { section, node, chosen: false });
    this.canvas = node.querySelector("canvas");
    this.choice = node.querySelector(".scale");
    for (const button of this.choice.children) {
      button.addEventListener("click", () => { this.chosen = true; this.log = button.dataset.scale === "log"; this.draw(); });
    }
    this.take(info);
    section.listen(this.canvas, {});
    if (info.title === "Loss") node.classList.add("tall");
  }
  take(info) {
    Object.assign(this, { title: info.title, unit: info.unit, band: info.band });
    if (!this.chosen) this.log = info.log;
    let hue = 0;
    this.series = info.series.map((s) => {
      const steps = floats(s.steps), values = floats(s.values);
      const number = s.as === "line" ? (hue++ % 6) + 1 : 0;
      return {
        name: s.name, as: s.as, num: s.num, smooth: s.smooth, end: floats(s.end)[0], steps, values,
        last: s.last ? floats(s.last) : steps, low: s.low ? floats(s.low) : values, high: s.high ? floats(s.high) : values,
        bads: s.bads ? new Uint32Array(bytes(s.bads).buffer) : null,
        hue: number ? `--s${number}` : s.as === "ticks" ? "--error" : "--s3", pale: number ? `--b${number}` : "--b3",
      };
    });
    const lines = this.series.filter((s) => s.as !== "ticks");
    this.numBad = info.series.reduce((sum, s) => sum + s.bad, 0);
    this.canLog = lines.some((s) => s.values.some((v) => v > 0 && Number.isFinite(v)));
    if (!this.canLog) this.log = false;
    this.choice.hidden = !this.canLog;
    this.legend();
  }
  legend() {
    const list = this.node.querySelector(".legend");
    list.replaceChildren();
    for (const s of this.series) {
      const item = make("li"), swatch = make("span", `swatch ${s.as}`);
      swatch.style.setProperty("--hue", `var(${s.hue})`);
      const name = make("span", "name", s.name);
      name.title = s.name;
      s.out = make("span", "value");
      item.append(swatch, name, s.out);
      list.append(item);
    }
    if (this.band) {
      const item = make("li");
      item.append(make("span", "swatch area"), make("span", "name", "usual range"), make("span", "value", this.band.map(compact).join(" to ")));
      list.append(item);
    }
    if (this.numBad) {
      const item = make("li");
      item.append(make("span", "swatch cross", "✕"), make("span", "name", "NaN or Inf"), make("span", "value bad", whole(this.numBad)));
      list.append(item);
    }
  }
  near(s, step) { // the bucket that holds a step, else the nearest
    const i = clamp(below(s.steps, step), 0, s.steps.length - 1);
    const next = Math.min(i + 1, s.steps.length - 1);
    return step <= s.last[i] || step - s.last[i] <= s.steps[next] - step ? i : next;
  }
  read(step) {
    for (const s of this.series) {
      if (s.as === "ticks") {
        s.out.textContent = step === null ? whole(s.num) : s.steps.includes(step) ? "here" : "";
        continue;
      }
      if (step === null) {
        s.out.textContent = this.withUnit(compact(s.end));
        s.out.classList.toggle("bad", !Number.isFinite(s.end));
        continue;
      }
      const i = this.near(s, step), value = s.values[i];
      const wide = s.high[i] > s.low[i] ? `${compact(s.low[i])} to ${compact(s.high[i])}` : compact(value);
      s.out.textContent = s.bads && s.bads[i] && Number.isFinite(value) ? `${wide}, NaN or Inf` : this.withUnit(wide);
      s.out.classList.toggle("bad", !Number.isFinite(value) || Boolean(s.bads && s.bads[i]));
    }
  }
  withUnit(text) { return this.unit ? `${text} ${this.unit}` : text; }
  words() { return `${this.title}: ${this.series.map((s) => `${s.name} ${s.out.textContent}`).join(", ")}.`; }
  range() {
    const [from, to] = this.section.view;
    let low = Infinity, high = -Infinity;
    for (const s of this.series) {
      if (s.as === "ticks") continue;
      for (let i = 0; i < s.values.length; i++) {
        if (s.last[i] < from || s.steps[i] > to || !Number.isFinite(s.values[i])) continue;
        const least = this.log && s.low[i] <= 0 ? s.values[i] : s.low[i];
        if (s.high[i] > high) high = s.high[i];
        if (least < low && !(this.log && least <= 0)) low = least;
      }
    }
    if (low > high || (this.log && high <= 0)) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      const pad = Math.max(Math.exp(0.06 * (Math.log(high) - Math.log(low))), 1.05);
      return [Math.max(low / pad, Number.MIN_VALUE), Math.min(high * pad, Number.MAX_VALUE)];
    }
    if (low > 0 && low < 0.4 * high) low = 0;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [Math.max(low === 0 ? 0 : low - pad, -FAR), Math.min(high + pad, FAR)];
  }
  draw() {
    for (const button of this.choice.children) button.setAttribute("aria-pressed", String((button.dataset.scale === "log") === this.log));
    const height = this.canvas.clientHeight, ctx = fit(this.canvas, height), section = this.section;
    const top = 18, bottom = height - AXIS - 4, right = section.width - RIGHT;
    const [low, high] = this.range(), bend = this.log ? Math.log : (v) => v;
    const y = (v) => bottom - ((bend(v) - bend(low)) / (bend(high) - bend(low))) * (bottom - top);
    ctx.clearRect(0, 0, section.width, height);
    ctx.lineWidth = 1;
    if (this.band) this.reference(ctx, y, top, bottom, right, low, high);
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
    ctx.fillText(`${this.unit || this.title.toLowerCase()}${this.log ? ", log" : ""}`, section.left - 8, 6);
    section.frame(ctx, top, bottom);
    const bad = [], place = (v) => (this.log && v <= 0 ? bottom : clamp(y(v), -1e4, 1e4));
    ctx.save();
    ctx.beginPath();
    ctx.rect(section.left - 4, top - 2, right - section.left + 8, bottom - top + 3);
    ctx.clip();
    for (const s of this.series) if (s.as === "line") this.extent(ctx, s, place, bad);
    for (const s of this.series) if (s.as === "line") this.middle(ctx, s, place);
    for (const s of this.series) {
      ctx.strokeStyle = ctx.fillStyle = colour(s.hue);
      if (s.as === "points") this.points(ctx, s, y, bad);
      else if (s.as === "ticks") this.marks(ctx, s, bottom);
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
  reference(ctx, y, top, bottom, right, low, high) { // what is usual
    const [from, to] = this.band.map((v) => clamp(y(clamp(v, low, high)), top, bottom));
    ctx.fillStyle = colour("--usual");
    ctx.fillRect(this.section.left, to, right - this.section.left, Math.max(from - to, 0));
  }
  visible(s) { // the indices of the buckets in view, and one on either side
    const [from, to] = this.section.view;
    return [Math.max(below(s.steps, from) - 1, 0), Math.min(below(s.steps, to) + 2, s.steps.length)];
  }
  smoothed(s) {
    const [a, b] = this.visible(s);
    return s.smooth && b - a > FEW;
  }
  extent(ctx, s, y, bad) { // lowest and highest of each pixel column, so that no spike is lost
    const ratio = window.devicePixelRatio || 1, [a, b] = this.visible(s), alone = [], light = this.smoothed(s);
    let pen = 0, column = null, first = 0, low = 0, high = 0, last = 0, where = 0;
    const flush = () => {
      if (column === null) return;
      if (pen) ctx.lineTo(where, first); else ctx.moveTo(where, first);
      if (low !== high) { ctx.lineTo(where, low); ctx.lineTo(where, high); ctx.lineTo(where, last); }
      pen++;
      column = null;
    };
    const lift = () => {
      flush();
      if (pen === 1) alone.push([where, last]);
      pen = 0;
    };
    ctx.strokeStyle = ctx.fillStyle = colour(light ? s.pale : s.hue);
    ctx.lineWidth = light ? 1 : 1.5;
    ctx.lineJoin = ctx.lineCap = "round";
    ctx.beginPath();
    for (let i = a; i < b; i++) {
      const raw = this.section.x((s.steps[i] + s.last[i]) / 2);
      if (s.bads ? s.bads[i] : !Number.isFinite(s.values[i])) bad.push(raw);
      if (!Number.isFinite(s.values[i])) { lift(); continue; }
      const x = Math.round(raw * ratio) / ratio, at = y(s.values[i]);
      if (x !== column) { flush(); column = x; where = light ? x + 0.5 / ratio : raw; first = low = high = at; }
      low = Math.min(low, y(s.high[i]));
      high = Math.max(high, y(s.low[i]));
      last = at;
    }
    lift();
    ctx.stroke();
    for (const [x, at] of alone) { // a point without neighbours would not be seen
      ctx.beginPath();
      ctx.arc(x, at, 2.5, 0, 7);
      ctx.fill();
    }
  }
  middle(ctx, s, y) { // a running median: it follows a jump at once, and no spike bends it
    if (!this.smoothed(s)) return;
    const [a, b] = this.visible(s), half = Math.floor(clamp((b - a) / 25, 5, WINDOW) / 2);
    let pen = false;
    ctx.strokeStyle = colour(s.hue);
    ctx.lineWidth = 1.75;
    ctx.beginPath();
    for (let i = a; i < b; i++) {
      if (!Number.isFinite(s.values[i])) { pen = false; continue; }
      const around = [...s.values.slice(Math.max(a, i - half), Math.min(b, i + half + 1))].filter(Number.isFinite).sort((p, q) => p - q);
      const x = this.section.x((s.steps[i] + s.last[i]) / 2), at = y(around[around.length >> 1]);
      if (pen) ctx.lineTo(x, at); else ctx.moveTo(x, at);
      pen = true;
    }
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
      ctx.strokeStyle = colour("--bg");
      ctx.lineWidth = 1;
      ctx.stroke();
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
