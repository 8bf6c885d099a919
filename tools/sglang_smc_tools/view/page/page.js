// What a reader does with the picture: scroll, zoom, point, print.
const FATES = {
  dead: "ends here: its weight is 0",
  resampled: "ends here: resampling drew no copy of it",
  verification: "ends here: another particle's draft was verified",
  narrowed: "ends here: narrowing kept others",
  drawn: "ends here: another particle was drawn as the answer",
  resized: "ends here: N became smaller",
  retracted: "ends here: the request was retracted, which drops what was not emitted",
  failure: "ends here: the round's logits meant nothing",
};
const CUTS = {
  evidence: "the cut: the evidence was too small for more",
  ess: "the cut: the effective sample size was too small for more",
  dead: "the cut: the next column left no particle",
  verification: "verification kept no more of it",
  failure: "the round failed",
  none: "its draft was not kept",
};
const facts = JSON.parse(document.getElementById("trace").textContent);
const tree = read(facts.genealogy);
const byLane = Array.from({ length: tree.num_lanes }, () => []);
for (const s of tree.segments) byLane[s.lane].push(s);
const find = (id) => document.getElementById(id);
const scroller = find("scroller"), picture = find("picture"), overview = find("overview"), tip = find("tip");
const layout = layoutOf(tree);
const hasPieces = Object.keys(facts.pieces).length > 0;
const piece = (token) => facts.pieces[token] ?? ` ${token}`;
const survivors = tree.segments.filter((s) => s.surviving);
let colour = colours(), scale = 1, point = null, pending = false;

const room = () => scroller.clientWidth - GUTTER - 48;
const fitting = () => room() / tree.length;
const percent = (share) => share >= 0.0995 || share === 0 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;
const number = (value) => value.toFixed(2).replace("-", "−");
const signed = (value) => (value > 0 ? "+" : "") + number(value);

function sized(canvas, width, height, ratio) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function render() {
  pending = false;
  const width = scroller.clientWidth, ratio = window.devicePixelRatio || 1;
  find("spacer").style.width = `${Math.max(width, GUTTER + 48 + tree.length * scale)}px`;
  picture.style.width = `${width}px`;
  picture.style.height = `${layout.height}px`;
  const view = { from: scroller.scrollLeft / scale, scale, width, layout, colour, point, piece };
  draw(sized(picture, width, layout.height, ratio), tree, view);
  renderOverview(width, ratio);
}

const OVERVIEW = 34;
function renderOverview(width, ratio) {
  overview.hidden = scale <= fitting() * 1.02;
  if (overview.hidden) return;
  overview.style.height = `${OVERVIEW}px`;
  const context = sized(overview, width, OVERVIEW, ratio);
  const each = (width - 2) / tree.length;
  context.fillStyle = colour.band;
  context.fillRect(0, 0, width, OVERVIEW);
  for (const s of tree.segments) {
    context.fillStyle = s.surviving ? colour.path : colour.other;
    const y = 2 + (s.lane / tree.num_lanes) * (OVERVIEW - 4);
    context.fillRect(1 + s.start * each, y, Math.max(0.6, (s.surviving || s.tokens.length) * each), s.surviving ? 2 : 0.8);
  }
  context.strokeStyle = colour.point;
  context.lineWidth = 2;
  const seen = room() / scale;
  context.strokeRect(1 + (scroller.scrollLeft / scale) * each, 1, Math.min(seen, tree.length) * each, OVERVIEW - 2);
}

function refresh() {
  if (!pending) requestAnimationFrame(render);
  pending = true;
}

// Zoom, and keep what stands at `at`, in pixels of the picture.
function zoom(to, at = GUTTER + room() / 2) {
  const position = (scroller.scrollLeft + at - GUTTER - 16) / scale;
  scale = Math.max(Math.min(fitting(), 64), Math.min(64, to));
  find("spacer").style.width = `${GUTTER + 48 + tree.length * scale}px`;
  scroller.scrollLeft = position * scale - (at - GUTTER - 16);
  refresh();
}

// The token that stands in a lane at a position: the youngest, since a retraction begins again.
function tokenAt(lane, position, isLow) {
  const here = byLane[lane] ?? [];
  const covers = (s) => s.start <= position && position < s.end;
  const offered = (s) => s.end <= position && position < s.end + s.rejected.length;
  const kept = here.findLast(covers), rejected = here.findLast(offered);
  if (rejected && (isLow || !kept)) return { segment: rejected.id, position, isRejected: true };
  return kept ? { segment: kept.id, position, isRejected: false } : null;
}

