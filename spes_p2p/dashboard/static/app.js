// Fetches the state of the run, keeps it fresh, and fills everything that is not a chart. What peers say of themselves
// is only ever set as text.
"use strict";

const REFRESH_MILLISECONDS = 1500;
const view = { state: null, axis: "tokens", way: "sent", count: 15, part: "mean", sort: "peer", down: false, until: 1 };
const by = id => document.getElementById(id);
const UNITS = ["", "k", "M", "G", "T", "P"];

function count(value, unit = "") {
  if (value == null) return "–";
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < UNITS.length - 1) { value /= 1000; at++; }
  const digits = at === 0 ? (Number.isInteger(value) ? 0 : 1) : value < 10 ? 2 : value < 100 ? 1 : 0;
  return value.toFixed(digits) + (UNITS[at] || unit ? `${unit ? " " : ""}${UNITS[at]}${unit}` : "");
}

function span(seconds) {
  if (seconds == null) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

function spans(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] === number - 1) last[1] = number; else parts.push([number, number]);
  }
  return parts.map(([first, last]) => first === last ? `${first}` : `${first}-${last}`).join(",");
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

const last = values => { for (let at = values.length - 1; at >= 0; at--) if (values[at] != null) return values[at]; return null; };

// ---- the parts of the page ----

function showHeader(state) {
  const source = state.source, badge = by("link");
  by("run").textContent = state.run ? `run ${state.run.run_id}` : state.replay ? `past run: ${state.replay.peers.join(", ")}` : "spes-p2p";
  document.title = state.run ? `${state.run.run_id} · spes-p2p` : "spes-p2p";
  const isOld = source && state.now - source.at > 60;
  const [word, kind] = state.replay ? ["replay", ""] : view.cut ? ["dashboard ended", "bad"] : !source ? ["waiting", "warn"] : source.error ? ["no answer", "bad"] : isOld ? ["history", "warn"] : ["live", "good"];
  badge.textContent = word;
  badge.className = `badge ${kind}`;
  const notice = by("notice");
  notice.hidden = !(source && source.error) || Boolean(state.replay);
  if (source && source.error) notice.textContent = `Nobody has answered for ${span(state.now - source.since)}: ${source.error}. What is shown is what was known.`;
  const waiting = (state.head && state.head.waiting) || "";
  by("waiting").hidden = !waiting || Boolean(state.replay);
  by("waiting").textContent = waiting;
  const renewals = state.rounds.renewals.reduce((sum, one) => sum + one, 0);
  by("footer").textContent = `spes-p2p ${state.program}` + (state.run ? ` · fingerprint ${state.run.fingerprint.slice(0, 16)}` : "") + (renewals ? ` · ${renewals} renewals` : "");
}

function tile(name, value, small, kind) {
  const element = make("div", null, `tile ${kind || ""}`);
  element.append(make("span", name), make("b", value), make("small", small || " "));
  element.title = `${name}: ${value} ${small || ""}`;
  return element;
}

function dataTile(data, state) {
  const name = peer => `${(state.peers[peer] || {}).state === "bootstrap" ? "bootstrap " : ""}${short(peer)}`;
  const words = data.web ? "and the web" : data.needed.length ? `would stop without ${name(data.needed[0])}${data.needed.length > 1 ? ` or ${data.needed.length - 1} more` : ""}` : "of the least copied piece";
  return tile("data copies", data.copies, words, data.copies || data.web ? data.needed.length ? "warn" : "" : "bad");
}

function showTiles(state) {
  const head = state.head || {}, peers = Object.values(state.peers), live = peers.filter(one => one.state === "member" || one.state === "replay");
  const speed = live.reduce((sum, one) => sum + (one.tokens_per_second || 0), 0);
  const orphans = (head.columns || []).filter(([owners]) => !owners.length).length, loss = last(state.rounds.loss) ?? last(live.map(one => one.loss));
  const proof = head.certificate === "genesis" ? "the beginning" : head.certificate ? `${head.checked ? "checked" : "not checked"}, ${head.seals} of ${head.electors}` : "";
  by("tiles").replaceChildren(
    tile("round", head.round ?? "–", head.step != null ? `step ${head.step.toLocaleString("en")}` : "the run has not begun"),
    tile("tokens", count(head.tokens), `${count(speed)} a second`),
    tile("training loss", loss == null ? "–" : loss.toFixed(4), "newest round"),
    tile("held-out loss", last(state.held_out.loss) == null ? "–" : last(state.held_out.loss).toFixed(4), last(state.held_out.round) == null ? "" : `round ${last(state.held_out.round)}`),
    tile("peers", state.replay ? peers.length : `${live.length}`, state.replay ? "in the files" : `of ${peers.filter(one => (one.role || one.state) !== "bootstrap" && one.state !== "gone" && one.state !== "left").length} known`),
    ...((head.columns || []).length ? [tile("experts", `${head.columns.length - orphans} / ${head.columns.length}`, orphans ? `${orphans} without an owner` : "all have an owner", orphans ? "bad" : "")] : []),
    ...(head.data ? [dataTile(head.data, state)] : []),
    tile("certificate", head.at ? span(state.now - head.at) : "–", head.renewal ? "renewal, by the organiser" : proof || "newest round", head.renewal ? "warn" : ""),
  );
}

