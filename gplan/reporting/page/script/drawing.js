// The pipeline on a canvas: a panel for each side, a row for each device, all with one axis of time.

const PANEL_GAP = 16;
const AXIS_HEIGHT = 34;
const TYPE = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

// Where everything is, for a canvas of a width in CSS pixels.
function layoutFor(pipeline, width) {
  const isNarrow = width < 560;
  const row = Math.max(10, Math.min(isNarrow ? 26 : 32, Math.round(300 / pipeline.numDevices)));
  const strip = pipeline.hasSends ? Math.max(2, Math.round(row * 0.14)) : 0;
  const title = isNarrow ? 42 : 26;
  const panel = title + row * pipeline.numDevices;
  const height = pipeline.sides.length * (panel + PANEL_GAP) + AXIS_HEIGHT - PANEL_GAP;
  return { width, height, row, strip, title, panel, isNarrow, left: isNarrow ? 22 : 70, right: width - 2 };
}

function rowTop(layout, side, device) {
  return side * (layout.panel + PANEL_GAP) + layout.title + device * layout.row;
}

function hatchPattern(context, hatch, colour) {
  const scale = window.devicePixelRatio || 1;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(7 * scale);
  const pen = tile.getContext("2d");
  pen.scale(tile.width / 7, tile.height / 7);
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 0.9;
  const lines = { "/": [[-1, 8, 8, -1]], "\\": [[-1, -1, 8, 8]], x: [[-1, 8, 8, -1], [-1, -1, 8, 8]], "-": [[0, 3.5, 7, 3.5]], "|": [[3.5, 0, 3.5, 7]] };
  for (const [x, y, toX, toY] of lines[hatch] || []) {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(toX, toY);
    pen.stroke();
  }
  if (hatch === ".") pen.fillRect(3, 3, 1.4, 1.4);
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(7 / tile.width));
  return pattern;
}

// Draws what lies between the moments `from` and `to`; `marked` is the set of pieces to frame.
function drawPipeline(context, pipeline, layout, view, marked) {
  const colour = colours();
  const x = (moment) => layout.left + ((moment - view.from) / (view.to - view.from)) * (layout.right - layout.left);
  context.clearRect(0, 0, layout.width, layout.height);
  const pen = { context, pipeline, layout, view, colour, x };
  pen.hasLetters = hasRoomForLetters(pen);
  drawAxis(pen);
  pipeline.sides.forEach((side, place) => {
    drawTitle(pen, side, place);
    context.save();
    context.beginPath();
    context.rect(layout.left, rowTop(layout, place, 0), layout.right - layout.left, layout.row * pipeline.numDevices + 1);
    context.clip();
    drawWaits(pen, side, place);
    drawBoxes(pen, side, place);
    drawSends(pen, side, place);
    drawEnds(pen, side, place);
    for (const piece of marked) if (side.rows[piece.device].stops.includes(piece)) drawFrame(pen, piece, place);
    context.restore();
  });
}

// The pieces of a row within the view.
function* seen(pen, pieces) {
  for (let i = firstAfter(pieces, pen.view.from); i < pieces.length && pieces[i].start < pen.view.to; i++) yield pieces[i];
}

function drawTitle({ context, pipeline, layout, colour }, side, place) {
  const top = rowTop(layout, place, 0) - layout.title;
  const name = side.name[0].toUpperCase() + side.name.slice(1);
  context.textBaseline = "alphabetic";
  context.fillStyle = colour("ink");
  context.font = `600 14px ${TYPE}`;
  context.textAlign = "left";
  context.fillText(name, layout.isNarrow ? 0 : layout.left, top + 15);
  context.font = `13.5px ${TYPE}`;
  context.textAlign = layout.isNarrow ? "left" : "right";
  context.fillText(side.facts, layout.isNarrow ? 0 : layout.right, top + (layout.isNarrow ? 33 : 15));
  context.fillStyle = colour("faint");
  context.textAlign = "right";
  context.font = `${Math.min(12.5, layout.row - 1)}px ${TYPE}`;
  context.textBaseline = "middle";
  const every = layout.row < 14 ? 2 : 1;
  for (let device = 0; device < pipeline.numDevices; device += every) {
    const text = layout.isNarrow ? `${device}` : `device ${device}`;
    context.fillText(text, layout.left - 8, rowTop(layout, place, device) + (layout.row - layout.strip) / 2);
  }
}

