// The picture: who descends from whom, drawn for one window of positions. It knows of no events.
const GUTTER = 74, TOP = 20, ROW = 15, CHART = 62, GAP = 14;
const EVENTS = [
  ["cut", (step) => step.cut !== "none", "cut"],
  ["resampled", (step) => step.resampled, "path"],
  ["narrowed", (step) => step.gone > 0, "narrow"],
];

function read(packed) {
  const segments = packed.segments.map(
    ([parent, lane, start, tokens, kind, round, before, after, logWeight, rejected, fate, surviving, logPotential], id) =>
      ({ id, parent, lane, start, tokens, kind, round, before, after, logWeight, rejected, fate, surviving,
        logPotential, end: start + tokens.length }));
  const steps = packed.steps.map(
    ([start, keptTo, end, numParticles, ess, blockEvidence, logEvidence, cut, resampled, gone, resized, retracted, emittedTo]) =>
      ({ start, keptTo, end, numParticles, ess, blockEvidence, logEvidence, cut, resampled, gone, resized, retracted, emittedTo }));
  return { ...packed, segments, steps };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["bg", "ink", "soft", "line", "band", "path", "other", "ghost", "end", "cut", "narrow", "point", "fill"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

// Heights; `lane` is that of one particle.
function layoutOf(tree) {
  const lane = Math.max(19, Math.min(46, 330 / tree.num_lanes));
  const lanes = TOP + tree.num_lanes * lane;
  const ess = lanes + 8 + EVENTS.length * ROW + GAP;
  const evidence = ess + CHART + GAP + 6;
  return { lane, lanes, ess, evidence, height: evidence + CHART + 12 };
}

// view: {from, scale (pixels a token), width, layout, colour, point (of a token, or null)}
function draw(context, tree, view) {
  const { layout, colour, scale, width } = view;
  view.x = (position) => GUTTER + 16 + (position - view.from) * scale;
  view.y = (lane) => TOP + (lane + 0.5) * layout.lane;
  view.thick = (share) => Math.max(1, Math.sqrt(share) * layout.lane * 0.82);
  view.to = view.from + (width - GUTTER) / scale;
  context.fillStyle = colour.bg;
  context.fillRect(0, 0, width, layout.height);
  context.lineCap = "butt";
  drawRounds(context, tree, view);
  const near = tree.segments.filter(
    (s) => s.end + s.rejected.length >= view.from - 4 && s.start <= view.to + 1);
  for (const s of near) drawRejected(context, s, view);
  for (const s of near) if (!isWhole(s)) drawSegment(context, tree, s, view, colour.other, s.tokens.length);
  for (const s of near) if (s.surviving) drawSegment(context, tree, s, view, colour.path, s.surviving);
  for (const s of near) drawMarks(context, s, view);
  if (view.point) drawLineage(context, tree, view);
  if (scale >= 30) for (const s of near) drawPieces(context, tree, s, view);
  drawEss(context, tree, view);
  drawEvidence(context, tree, view);
  drawGutter(context, tree, view);
}

const isWhole = (s) => s.surviving > 0 && s.surviving === s.tokens.length;

function drawRounds(context, tree, view) {
  const { layout, colour, scale } = view;
  const bottom = layout.evidence + CHART;
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  let labelled = -Infinity;
  const toldTo = {};
  const isSeen = (step) => step.end >= view.from - 4 && step.start <= view.to;
  context.fillStyle = colour.band;
  tree.steps.forEach((step, round) => {
    if (round % 2 || !isSeen(step)) return;
    context.fillRect(view.x(step.start), TOP - 4, (step.end - step.start) * scale, bottom - TOP + 4);
  });
  tree.steps.forEach((step, round) => {
    if (!isSeen(step)) return;
    const x = view.x(step.start);
    if (x - labelled > 40) {
      context.fillStyle = colour.soft;
      context.fillText(String(step.start), x + 1, TOP - 12);
      labelled = x;
    }
    if (step.retracted) line(context, x, TOP - 4, x, layout.lanes, colour.end, 1.5, [5, 3]);
    if (step.cut !== "none" && scale >= 2) {
      const at = view.x(step.keptTo);
      line(context, at, TOP - 2, at, layout.lanes + 4, colour.cut, 1, [3, 3]);
    }
    EVENTS.forEach(([, happens, name], row) => {
      if (!happens(step)) return;
      const at = view.x(name === "narrow" ? step.end : step.keptTo);
      const y = layout.lanes + 8 + (row + 0.5) * ROW;
      const word = { cut: step.cut, narrow: "−" + step.gone }[name];
      context.fillStyle = colour[name];
      context.beginPath();
      context.arc(at, y, scale < 3 ? 2 : 3.5, 0, 7);
      context.fill();
      // Only where nothing stands: neither the word before, nor the next dot.
      const next = tree.steps.slice(round + 1).find(happens);
      const until = next ? view.x(name === "narrow" ? next.end : next.keptTo) - 6 : Infinity;
      const wide = word ? context.measureText(word).width : 0;
      if (!word || at + 7 + wide > until || at < (toldTo[name] ?? -Infinity)) return;
      context.fillText(word, at + 7, y + 0.5);
      toldTo[name] = at + 7 + wide;
    });
  });
}

function drawRejected(context, s, view) {
  if (!s.rejected.length) return;
  const y = view.y(s.lane) + (s.tokens.length ? view.layout.lane * 0.34 : 0);
  const x = view.x(s.end);
  line(context, x, y, view.x(s.end + s.rejected.length), y, view.colour.ghost, 1, [2, 2]);
}

// A curve from the parent's lane, then a ribbon as wide as the weight.
function drawSegment(context, tree, s, view, colour, count, extra = 0) {
  const y = view.y(s.lane);
  const bend = bendOf(tree, s, view);
  const x = view.x(s.start), end = Math.max(x + bend, view.x(s.start + count));
  const share = s.tokens.length ? count / s.tokens.length : 1;
  const from = view.thick(s.before) + extra, to = view.thick(s.before + (s.after - s.before) * share) + extra;
  if (bend) {
    const above = fromLane(tree, s, view);
    const start = s.parent === null ? x - 12 : x;
    context.beginPath();
    context.moveTo(start, above);
    context.bezierCurveTo(start + (x + bend - start) * 0.55, above, start + (x + bend - start) * 0.45, y, x + bend + 0.4, y);
    context.strokeStyle = colour;
    context.lineWidth = from;
    context.stroke();
  }
  if (end <= x + bend) return;
  context.beginPath();
  context.moveTo(x + bend, y - from / 2);
  context.lineTo(end, y - to / 2);
  context.lineTo(end, y + to / 2);
  context.lineTo(x + bend, y + from / 2);
  context.fillStyle = colour;
  context.fill();
  if (view.scale < 9 || extra) return;
  for (let at = s.start + 1; at < s.start + count; at++) {
    const cut = view.x(at);
    if (cut > x + bend) line(context, cut, y - Math.max(from, to) / 2, cut, y + Math.max(from, to) / 2, view.colour.bg, 1);
  }
}

const fromLane = (tree, s, view) =>
  s.parent === null ? view.y((tree.num_lanes - 1) / 2) : view.y(tree.segments[s.parent].lane);
const bendOf = (tree, s, view) => fromLane(tree, s, view) === view.y(s.lane) ? 0 : Math.min(0.72 * view.scale, 44);

function drawMarks(context, s, view) {
  const { colour, scale } = view;
  const x = view.x(s.end), y = view.y(s.lane);
  if (s.kind === "bonus" && s.tokens.length && scale >= 7) {
    context.beginPath();
    context.arc(x - Math.min(scale * 0.2, 8), y, Math.min(2.2, view.thick(s.after) / 2.4), 0, 7);
    context.fillStyle = colour.bg;
    context.fill();
  }
  if (!s.fate || s.fate === "end") return;
  const size = scale < 3 ? 1.6 : 3.4;
  context.strokeStyle = s.fate === "narrowed" || s.fate === "drawn" ? colour.narrow : colour.end;
  context.lineWidth = scale < 3 ? 1 : 1.6;
  context.beginPath();
  if (s.fate === "verification") {
    context.strokeStyle = colour.ghost;
    context.moveTo(x, y - 3);
    context.lineTo(x, y + 3);
  } else {
    context.moveTo(x + 1, y - size);
    context.lineTo(x + 1 + 2 * size, y + size);
    context.moveTo(x + 1, y + size);
    context.lineTo(x + 1 + 2 * size, y - size);
  }
  context.stroke();
}

// From the token that is pointed at back to the prompt.
function drawLineage(context, tree, view) {
  const { segment, position } = view.point;
  let upTo = position + 1;
  for (let at = segment; at !== null; at = tree.segments[at].parent) {
    const s = tree.segments[at];
    const count = Math.max(0, Math.min(upTo, s.end) - s.start);
    upTo = Math.min(upTo, s.start);
    if (s.end < view.from - 4 && s.start < view.from) break;
    if (s.start > view.to) continue;
    context.globalAlpha = 0.92;
    const thin = { ...s, before: s.before * 0.25, after: s.after * 0.25 };
    drawSegment(context, tree, thin, view, view.colour.point, count, 1);
    context.globalAlpha = 1;
  }
  const x = view.x(position);
  context.strokeStyle = view.colour.point;
  context.lineWidth = 1.5;
  const y = view.y(tree.segments[segment].lane);
  context.strokeRect(x, y - view.layout.lane * 0.46, Math.max(3, view.scale), view.layout.lane * 0.92);
}

function drawPieces(context, tree, s, view) {
  context.font = `${s.surviving ? 600 : 400} 11px system-ui, 'DejaVu Sans', sans-serif`;
  context.textAlign = "center";
  context.lineWidth = 3;
  context.strokeStyle = view.colour.bg;
  s.tokens.forEach((token, i) => {
    const x = view.x(s.start + i);
    if (x > view.width || x + view.scale < GUTTER) return;
    const bend = i ? 0 : bendOf(tree, s, view) * 0.6;
    context.fillStyle = i < s.surviving ? view.colour.ink : view.colour.soft;
    const text = view.piece(token).trim() || "·";
    const fits = text.length * 6.2 > view.scale + 4 ? text.slice(0, Math.max(2, Math.floor(view.scale / 6.2) - 1)) + "…" : text;
    context.strokeText(fits, x + (view.scale + bend) / 2, view.y(s.lane));
    context.fillText(fits, x + (view.scale + bend) / 2, view.y(s.lane));
  });
  context.textAlign = "start";
}

function drawEss(context, tree, view) {
  const top = view.layout.ess, bottom = top + CHART;
  for (const share of [0, 0.5, 1]) {
    line(context, GUTTER, bottom - share * CHART, view.width, bottom - share * CHART, view.colour.line, 1);
  }
  for (const step of tree.steps) {
    if (step.end < view.from || step.start > view.to) continue;
    const x = view.x(step.start), wide = Math.max(1, (step.end - step.start) * view.scale - (view.scale > 2 ? 1 : 0));
    const height = (step.ess / step.numParticles) * CHART;
    context.fillStyle = view.colour.fill;
    context.fillRect(x, bottom - height, wide, height);
    context.fillStyle = view.colour.path;
    context.fillRect(x, bottom - height - 1, wide, 2);
  }
}

function evidenceRange(tree) {
  const values = [0, ...tree.steps.map((step) => step.logEvidence).filter((value) => value !== null)];
  const low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.05 * (high - low), 0.1);
  return { low: low - room, high: high + room };
}

function drawEvidence(context, tree, view) {
  const top = view.layout.evidence, bottom = top + CHART;
  const { low, high } = evidenceRange(tree);
  view.level = (value) => bottom - ((value - low) / (high - low)) * CHART;
  for (const value of ticks(low, high)) {
    line(context, GUTTER, view.level(value), view.width, view.level(value), view.colour.line, 1);
  }
  const points = tree.steps.filter((step) => step.logEvidence !== null);
  if (!points.length) {
    context.fillStyle = view.colour.soft;
    context.fillText("no estimate in this mode", GUTTER + 18, top + CHART / 2);
    return;
  }
  context.beginPath();
  context.moveTo(view.x(0), view.level(0));
  for (const step of points) context.lineTo(view.x(step.end), view.level(step.logEvidence));
  context.strokeStyle = view.colour.path;
  context.lineWidth = 1.8;
  context.stroke();
  if (view.scale < 3) return;
  context.fillStyle = view.colour.path;
  for (const step of points) {
    context.beginPath();
    context.arc(view.x(step.end), view.level(step.logEvidence), 2.6, 0, 7);
    context.fill();
  }
}

function ticks(low, high) {
  const raw = (high - low) / 3, power = 10 ** Math.floor(Math.log10(raw));
  const gap = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let n = Math.ceil(low / gap); n * gap <= high; n++) found.push(Number((n * gap).toPrecision(6)));
  return found;
}