const HOT = 2, COLD = 0.5;
const loadText = load => load >= 9.95 ? load.toFixed(0) : load >= 0.095 || !load ? load.toFixed(1) : load.toFixed(2);
const newestLoad = state => state.loads[state.loads.length - 1];

function loadKind(loads, expert) {
  return !loads.highest[expert] ? "dead" : loads.mean[expert] >= HOT ? "hot" : loads.mean[expert] < COLD ? "cold" : "";
}

function showLoad(state) {
  const loads = newestLoad(state), words = by("load-words");
  by("load-hint").textContent = "what went to each expert, over an even share of the tokens: "
    + ({ mean: "mean over the layers, and over the peers weighted with their tokens", highest: "in the layer and at the peer where it is most", lowest: "in the layer and at the peer where it is least" })[view.part];
  words.hidden = !loads;
  if (!loads) return;
  const order = loads.mean.map((_, expert) => expert).sort((a, b) => loads.mean[b] - loads.mean[a]);
  const dead = order.filter(expert => !loads.highest[expert]).sort((a, b) => a - b), told = `${loads.peers} peer${loads.peers === 1 ? "" : "s"}`;
  words.textContent = `round ${loads.round}, told by ${told}: most to expert ${order[0]} (${loadText(loads.mean[order[0]])}×), least to ${order[order.length - 1]} (${loadText(loads.mean[order[order.length - 1]])}×)`
    + (dead.length ? `; nothing in any layer to ${spans(dead)}` : "");
  words.classList.toggle("bad", dead.length > 0);
}

function showExperts(state) {
  const loads = newestLoad(state), columns = (state.head && state.head.columns) || [], stale = new Set((state.head && state.head.stale) || []);
  by("experts-card").hidden = !columns.length;
  by("experts-hint").textContent = "one box a column: the colours of its owners, their number, and how many rounds ago it got its last new version"
    + (loads ? "; at the right its router load (below)" : "");
  by("experts").replaceChildren(...columns.map(([owners, age], index) => {
    const element = make("div", null, `expert ${owners.length ? "" : "orphan"} ${stale.has(index) ? "stale" : ""}`), bar = make("div", null, "bar");
    for (const owner of owners) { const part = make("i"); part.style.background = colourOf(owner, state); bar.append(part); }
    const words = owners.length ? `${owners.length} owner${owners.length > 1 ? "s" : ""}` : "no owner";
    element.append(bar, make("b", index), make("small", words), make("small", age ? `${age} rd. old` : "new"));
    element.title = `column ${index}: ${owners.map(short).join(", ") || "nobody"}${age ? `, ${age} rounds old` : ""}`;
    if (loads && index < loads.mean.length) {
      element.append(make("span", `${loadText(loads.mean[index])}×`, `load ${loadKind(loads, index)}`));
      element.title += `; router load ${loads.mean[index]} (${loads.lowest[index]} to ${loads.highest[index]} over layers and peers)`;
    }
    return element;
  }));
  const known = [...new Set(columns.flatMap(([owners]) => owners))].sort();
  by("owners").replaceChildren(...known.map(owner => { const element = make("span"), dot = make("i", null, "dot"); dot.style.background = colourOf(owner, state); element.append(dot, short(owner)); return element; }));
}

const COLUMNS = [
  ["peer", "peer", "text"], ["state", "state", "text"], ["doing", "phase", "text"], ["reach", "reach", "text"], ["version", "version", "text"],
  ["device", "device", "text"], ["round", "round"], ["tokens", "tokens"], ["tokens/s", "tokens_per_second"], ["loss", "loss"], ["experts", "owned"], ["counted", "share"],
  ["sent", "sent"], ["received", "received"], ["seen", "seen_at"],
];

