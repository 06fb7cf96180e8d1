// The charts, drawn by plotly.js. Each function takes the state of the page and draws it into its element.
"use strict";

const COLOURS = ["#2a78d6", "#eb6834", "#1aa085", "#c7418c", "#e0a100", "#7a5cd0", "#5f9e2f", "#b5533c", "#2ba6c4", "#8a8f99"];
const PHASE_COLOURS = { train: "#2a78d6", close: "#9aa3b0", reduce: "#eb6834", vote: "#7a5cd0", apply: "#1aa085" };
const SHORT = 6;
const STRAGGLER = 1.25;

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = peer => peer.length > 20 ? peer.slice(-SHORT) : peer;
const day = at => at == null ? null : new Date(at * 1000);

function colourOf(peer, state) {
  const index = Object.keys(state.peers).sort().indexOf(peer);
  return index < 0 ? css("--dim") : COLOURS[index % COLOURS.length];
}

function layout(extra) {
  const grid = { gridcolor: css("--grid"), zerolinecolor: css("--grid"), linecolor: css("--line"), automargin: true };
  return {
    margin: { l: 52, r: 12, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--dim"), size: 11, family: "system-ui, DejaVu Sans, sans-serif" }, hovermode: "closest",
    showlegend: true, legend: { orientation: "h", y: -0.22, x: 0 }, uirevision: "kept",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
    ...extra, xaxis: { ...grid, ...(extra.xaxis || {}) }, yaxis: { ...grid, ...(extra.yaxis || {}) },
  };
}

// Plotly divides a single point, or nothing but zeros, into fractions: of rounds, of bytes, of a second.
function ticks(axis, traces, way) {
  let low = Infinity, high = -Infinity;
  for (const trace of traces) for (const value of trace.yaxis && way === "y" ? [] : trace[way]) {
    if (value == null) continue;
    low = Math.min(low, value), high = Math.max(high, value);
  }
  if (!axis || traces.some(trace => trace.base) || low > high) return axis;
  if (axis.type === "date") return high - low < 60e3 ? { ...axis, range: [low - 30e3, high + 30e3] } : axis;
  if (axis.tickformat === "d" && high - low < 8) return { ...axis, tick0: 0, dtick: 1 };
  if (axis.tickformat === "~s" && high === low) return { ...axis, tickvals: axis.rangemode ? [0, low] : [low] };
  return axis;
}

function draw(id, traces, extra) {
  const element = document.getElementById(id);
  const isEmpty = !traces.some(trace => trace.x.length);
  element.classList.toggle("empty", isEmpty);
  if (isEmpty) {
    if (element.data) Plotly.purge(element);
    element.textContent = "nothing yet";
    return;
  }
  if (!element.data) element.textContent = "";
  extra = { ...extra, xaxis: ticks(extra.xaxis, traces, "x"), yaxis: ticks(extra.yaxis, traces, "y") };
  Plotly.react(element, traces, layout(extra), { displaylogo: false, responsive: true, displayModeBar: false, scrollZoom: false });
}

function line(name, x, y, colour, extra = {}) {
  const few = x.length < 40;
  return { type: "scatter", mode: few ? "lines+markers" : "lines", name, x, y, line: { color: colour, width: 2 }, marker: { size: 4, color: colour }, ...extra };
}

function drawLoss(state, axis) {
  const along = series => axis === "at" ? series.at.map(day) : series[axis];
  const keep = series => series.loss.map((loss, at) => loss == null || series[axis][at] == null ? -1 : at).filter(at => at >= 0);
  const pick = (values, kept) => kept.map(at => values[at]);
  const trained = keep(state.rounds), held = keep(state.held_out);
  const traces = [line("training", pick(along(state.rounds), trained), pick(state.rounds.loss, trained), COLOURS[0])];
  if (!trained.length && axis !== "round") { // no peer has told the loss of a whole round: what it says now and then
    for (const [peer, series] of Object.entries(state.samples)) {
      const kept = keep(series);
      traces.push(line(short(peer), pick(along(series), kept), pick(series.loss, kept), colourOf(peer, state)));
    }
  }
  traces.push(line("held out", pick(along(state.held_out), held), pick(state.held_out.loss, held), COLOURS[1], { mode: "lines+markers", marker: { size: 7, color: COLOURS[1], symbol: "diamond" } }));
  draw("loss", traces.filter(trace => trace.x.length), { xaxis: axis === "at" ? { type: "date" } : { tickformat: axis === "tokens" ? "~s" : "d", type: "linear" } });
}

// The sum over the peers every few seconds: what each last said, for a minute.
function summed(samples, field) {
  const STEP = 5, moments = new Map();
  for (const [peer, series] of Object.entries(samples)) series.at.forEach((at, index) => {
    const step = Math.ceil(at / STEP) * STEP;
    moments.set(step, [...(moments.get(step) || []), [peer, series[field][index] || 0]]);
  });
  const latest = new Map(), x = [], y = [];
  for (const at of [...moments.keys()].sort((a, b) => a - b)) {
    for (const [peer, value] of moments.get(at)) latest.set(peer, [at, value]);
    let sum = 0;
    for (const [since, one] of latest.values()) if (at - since < 60) sum += one;
    x.push(day(at)); y.push(sum);
  }
  return { x, y };
}

function drawSpeed(state, isShown) {
  const peers = Object.entries(state.samples).filter(([peer]) => isShown(peer));
  const swarm = summed(state.samples, "tokens_per_second");
  const traces = [line("swarm", swarm.x, swarm.y, css("--text"), { mode: "lines" })];
  for (const [peer, series] of peers) traces.push(line(short(peer), series.at.map(day), series.tokens_per_second, colourOf(peer, state), { mode: "lines", line: { color: colourOf(peer, state), width: 1.3 } }));
  draw("speed", traces, { xaxis: { type: "date" }, yaxis: { tickformat: "~s", rangemode: "tozero" } });
}

function drawBytes(state, way, isShown) {
  const traces = Object.entries(state.samples).filter(([peer]) => isShown(peer)).map(([peer, series]) =>
    line(short(peer), series.at.map(day), series[way], colourOf(peer, state), { mode: "lines" }));
  draw("bytes", traces, { xaxis: { type: "date" }, yaxis: { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" } });
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : 0;
}

function stragglers(rows) {
  const trained = new Map();
  for (const row of rows) trained.set(row.round, [...(trained.get(row.round) || []), row.seconds[0]]);
  return rows.filter(row => trained.get(row.round).length > 1 && row.seconds[0] > STRAGGLER * median(trained.get(row.round)));
}

function drawTimeline(state, count, isShown) {
  const newest = Math.max(0, ...state.timeline.map(row => row.round));
  const rows = state.timeline.filter(row => row.round > newest - count);
  const shown = rows.filter(row => isShown(row.peer)), names = [...new Set(shown.map(row => row.peer))].sort();
  const traces = state.phases.map((phase, index) => {
    const trace = { type: "bar", orientation: "h", name: phase, base: [], x: [], y: [], hovertext: [], hoverinfo: "text", marker: { color: PHASE_COLOURS[phase], line: { width: 0 } } };
    for (const row of shown) {
      const after = row.seconds.slice(index).reduce((sum, one) => sum + one, 0), seconds = row.seconds[index];
      if (!seconds) continue;
      trace.base.push((row.at - after) * 1000); trace.x.push(seconds * 1000); trace.y.push(short(row.peer));
      trace.hovertext.push(`round ${row.round}, ${short(row.peer)}: ${phase} ${seconds.toFixed(seconds < 10 ? 2 : 0)} s`);
    }
    return trace;
  });
  const slow = stragglers(rows).filter(row => isShown(row.peer));
  traces.push({ type: "scatter", mode: "markers", name: "straggler", x: slow.map(row => row.at * 1000), y: slow.map(row => short(row.peer)), hoverinfo: "text",
    hovertext: slow.map(row => `round ${row.round}: ${short(row.peer)} trained ${row.seconds[0].toFixed(1)} s`), marker: { symbol: "diamond", size: 9, color: css("--bad"), line: { color: css("--card"), width: 1 } } });
  const element = document.getElementById("timeline");
  element.style.height = `${Math.max(220, 140 + 34 * names.length)}px`;
  draw("timeline", shown.length ? traces : [], { barmode: "overlay", bargap: 0.35, legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" }, margin: { l: 52, r: 12, t: 8, b: 78 }, xaxis: { type: "date" }, yaxis: { type: "category", categoryarray: names.map(short).reverse(), categoryorder: "array" } });
}

function drawMerge(state) {
  const rounds = state.rounds;
  const traces = [
    line("peers in a round", rounds.round, rounds.roster, COLOURS[2], { mode: "lines", line: { color: COLOURS[2], width: 2, shape: "hv" } }),
    { type: "bar", name: "merge alpha", x: rounds.round, y: rounds.alpha, yaxis: "y2", marker: { color: COLOURS[5] }, opacity: 0.65 },
  ];
  draw("merge", rounds.round.length ? traces : [], { margin: { l: 40, r: 48, t: 8, b: 34 }, xaxis: { tickformat: "d" }, yaxis: { rangemode: "tozero", tickformat: "d" },
    yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, automargin: true, tickformat: ".3~f" } });
}

// Twice as much and half as much are as far from even; what nothing went to has a colour of its own, below the scale.
const LOAD_DEAD = -3.5, LOAD_LEAST = -3, LOAD_MOST = 3;

function drawLoad(state, part) {
  const rows = state.loads, element = document.getElementById("load");
  const drawn = [part, css("--text"), ...rows.map(row => `${row.round}/${row.peers}/${row.at}`)].join(" ");
  if (element.dataset.drawn === drawn) return; // as most of the time while a past run is played
  element.dataset.drawn = drawn;
  const experts = Math.max(0, ...rows.map(row => row.mean.length));
  const of = expert => rows.map(row => row[part][expert]), height = load => load == null ? null : load ? Math.min(LOAD_MOST, Math.max(LOAD_LEAST, Math.log2(load))) : LOAD_DEAD;
  const numbers = [...Array(experts).keys()], at = value => (value - LOAD_DEAD) / (LOAD_MOST - LOAD_DEAD), edge = at((LOAD_DEAD + LOAD_LEAST) / 2);
  const scale = [[0, css("--text")], [edge, css("--text")], [edge, "#1f5fb0"], [at(LOAD_LEAST), "#1f5fb0"], [at(0), css("--grid")], [1, "#d9480f"]];
  const trace = {
    type: "heatmap", x: rows.map(row => row.round), y: numbers, z: numbers.map(expert => of(expert).map(height)), text: numbers.map(expert => of(expert).map(load => load == null ? "" : `${load}×`)),
    hovertemplate: "round %{x}, expert %{y}: %{text}<extra></extra>", colorscale: scale, zmin: LOAD_DEAD, zmax: LOAD_MOST, xgap: rows.length < 100 ? 1 : 0, ygap: 1,
    colorbar: { thickness: 10, outlinewidth: 0, tickvals: [LOAD_DEAD, -3, -2, -1, 0, 1, 2, 3], ticktext: ["none", "⅛×", "¼×", "½×", "even", "2×", "4×", "8×"] },
  };
  element.style.height = `${Math.min(620, Math.max(200, 80 + 11 * experts))}px`;
  draw("load", experts ? [trace] : [], { margin: { l: 44, r: 8, t: 8, b: 34 }, xaxis: { tickformat: "d", showgrid: false, title: { text: "round" } }, yaxis: { tickformat: "d", showgrid: false, autorange: "reversed", title: { text: "expert" } } });
}
