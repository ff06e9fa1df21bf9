// Charts of one optimizer that share their steps, their cursor and their zoom; a chart of lines, points and ticks.
// ---- a section: all charts of one optimizer, with the view they share
class Section {
  constructor(node, info) {
    Object.assign(this, { node, info, cursor: null, parts: [] });
    this.measure();
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
    this.node.querySelector(".at").textContent = step === null ? "At the end" : `Step ${whole(step)}`;
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
    for (const step of ticks(this.view[0], this.view[1], false, clamp((right - this.left) / 110, 2, 10))) {
      if (Number.isInteger(step)) ctx.fillText(whole(step), Math.min(this.x(step), right - 12), bottom + 5);
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

// ---- a chart of lines, points and ticks
class Panel {
  constructor(section, node, info) {
    Object.assign(this, { section, node, log: info.log, title: info.title });
    this.canvas = node.querySelector("canvas");
    const dim = info.title === "Gradient norm" && info.series.length > 1;
    let hue = 0;
    this.series = info.series.map((s, i) => ({
      name: s.name, as: s.as, num: s.num, steps: floats(s.steps), values: floats(s.values),
      hue: s.as === "ticks" ? "--error" : s.as === "points" ? "--s3" : dim && i === 0 ? "--faint" : `--s${(hue++ % 6) + 1}`,
    }));
    const lines = this.series.filter((s) => s.as !== "ticks");
    this.numBad = info.series.reduce((sum, s) => sum + s.bad, 0);
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
      item.append(make("span", "swatch cross", "✕"), make("span", "name", "NaN or Inf"), make("span", "value bad", whole(this.numBad)));
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
        s.out.textContent = step === null ? whole(s.num) : s.steps.includes(step) ? "here" : "";
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
    ctx.rect(section.left - 4, top - 2, right - section.left + 8, bottom - top + 3);
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
    const alone = [];
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
    ctx.lineWidth = 1.5;
    ctx.lineJoin = "round";
    ctx.lineCap = "round";
    ctx.beginPath();
    for (let i = 0; i < s.steps.length; i++) {
      const raw = this.section.x(s.steps[i]), v = s.values[i];
      if (i && s.steps[i] < s.steps[i - 1]) lift(); // the run went back: a new line
      if (!Number.isFinite(v)) { lift(); bad.push(raw); continue; }
      const x = Math.round(raw * ratio) / ratio, at = y(v);
      if (x !== column) { flush(); column = x; where = raw; first = low = high = at; }
      low = Math.min(low, at);
      high = Math.max(high, at);
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