function cell(peer, name, state) {
  const one = state.peers[peer], value = one[name];
  if (name === "peer") { const td = make("td", null, "text"), dot = make("i", null, "dot"); dot.style.background = colourOf(peer, state); td.append(dot, short(peer)); td.title = peer; return td; }
  const text = { state: () => value, phase: () => value || "–", reach: () => value || "–", version: () => value || "–", device: () => value || "–",
    tokens: () => count(value), tokens_per_second: () => count(value), loss: () => value == null ? "–" : value.toFixed(3), owned: () => spans(value) || "–",
    share: () => value == null ? "–" : `${Math.round(100 * value)}%`,
    sent: () => count(value, "B"), received: () => count(value, "B"), seen_at: () => value ? `${span(Math.max(0, state.now - value))} ago` : "never" }[name];
  const td = make("td", text ? text() : value);
  if (name === "share" && value != null) td.title = `of what this stranger gave; ${Math.round(100 * one.average_share)}% on average${value ? "" : ": it points another way than the trusted peers' mean"}`;
  if (name === "state") td.classList.add(`state-${value}`);
  return td;
}

function rank(peer, name, state) {
  const value = name === "peer" ? peer : state.peers[peer][name];
  return Array.isArray(value) ? value.length : value ?? -1;
}

function showPeers(state, isShown) {
  const head = make("tr");
  for (const [title, name, kind] of COLUMNS) {
    const th = make("th", null, kind), button = make("button", title + (view.sort === name ? (view.down ? " ▾" : " ▴") : ""));
    button.type = "button";
    button.onclick = () => { view.down = view.sort === name ? !view.down : kind !== "text"; view.sort = name; render(); };
    th.setAttribute("aria-sort", view.sort !== name ? "none" : view.down ? "descending" : "ascending");
    th.append(button); head.append(th);
  }
  const peers = Object.keys(state.peers).filter(isShown).sort((a, b) => {
    const [left, right] = [rank(a, view.sort, state), rank(b, view.sort, state)];
    return (left < right ? -1 : left > right ? 1 : 0) * (view.down ? -1 : 1);
  });
  const focused = [...document.querySelectorAll("#peers th button")].indexOf(document.activeElement);
  document.querySelector("#peers thead").replaceChildren(head);
  if (focused >= 0) document.querySelectorAll("#peers th button")[focused].focus();
  document.querySelector("#peers tbody").replaceChildren(...peers.map(peer => {
    const row = make("tr", null, ["gone", "left", "silent", "unheard"].includes(state.peers[peer].state) ? "away" : "");
    row.append(...COLUMNS.map(([, name, kind]) => { const td = cell(peer, name, state); if (kind) td.classList.add(kind); return td; }));
    return row;
  }));
}

const BAD = ["left", "lost", "banned", "silent", "connection", "fork", "error"], WARN = ["renewal", "waiting", "experts", "warning", "pause"];

function showEvents(state, isShown) {
  const chosen = by("event-filter"), kinds = [...new Set(state.events.map(event => event.kind))].sort();
  if ([...chosen.options].slice(1).map(option => option.value).join() !== kinds.join()) {
    const kept = chosen.value;
    chosen.replaceChildren(new Option("all kinds", ""), ...kinds.map(kind => new Option(kind, kind)));
    chosen.value = kinds.includes(kept) ? kept : "";
  }
  const filtered = Boolean(by("peer-filter").value.trim());
  const shown = state.events.filter(event => (!chosen.value || event.kind === chosen.value) && (!filtered || (event.who && isShown(event.who))));
  by("events").replaceChildren(...shown.map(event => {
    const row = make("li"), when = day(event.at), isToday = when.toDateString() === new Date().toDateString();
    const time = make("time", when.toLocaleTimeString([], { hour12: false }));
    time.title = when.toString();
    if (!isToday) time.textContent = `${when.toLocaleDateString([], { month: "2-digit", day: "2-digit" })} ${time.textContent}`;
    row.append(time, make("span", event.message, BAD.includes(event.kind) ? "bad" : WARN.includes(event.kind) ? "warn" : ""));
    return row;
  }));
  if (!shown.length) by("events").replaceChildren(make("li", "nothing yet"));
}

// ---- the replay: the same state, cut off at a moment ----

function bounds(state) {
  const all = [...Object.values(state.samples).flatMap(series => series.at), ...state.rounds.at, ...state.events.map(event => event.at)].filter(at => at != null);
  return all.length ? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))] : [0, 0];
}

function cutSeries(series, until) {
  const kept = series.at.map((at, index) => at == null || at <= until ? index : -1).filter(index => index >= 0);
  return Object.fromEntries(Object.entries(series).map(([name, values]) => [name, kept.map(index => values[index])]));
}