function drawWaits(pen, side, place) {
  const { context, pipeline, layout, colour } = pen;
  pipeline.causes.forEach((cause, index) => {
    const path = new Path2D();
    side.rows.forEach((row, device) => {
      for (const wait of seen(pen, row.waits)) if (wait.cause === index) addBox(pen, path, wait, rowTop(layout, place, device));
    });
    context.fillStyle = colour(cause.colour);
    context.fill(path);
    if (!cause.hatch) return;
    context.fillStyle = hatchPattern(context, cause.hatch, colour("hatch"));
    context.fill(path);
  });
}

function boxHeight(layout) {
  return layout.row - layout.strip - (layout.row > 14 ? 3 : 1);
}

// A rectangle with a seam to the next where there is room for one.
function addBox({ layout, x }, path, piece, top, height = boxHeight(layout)) {
  const left = Math.max(x(piece.start), layout.left - 2);
  const right = Math.min(x(piece.end), layout.right + 2);
  path.rect(left, top, Math.max(0.3, right - left - (right - left > 3 ? 0.8 : 0)), height);
}

// A backward has a dark line at its foot, an input gradient at its head, a weight gradient both, an update a full one.
function addLines({ layout, x }, path, piece, top, letter) {
  const height = boxHeight(layout);
  const thick = Math.max(1.2, height * 0.11);
  const width = Math.max(0.3, x(piece.end) - x(piece.start) - 0.8);
  if ("BW".includes(letter)) path.rect(x(piece.start), top + height - thick, width, thick);
  if ("IW".includes(letter)) path.rect(x(piece.start), top, width, thick);
}

function drawBoxes(pen, side, place) {
  const { context, pipeline, layout } = pen;
  const groups = pipeline.kinds.map((kind) => kind.looks.map(() => new Path2D()));
  const lines = new Path2D();
  const named = [];
  side.rows.forEach((row, device) => {
    const top = rowTop(layout, place, device);
    for (const box of seen(pen, row.boxes)) {
      if (box.end === box.start) continue;
      addBox(pen, groups[box.kind][box.chunk], box, top);
      addLines(pen, lines, box, top, pipeline.kinds[box.kind].letter);
      if (pen.x(box.end) - pen.x(box.start) > 9) named.push(box);
    }
  });
  groups.forEach((chunks, kind) => chunks.forEach((path, chunk) => {
    context.fillStyle = pipeline.kinds[kind].looks[chunk][0];
    context.fill(path);
  }));
  context.fillStyle = "rgba(20, 24, 40, 0.55)";
  context.fill(lines);
  for (const box of named) drawName(pen, box, rowTop(layout, place, box.device));
}

// Whether nearly all actions that are seen have room for a letter beside their number.
function hasRoomForLetters(pen) {
  const widths = [];
  for (const row of pen.pipeline.sides[0].rows) {
    for (const box of seen(pen, row.boxes)) {
      if (box.end > box.start && pen.pipeline.kinds[box.kind].letter !== "O") widths.push(pen.x(box.end) - pen.x(box.start));
    }
  }
  widths.sort((a, b) => a - b);
  return widths[Math.floor(widths.length / 20)] > 32;
}

