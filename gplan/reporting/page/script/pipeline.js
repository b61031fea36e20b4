// The pipeline's numbers as pieces with a start and an end in ticks: what each device does, waits for and sends.

function readPipeline(data) {
  const stagesOf = []; // by device, rising: the place in the list is the chunk
  data.stages.forEach(([device], stage) => (stagesOf[device] ||= []).push(stage));
  const sides = data.sides.map((side) => {
    const rows = side.boxes.map((_, device) => readRow(side, device, stagesOf[device]));
    const named = new Map();
    for (const row of rows) for (const box of row.boxes) named.set(box.id, box);
    return { name: side.name, facts: side.facts, end: side.end, rows, named };
  });
  const hasSends = sides.some((side) => side.rows.some((row) => row.sends.length));
  const last = sides[0].rows[0].boxes.reduce((most, box) => Math.max(most, box.microbatch), 0);
  const widest = "0".repeat(`${last}`.length);
  return { ...data, sides, hasSends, widest, numDevices: sides[0].rows.length };
}

function readRow(side, device, stages) {
  const boxes = read(side.boxes[device], 3, ([kind, chunk, microbatch]) => {
    const stage = stages[chunk];
    return { type: "box", device, kind, chunk, stage, microbatch, id: `${stage}.${kind}.${microbatch}` };
  });
  const waits = read(side.waits[device], 1, ([cause]) => ({ type: "wait", device, cause }));
  const sends = [];
  const flat = side.sends[device];
  for (let i = 0, place = 0; i < flat.length; i += 3) {
    place += flat[i];
    const start = boxes[place].end + flat[i + 1];
    sends.push({ type: "send", device, box: boxes[place], start, end: start + flat[i + 2] });
  }
  const stops = [...boxes, ...waits].filter((x) => x.end > x.start).sort((a, b) => a.start - b.start);
  return { boxes, waits, sends, stops };
}

// A flat list of things: `count` numbers of its own, the gap since the one before, the length.
function read(flat, count, made) {
  const things = [];
  for (let i = 0, at = 0; i < flat.length; i += count + 2) {
    const start = at + flat[i + count];
    at = start + flat[i + count + 1];
    things.push({ ...made(flat.slice(i, i + count)), start, end: at });
  }
  return things;
}

// The place of the first of some pieces, in order of time, that ends after a moment.
function firstAfter(pieces, moment) {
  let low = 0;
  let high = pieces.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle].end > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A piece in words: what it is, when it is, and for an action of two sides what the other says.
function wordsFor(pipeline, side, piece) {
  const seconds = (ticks) => secondsText(ticks * pipeline.tick);
  const when = `starts at ${seconds(piece.start)}, takes ${seconds(piece.end - piece.start)}`;
  if (piece.type === "wait") {
    const cause = pipeline.causes[piece.cause];
    return [`device ${piece.device} waits: ${cause.name}`, when, cause.means];
  }
  const box = piece.type === "send" ? piece.box : piece;
  const { name } = pipeline.kinds[box.kind];
  const stage = pipeline.stages[box.stage];
  if (piece.type === "send") {
    const isForward = pipeline.kinds[box.kind].letter === "F";
    const what = isForward ? "activations" : "gradients";
    const target = box.stage + (isForward ? 1 : -1);
    const size = stage[isForward ? 2 : 3];
    return [`${what} of micro-batch ${box.microbatch} to stage ${target}`, when, size];
  }
  const isUpdate = pipeline.kinds[box.kind].letter === "O";
  const what = isUpdate ? name : `${name} of micro-batch ${box.microbatch}`;
  const lines = [`${what}, stage ${box.stage} on device ${box.device}`, when, stage[1]];
  const other = pipeline.sides.find((x) => x !== side);
  const twin = other?.named.get(box.id);
  if (twin) lines.splice(2, 0, twinWords(pipeline, { side, box, other, twin }));
  return lines;
}

function twinWords(pipeline, { side, box, other, twin }) {
  const isMeasured = side === pipeline.sides[1];
  const predicted = isMeasured ? twin : box;
  const measured = isMeasured ? box : twin;
  const length = measured.end - measured.start;
  const error = length ? `, error ${percentText((predicted.end - predicted.start) / length - 1)}` : "";
  const seconds = (ticks) => secondsText(ticks * pipeline.tick);
  const which = other.name.split(" ")[0];
  return `${which}: starts at ${seconds(twin.start)}, takes ${seconds(twin.end - twin.start)}${error}`;
}