function cutAt(state, until) {
  const rounds = cutSeries(state.rounds, until), at = rounds.round.length - 1;
  const samples = Object.fromEntries(Object.entries(state.samples).map(([peer, series]) => [peer, cutSeries(series, until)]));
  const peers = Object.fromEntries(Object.entries(state.peers).map(([peer, one]) => {
    const mine = samples[peer], timed = state.timeline.filter(row => row.peer === peer && row.at <= until);
    return [peer, !mine || !mine.at.length ? one : { ...one, tokens_per_second: last(mine.tokens_per_second), loss: last(mine.loss), sent: last(mine.sent), received: last(mine.received), seen_at: last(mine.at), round: timed.length ? timed[timed.length - 1].round : one.round }];
  }));
  const head = state.head && at >= 0 ? { ...state.head, round: rounds.round[at], step: rounds.step[at], tokens: rounds.tokens[at], at: rounds.at[at] } : state.head;
  return { ...state, now: until, rounds, samples, peers, head, held_out: cutSeries(state.held_out, until), timeline: state.timeline.filter(row => row.at <= until), loads: state.loads.filter(row => row.at <= until), events: state.events.filter(event => event.at <= until) };
}

function showPlayer(state) {
  const player = by("player");
  player.hidden = !state.replay;
  if (!state.replay) return state;
  const [first, end] = bounds(state), until = view.until >= 1 ? end : first + view.until * (end - first);
  by("moment").textContent = `${span(until - first)} of ${span(end - first)}`;
  return cutAt(state, until);
}

function step() {
  if (!view.playing) return;
  view.until = Math.min(1, view.until + 0.005);
  by("until").value = view.until * 1000;
  if (view.until >= 1) play(false);
  render();
}

function play(on) {
  clearInterval(view.playing);
  view.playing = null;
  if (on) { if (view.until >= 1) view.until = 0; view.playing = setInterval(step, 100); }
  by("play").textContent = on ? "⏸ pause" : "▶ play";
}

// ---- all together ----

const UNHEARD_SECONDS = 60;

// Where the swarm has not answered for a while, nobody in it is known to be there.
function heard(state) {
  const source = state.source;
  if (state.replay || !source || state.now - source.at < UNHEARD_SECONDS && !(source.error && state.now - source.since > UNHEARD_SECONDS)) return state;
  const peers = Object.entries(state.peers).map(([peer, one]) => [peer, ["gone", "left"].includes(one.state) ? one : { ...one, role: one.state, state: "unheard", phase: "" }]);
  return { ...state, peers: Object.fromEntries(peers) };
}

function render() {
  if (!view.state) return;
  const state = heard(showPlayer(view.state)), wanted = by("peer-filter").value.trim().toLowerCase();
  const isShown = peer => !wanted || peer.toLowerCase().includes(wanted);
  showHeader(state); showTiles(state); showExperts(state); showLoad(state); showPeers(state, isShown); showEvents(state, isShown);
  drawLoss(state, view.axis); drawSpeed(state, isShown); drawBytes(state, view.way, isShown); drawTimeline(state, view.count, isShown); drawMerge(state); drawLoad(state, view.part);
  document.documentElement.dataset.version = state.version;
}

async function refresh() {
  if (view.loading) { view.again = true; return; }
  view.loading = true;
  try {
    const answer = await fetch(`/api/state?hours=${by("hours").value}`);
    if (!answer.ok) throw new Error(answer.statusText);
    view.state = await answer.json();
    view.cut = false;
    render();
  } catch (error) {
    view.cut = true; // the dashboard has ended, or is out of reach: what is drawn stays
    if (view.state) showHeader(view.state);
  }
  setTimeout(() => { view.loading = false; if (view.again) { view.again = false; refresh(); } }, REFRESH_MILLISECONDS);
}

function choose(id, name) {
  by(id).addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const one of by(id).children) one.setAttribute("aria-pressed", String(one === button));
    view[name] = name === "count" ? Number(button.dataset.count) : button.dataset.axis || button.dataset.way || button.dataset.part;
    render();
  });
}

function listen() {
  const news = new EventSource("/api/news");
  news.onmessage = refresh;
  news.onerror = () => { view.cut = true; if (view.state) showHeader(view.state); }; // the browser connects again by itself
}

if (innerWidth < 600) { view.count = 5; for (const one of by("rounds-shown").children) one.setAttribute("aria-pressed", String(one.dataset.count === "5")); }
choose("loss-axis", "axis"); choose("bytes-way", "way"); choose("rounds-shown", "count"); choose("load-part", "part");
by("hours").onchange = () => { view.again = false; view.loading = false; refresh(); };
by("peer-filter").oninput = render;
by("event-filter").onchange = render;
by("until").oninput = () => { play(false); view.until = by("until").value / 1000; render(); };
by("play").onclick = () => play(!view.playing);
by("theme").onclick = () => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept then */ }
  render();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
listen();
refresh();