// The micro-batch, with the letter of the action before it where all have room for that.
function drawName({ context, pipeline, layout, x, hasLetters }, box, top) {
  const kind = pipeline.kinds[box.kind];
  if (kind.letter === "O" || layout.row < 12) return;
  context.font = `${Math.min(12.5, layout.row * 0.52)}px ${TYPE}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const left = Math.max(x(box.start), layout.left);
  const right = Math.min(x(box.end), layout.right);
  const text = `${hasLetters ? kind.letter : ""}${box.microbatch}`;
  if (context.measureText(`${hasLetters ? kind.letter : ""}${pipeline.widest}`).width + 3 > right - left) return;
  context.fillStyle = kind.looks[box.chunk][1];
  context.fillText(text, (left + right) / 2, top + boxHeight(layout) / 2 + 0.5);
}

function drawSends(pen, side, place) {
  const { context, pipeline, layout } = pen;
  const path = new Path2D();
  side.rows.forEach((row, device) => {
    const top = rowTop(layout, place, device) + layout.row - layout.strip - 1;
    for (const send of row.sends) if (send.end > pen.view.from && send.start < pen.view.to) addBox(pen, path, send, top, layout.strip);
  });
  context.fillStyle = pipeline.sending;
  context.fill(path);
}

// The end of the step, and dashed where the prediction has it.
function drawEnds(pen, side, place) {
  const { context, pipeline, layout, colour, x } = pen;
  const top = rowTop(layout, place, 0);
  context.strokeStyle = colour("ink");
  context.lineWidth = 1;
  const ends = [[side.end, []], ...(place ? [[pipeline.sides[0].end, [3, 3]]] : [])];
  for (const [end, dashes] of ends) {
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(x(end) - 0.5, top);
    context.lineTo(x(end) - 0.5, top + layout.row * pipeline.numDevices);
    context.stroke();
  }
  context.setLineDash([]);
}

function drawFrame({ context, layout, colour, x }, piece, place) {
  const top = rowTop(layout, place, piece.device);
  const left = x(piece.start);
  context.lineWidth = 2;
  context.strokeStyle = colour("ink");
  context.strokeRect(left, top + 0.5, Math.max(2, x(piece.end) - left - 0.8), boxHeight(layout) - 1);
}

function drawAxis({ context, pipeline, layout, view, colour, x }) {
  const seconds = (view.to - view.from) * pipeline.tick;
  const most = (layout.right - layout.left) / (layout.isNarrow ? 62 : 84);
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(seconds / most))).find((n) => seconds / n <= most) / pipeline.tick;
  const bottom = layout.height - AXIS_HEIGHT;
  const [unit, scale] = SCALES.find(([, one]) => pipeline.end * pipeline.tick >= one) || SCALES[2];
  const digits = Math.max(0, Math.ceil(-Math.log10((step * pipeline.tick) / scale) - 1e-9));
  context.font = `12.5px ${TYPE}`;
  context.textBaseline = "top";
  context.strokeStyle = colour("grid");
  context.fillStyle = colour("faint");
  context.lineWidth = 1;
  let labelled = -Infinity; // the right end of the last label
  for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) {
    const at = x(n * step);
    context.beginPath();
    context.moveTo(at, layout.title);
    context.lineTo(at, bottom + 4);
    context.stroke();
    const text = `${((n * step * pipeline.tick) / scale).toFixed(digits)} ${unit}`;
    const { width } = context.measureText(text);
    const left = at > layout.right - 24 ? at - width : at < layout.left + 12 ? at : at - width / 2;
    if (left < labelled + 6) continue; // it would overlap
    labelled = left + width;
    context.textAlign = "left";
    context.fillText(text, left, bottom + 7);
  }
  drawThumb({ context, pipeline, layout, view, colour });
}

// How much of the step is seen, and where in it: only when not all of it is.
function drawThumb({ context, pipeline, layout, view, colour }) {
  const width = layout.right - layout.left;
  if (view.to - view.from >= pipeline.end * 0.999) return;
  context.fillStyle = colour("grid");
  context.fillRect(layout.left, layout.height - 7, width, 5);
  context.fillStyle = colour("faint");
  context.fillRect(layout.left + (view.from / pipeline.end) * width, layout.height - 7, Math.max(8, ((view.to - view.from) / pipeline.end) * width), 5);
}