// What stays where it is while the rest scrolls.
function drawGutter(context, tree, view) {
  const { layout, colour } = view;
  context.fillStyle = colour.bg;
  context.fillRect(0, 0, GUTTER, layout.height);
  context.fillStyle = colour.soft;
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textAlign = "right";
  const write = (text, y) => context.fillText(text, GUTTER - 8, y);
  write("token", TOP - 12);
  for (let lane = 0; lane < tree.num_lanes; lane++) write(String(lane), view.y(lane));
  EVENTS.forEach(([name, , tint], row) => {
    context.fillStyle = colour[tint];
    write(name, layout.lanes + 8 + (row + 0.5) * ROW);
  });
  context.fillStyle = colour.soft;
  write("1", layout.ess);
  write("0", layout.ess + CHART);
  for (const value of ticks(evidenceRange(tree).low, evidenceRange(tree).high)) write(String(value).replace("-", "−"), view.level(value));
  context.fillStyle = colour.ink;
  context.textAlign = "left";
  context.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  context.fillText("ESS / N", 2, layout.ess + CHART / 2);
  context.fillText("log Ẑ", 2, layout.evidence + CHART / 2);
  context.save();
  context.translate(8, TOP + (layout.lanes - TOP) / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText("particle", 0, 0);
  context.restore();
}

function line(context, x, y, toX, toY, colour, width, dash = []) {
  context.beginPath();
  context.setLineDash(dash);
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
  context.setLineDash([]);
}
