"use strict";
// Everything that comes from a run is set as text, never as HTML.

const byId = (id) => document.getElementById(id);

function listen(path, take) {
  const source = new EventSource(path);
  source.onmessage = (event) => { byId("lost").hidden = true; take(JSON.parse(event.data)); };
  source.onerror = () => { byId("lost").hidden = false; };
  source.onopen = () => { byId("lost").hidden = true; };
}

function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function listPage() {
  let runs = [];
  const chosen = new Set();

  function choose(id, box) {
    if (box.checked) chosen.add(id); else chosen.delete(id);
    byId("compare").disabled = chosen.size !== 2;
    byId("compare").textContent = chosen.size === 2 ? "Compare these two" : "Compare two runs";
  }

  function draw() {
    const wanted = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const only = byId("live").checked;
    const body = byId("runs");
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    body.replaceChildren();
    let shown = 0;
    for (const run of runs) {
      const text = [run.folder_name, run.script, run.model, run.verdict, run.state].join(" ").toLowerCase();
      if (!wanted.every((word) => text.includes(word)) || (only && run.state !== "live")) continue;
      shown += 1;
      const row = body.insertRow();
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = chosen.has(run.id);
      box.setAttribute("aria-label", `compare ${run.folder_name}`);
      box.dataset.key = `box-${run.id}`;
      box.addEventListener("change", () => choose(run.id, box));
      row.insertCell().append(box);
      cell(row, run.started ? run.started.slice(0, 16).replace("T", " ") : "?", "when");
      const link = document.createElement("a");
      link.href = `/run/${run.id}`;
      link.textContent = run.folder_name;
      link.dataset.key = `link-${run.id}`;
      cell(row, "", "long").append(link);
      cell(row, run.script || "-");
      cell(row, run.num_steps.toLocaleString("en"), "number");
      cell(row, run.verdict, `long ${run.tone}`);
      cell(row, run.size, "number");
      cell(row, run.state, run.state === "live" ? "live" : "faint");
    }
    if (focused) for (const one of body.querySelectorAll("[data-key]")) if (one.dataset.key === focused) one.focus();
    byId("count").textContent = `${shown} of ${runs.length}`;
    byId("empty").hidden = runs.length > 0;
  }

  byId("filter").addEventListener("input", draw);
  byId("live").addEventListener("change", draw);
  byId("compare").addEventListener("click", () => {
    const [a, b] = runs.filter((run) => chosen.has(run.id)).map((run) => run.id).reverse();
    location.href = `/compare?a=${a}&b=${b}`;
  });
  listen("/events", (data) => {
    runs = data.runs;
    byId("empty").textContent = `No run in ${data.directory} yet. One appears here by itself.`;
    draw();
  });
}

function runPage() {
  const id = location.pathname.split("/")[2];
  const views = byId("views");
  let shown = null, busy = false, waiting = null;

  // An open report takes what is new and keeps zoom, scroll position and all that was chosen.
  async function update(stamp) {
    if (busy) { waiting = stamp; return; }
    busy = true;
    const began = performance.now(), path = `/page/${id}?stamp=${encodeURIComponent(stamp)}`;
    try {
      if (shown === null) await load(path);
      else {
        const answer = await fetch(path);
        if (answer.ok && !shown.contentWindow.takePage(await answer.text())) await load(path);
      }
      document.title = shown.contentDocument.title || "trimtab run";
      views.dataset.updates = String(Number(views.dataset.updates || 0) + 1);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // no connection: the next event brings it
    }
    // The page of a long run takes seconds to make: at most a fifth of the time goes into it.
    setTimeout(() => {
      busy = false;
      if (waiting !== null) { const later = waiting; waiting = null; update(later); }
    }, Math.max(500, 4 * (performance.now() - began)));
  }

  // A page with other charts is loaded behind the old one and takes its place when it is painted, in the same place.
  function load(path) {
    return new Promise((done) => {
      const next = document.createElement("iframe"), old = shown;
      next.title = "report of the run";
      next.src = path;
      next.style.position = old ? "absolute" : "static";
      next.style.visibility = old ? "hidden" : "visible";
      next.addEventListener("load", () => {
        shown = next;
        if (old) {
          if (next.contentWindow.takeView) next.contentWindow.takeView(old.contentWindow.viewNow());
          next.contentWindow.scrollTo(0, old.contentWindow.scrollY);
          old.remove();
        }
        next.style.position = "static";
        next.style.visibility = "visible";
        done();
      }, {once: true});
      views.append(next);
    });
  }

  let held = null;
  byId("hold").addEventListener("change", () => {
    if (!byId("hold").checked && held !== null) { update(held); held = null; }
  });
  listen(`/events/${id}`, (data) => {
    byId("state").textContent = `${data.state}, ${data.num_steps.toLocaleString("en")} steps`;
    byId("state").className = data.state === "live" ? "live" : "faint";
    byId("holding").hidden = data.state !== "live";
    if (byId("hold").checked && shown) held = data.stamp; else update(data.stamp);
  });
}

if (byId("views")) runPage(); else listPage();