function textOf({ segment, position, isRejected }) {
  const parts = [];
  let upTo = position;
  for (let at = segment; at !== null; at = tree.segments[at].parent) {
    const s = tree.segments[at];
    const tokens = isRejected && at === segment ? [...s.tokens, ...s.rejected] : s.tokens;
    parts.unshift(tokens.slice(0, Math.max(0, upTo - s.start)).map(piece).join(""));
    upTo = Math.min(upTo, s.start);
  }
  return parts.join("");
}

function told(where) {
  const s = tree.segments[where.segment], step = tree.steps[s.round];
  const token = [...s.tokens, ...s.rejected][where.position - s.start];
  const kind = { first: "prefill's token", drafted: "drafted", bonus: "bonus token of the target" }[s.kind];
  const lines = [["piece", hasPieces ? JSON.stringify(piece(token)) : `token ${token}`]];
  lines.push(["meta", `token ${where.position} of particle ${s.lane}, round ${s.round}; ${where.isRejected ? "drafted, not kept" : kind}; id ${token}`]);
  const weight = s.kind === "drafted" ? `weight ${percent(s.before)} → ${percent(s.after)}` : `weight ${percent(s.after)}`;
  lines.push(["meta", s.logWeight === null ? weight : `${weight}, log w ${number(s.logWeight)}`]);
  if (s.logPotential !== 0 && where.position === s.end - 1)
    lines.push(["meta", s.logPotential === null ? "potentials forbid the text up to here" : `potentials, of the text up to here: log w ${signed(s.logPotential)}`]);
  const evidence = step.logEvidence === null ? "" : `, log Ẑ ${number(step.logEvidence)}`;
  lines.push(["meta", `round: ESS ${number(step.ess)} of ${step.numParticles}${evidence}`]);
  if (where.isRejected) lines.push(["fate", CUTS[step.cut]]);
  if (FATES[s.fate] && where.position >= s.end - 1) lines.push(["fate", FATES[s.fate]]);
  const copies = new Set(tree.segments.filter((c) => c.parent === s.id).map((c) => c.lane)).size;
  if (copies > 1 && where.position === s.end - 1) lines.push(["meta", `${copies} particles go on from here`]);
  if (where.position < s.start + s.surviving) lines.push(["meta", "in the answer"]);
  const text = textOf(where);
  lines.push(["text", (text.length > 220 ? "…" + text.slice(-220) : text) + "▸" + piece(token)]);
  return lines;
}

// Point at a token, or at none; x and y in the window, or null to have the tip beside the token.
function pointAt(where, x = null, y = null) {
  point = where;
  for (const span of document.querySelectorAll("#answer .at")) span.classList.remove("at");
  tip.hidden = !where;
  if (where) {
    const lines = told(where);
    tip.replaceChildren(...lines.map(([name, text]) => Object.assign(document.createElement("div"), { className: name, textContent: text })));
    find("status").textContent = lines.map(([, text]) => text).join("; ");
    const s = tree.segments[where.segment];
    if (where.position < s.start + s.surviving) find("answer").children[where.position]?.classList.add("at");
    const box = picture.getBoundingClientRect();
    placeTip(x ?? box.left + GUTTER + 16 + (where.position + 1) * scale - scroller.scrollLeft,
      y ?? box.top + TOP + (s.lane + 1) * layout.lane);
  }
  refresh();
}

