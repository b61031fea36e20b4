// Zooming, panning and pointing at the pipeline, with a mouse, fingers or the keyboard.

const MOST_ZOOM = 4000;

function openPipeline(figure) {
  const pipeline = readPipeline(JSON.parse(figure.querySelector("script").textContent));
  const canvas = figure.querySelector("canvas");
  const said = figure.querySelector("[aria-live]");
  const state = { view: { from: 0, to: pipeline.end }, layout: null, side: 0, piece: null };
  figure.classList.add("live");

  function draw() {
    const scale = window.devicePixelRatio || 1;
    const layout = (state.layout = layoutFor(pipeline, canvas.parentElement.clientWidth));
    canvas.style.height = `${layout.height}px`;
    canvas.width = Math.round(layout.width * scale);
    canvas.height = Math.round(layout.height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    drawPipeline(context, pipeline, layout, state.view, marked());
    const isWhole = state.view.to - state.view.from >= pipeline.end * 0.999;
    for (const name of ["out", "all"]) figure.querySelector(`[data-do=${name}]`).disabled = isWhole;
    canvas.classList.toggle("zoomed", !isWhole);
  }

  let isAsked = false;
  function redraw() {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  }

  // The chosen piece, and the same action on the other side.
  function marked() {
    if (!state.piece) return [];
    const box = state.piece.type === "send" ? state.piece.box : state.piece;
    return [box, ...pipeline.sides.map((side) => box.id && side.named.get(box.id))].filter(Boolean);
  }

  function momentAt(x) {
    const { layout, view } = state;
    return view.from + ((x - layout.left) / (layout.right - layout.left)) * (view.to - view.from);
  }

  function show(from, length) {
    const wanted = Math.min(pipeline.end, Math.max(pipeline.end / MOST_ZOOM, length));
    const start = Math.max(0, Math.min(pipeline.end - wanted, from));
    state.view = { from: start, to: start + wanted };
    redraw();
  }

  function zoom(factor, x) {
    const { left, right } = state.layout;
    const at = x ?? (left + right) / 2;
    const moment = momentAt(at);
    const length = Math.min(pipeline.end, (state.view.to - state.view.from) / factor);
    show(moment - (length * (at - left)) / (right - left), length);
  }

  function pan(pixels) {
    const { view, layout } = state;
    const length = view.to - view.from;
    show(view.from + (pixels / (layout.right - layout.left)) * length, length);
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  // The piece under a point: what is sent, else what the device does or waits for.
  function pieceAt({ x, y }) {
    const { layout } = state;
    const side = Math.floor(y / (layout.panel + PANEL_GAP));
    const below = y - rowTop(layout, side, 0);
    const device = Math.floor(below / layout.row);
    if (!pipeline.sides[side] || below < 0 || device >= pipeline.numDevices || x < layout.left) return null;
    const row = pipeline.sides[side].rows[device];
    const moment = momentAt(x);
    const isStrip = layout.strip && below - device * layout.row >= layout.row - layout.strip - 2;
    const send = isStrip && row.sends.find((one) => one.start <= moment && moment < one.end);
    const stop = row.stops[firstAfter(row.stops, moment)];
    const piece = send || (stop && stop.start <= moment ? stop : null);
    return piece && { side, piece };
  }

  function choose(found, point) {
    const changed = found?.piece !== state.piece;
    state.piece = found ? found.piece : null;
    if (found) state.side = found.side;
    if (found) showTip(wordsFor(pipeline, pipeline.sides[found.side], found.piece), point.x, point.y);
    else hideTip();
    if (changed) redraw();
  }

  // By keyboard: the piece into view, its words beside it and to the screen reader.
  function go(side, piece) {
    if (!piece) return;
    const { view } = state;
    const length = view.to - view.from;
    if (piece.start < view.from || piece.end > view.to) show((piece.start + piece.end - length) / 2, length);
    Object.assign(state, { side, piece });
    draw();
    const { layout } = state;
    const box = canvas.getBoundingClientRect();
    const share = ((piece.start + piece.end) / 2 - state.view.from) / (state.view.to - state.view.from);
    const lines = wordsFor(pipeline, pipeline.sides[side], piece);
    showTip(lines, box.left + layout.left + share * (layout.right - layout.left), box.top + rowTop(layout, side, piece.device) + layout.row - 8);
    said.textContent = `${pipeline.sides[side].name}: ${lines.join("; ")}`;
  }

  function stops() {
    return pipeline.sides[state.side].rows[state.piece.device].stops;
  }

  function step(by) {
    if (!state.piece) return go(0, pipeline.sides[0].rows[0].stops[0]);
    const piece = state.piece.type === "send" ? state.piece.box : state.piece;
    return go(state.side, stops()[stops().indexOf(piece) + by]);
  }

  function climb(by) {
    if (!state.piece) return step(0);
    const rows = pipeline.sides.flatMap((side, place) => side.rows.map((row) => [place, row]));
    const target = rows[state.side * pipeline.numDevices + state.piece.device + by];
    if (!target) return undefined;
    const [side, row] = target;
    const moment = (state.piece.start + state.piece.end) / 2;
    return go(side, row.stops[Math.min(row.stops.length - 1, firstAfter(row.stops, moment))]);
  }

  const deeds = {
    in: () => zoom(2),
    out: () => zoom(0.5),
    all: () => show(0, pipeline.end),
  };

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const edge = (last) => state.piece && go(state.side, last ? stops().at(-1) : stops()[0]);
    const keys = {
      ArrowLeft: () => (event.shiftKey ? pan(-120) : step(-1)),
      ArrowRight: () => (event.shiftKey ? pan(120) : step(1)),
      ArrowUp: () => climb(-1),
      ArrowDown: () => climb(1),
      Home: () => edge(false),
      End: () => edge(true),
      "+": deeds.in, "=": deeds.in, "-": deeds.out, 0: deeds.all,
      Escape: () => choose(null),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  function onWheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), place(event).x);
    else if (event.shiftKey || isSideways) pan(isSideways ? event.deltaX : event.deltaY);
    else return; // the page scrolls
    event.preventDefault();
    hideTip();
  }

  const held = new Map(); // pointers that are down

  function onMove(event) {
    const before = held.get(event.pointerId);
    const now = place(event);
    if (!before) return choose(pieceAt(now), { x: event.clientX, y: event.clientY });
    const [one, two] = [...held.values()];
    held.set(event.pointerId, { ...now, isMoved: before.isMoved || Math.hypot(now.x - before.x, now.y - before.y) > 3 });
    if (two) {
      const other = one === before ? two : one;
      const wide = (a) => Math.max(20, Math.abs(a.x - other.x));
      zoom(wide(now) / wide(before), (now.x + other.x) / 2);
      held.get(event.pointerId).isMoved = true;
    } else if (held.get(event.pointerId).isMoved) {
      pan(before.x - now.x);
      hideTip();
    } else {
      held.set(event.pointerId, before);
    }
    return undefined;
  }

  function onUp(event) {
    const before = held.get(event.pointerId);
    held.delete(event.pointerId);
    if (before && !before.isMoved && event.type === "pointerup") choose(pieceAt(place(event)), { x: event.clientX, y: event.clientY });
  }

  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, { ...place(event), isMoved: false });
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerup", onUp);
  canvas.addEventListener("pointercancel", onUp);
  canvas.addEventListener("pointerleave", () => held.size || choose(null));
  canvas.addEventListener("dblclick", (event) => zoom(2, place(event).x));
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("blur", () => choose(null));
  for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", deeds[button.dataset.do]);
  new ResizeObserver(redraw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  draw();
}

for (const figure of document.querySelectorAll(".pipeline")) openPipeline(figure);