function placeTip(x, y) {
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, x + 16 + width > innerWidth ? x - width - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(6, y + 14 + height > innerHeight ? y - height - 14 : y + 14)}px`;
}

function underMouse(event) {
  const box = picture.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  if (x < GUTTER || y < TOP || y > layout.lanes) return null;
  const lane = Math.floor((y - TOP) / layout.lane);
  const position = Math.floor((scroller.scrollLeft + x - GUTTER - 16) / scale);
  return tokenAt(lane, position, (y - TOP) / layout.lane - lane > 0.75);
}

function showPosition(position) {
  const x = position * scale - scroller.scrollLeft;
  if (x < 0 || x > room() - scale) scroller.scrollLeft = position * scale - room() / 2;
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const zooms = { "+": 1.4, "=": 1.4, "-": 1 / 1.4 };
  if (event.key in zooms) zoom(scale * zooms[event.key]);
  else if (event.key === "0") zoom(0);
  else if (event.key === "Escape") pointAt(null);
  else if (event.key === "Home") survivor(0);
  else if (event.key === "End") survivor(tree.answer.length - 1);
  else if (event.key in MOVES) move(...MOVES[event.key]);
  else return;
  event.preventDefault();
}

function survivor(position) {
  const s = survivors.findLast((here) => here.start <= position && position < here.start + here.surviving);
  if (!s) return;
  showPosition(position);
  pointAt({ segment: s.id, position, isRejected: false });
}

function move(right, down) {
  if (!point) return survivor(Math.max(0, Math.floor(scroller.scrollLeft / scale)));
  const s = tree.segments[point.segment];
  const lane = s.lane + down, position = point.position + right;
  const next = tokenAt(lane, position, point.isRejected);
  if (!next && right) return survivor(position); // a lane is empty there
  if (next) {
    showPosition(position);
    pointAt(next);
  }
}

function describe() {
  const last = tree.steps.at(-1), rounds = tree.steps.length;
  const rows = [["mode", facts.mode], ["N", facts.num_particles], ["K", facts.num_steps], ["prompt", `${facts.prompt_length} tokens`],
    ["answer", `${tree.answer.length} tokens`], ["rounds", rounds], ["tokens a round", number(tree.answer.length / rounds)],
    ["resampled", `${tree.steps.filter((step) => step.resampled).length} times`]];
  if (last.logEvidence !== null) rows.push(["log Ẑ", number(last.logEvidence)]);
  find("facts").replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("div");
    row.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
    return row;
  }));
  const bonus = new Set(survivors.filter((s) => s.kind !== "drafted").map((s) => s.start));
  find("answer").replaceChildren(...tree.answer.map((token, position) =>
    Object.assign(document.createElement("span"), { textContent: piece(token), className: bonus.has(position) ? "bonus" : "" })));
  find("answer").addEventListener("mouseover", (event) => {
    const position = [...find("answer").children].indexOf(event.target);
    if (position >= 0) survivor(position);
  });
  find("answer").addEventListener("mouseleave", () => pointAt(null));
}

function legend() {
  const kinds = [
    ['<path d="M0 6h30" stroke="var(--path)" stroke-width="7"/>', "the answer's lineage", 30],
    ['<path d="M0 3.5 L30 5.5 V6.5 L0 8.5z" fill="var(--other)"/>', "other particles; width: root of the weight", 30],
    ['<path d="M0 6h12" stroke="var(--other)" stroke-width="5"/><circle cx="9" cy="6" r="1.8" fill="var(--bg)"/>', "bonus token", 12],
    ['<path d="M0 6h24" stroke="var(--ghost)" stroke-dasharray="2 2"/>', "drafted, not kept", 24],
    ['<path d="M1 2l8 8M1 10l8-8" stroke="var(--end)" stroke-width="1.6"/>', "ends: resampled, dead, retracted", 10],
    ['<path d="M1 2l8 8M1 10l8-8" stroke="var(--narrow)" stroke-width="1.6"/>', "ends: narrowed, answer drawn", 10],
    ['<path d="M3 0v12" stroke="var(--cut)" stroke-dasharray="3 3"/>', "cut", 6],
  ];
  find("legend").innerHTML = kinds.map(([shape, name, width]) =>
    `<li><svg width="${width}" height="12" fill="none" aria-hidden="true">${shape}</svg>${name}</li>`).join("");
}

// On paper the picture is cut into lines, as a score is.
function toPaper() {
  document.documentElement.classList.add("paper");
  const each = Math.min(tree.length, 84), width = GUTTER + 48 + each * 11;
  const bands = Array.from({ length: Math.ceil(tree.length / each) }, (_, i) => i * each);
  find("paper").replaceChildren(...bands.map((from) => {
    const canvas = document.createElement("canvas");
    const view = { from, scale: 11, width, layout, colour: colours(), point: null, piece };
    draw(sized(canvas, width, layout.height, 2), tree, view);
    return canvas;
  }));
}

function fromPaper() {
  document.documentElement.classList.remove("paper");
  find("paper").replaceChildren();
}

describe();
legend();
zoom(Math.max(fitting(), 10));
scroller.scrollLeft = 0;
scroller.addEventListener("scroll", refresh, { passive: true });
picture.addEventListener("mousemove", (event) => pointAt(underMouse(event), event.clientX, event.clientY));
picture.addEventListener("mouseleave", () => pointAt(null));
scroller.addEventListener("blur", () => pointAt(null));
scroller.addEventListener("keydown", onKey);
scroller.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(scale * 1.0015 ** -event.deltaY, event.clientX - picture.getBoundingClientRect().left);
}, { passive: false });
const jump = (event) => {
  if (event.buttons) scroller.scrollLeft = (event.offsetX / overview.clientWidth) * tree.length * scale - room() / 2;
};
overview.addEventListener("pointerdown", jump);
overview.addEventListener("pointermove", jump);
find("in").addEventListener("click", () => zoom(scale * 1.4));
find("out").addEventListener("click", () => zoom(scale / 1.4));
find("fit").addEventListener("click", () => zoom(0));
window.addEventListener("resize", () => zoom(Math.max(scale, fitting())));
window.addEventListener("beforeprint", toPaper);
window.addEventListener("afterprint", fromPaper);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colour = colours(); refresh(); });
render();
