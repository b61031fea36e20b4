// Zooming, panning and pointing at the pipeline, with a mouse, fingers or the keyboard.

const MOST_ZOOM = 4000;
const WHOLE = 0.999; // of the step, from which on all of it is seen

class PipelineView {
  constructor(figure) {
    this.figure = figure;
    this.pipeline = readPipeline(JSON.parse(figure.querySelector("script").textContent));
    this.canvas = figure.querySelector("canvas");
    this.said = figure.querySelector("[aria-live]");
    this.view = { from: 0, to: this.pipeline.end };
    this.side = 0; // of the chosen piece
    this.piece = null;
    this.held = new Map(); // pointers that are down
    this.isAsked = false; // to be drawn again
    figure.classList.add("live");
    this.listen();
    this.draw();
  }

  get length() {
    return this.view.to - this.view.from;
  }

  get isWhole() {
    return this.length >= this.pipeline.end * WHOLE;
  }

  draw() {
    const { canvas, figure } = this;
    const scale = window.devicePixelRatio || 1;
    const layout = (this.layout = layoutFor(this.pipeline, canvas.parentElement.clientWidth));
    canvas.style.height = `${layout.height}px`;
    canvas.width = Math.round(layout.width * scale);
    canvas.height = Math.round(layout.height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    drawPipeline(context, this.pipeline, layout, this.view, this.marked());
    for (const name of ["out", "all"]) figure.querySelector(`[data-do=${name}]`).disabled = this.isWhole;
    canvas.classList.toggle("zoomed", !this.isWhole);
  }

  drawSoon() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      this.draw();
    });
  }

  // The chosen piece, and the same action on the other side.
  marked() {
    if (!this.piece) return [];
    const box = this.piece.type === "send" ? this.piece.box : this.piece;
    return [box, ...this.pipeline.sides.map((side) => box.id && side.named.get(box.id))].filter(Boolean);
  }

  // What is seen

  momentAt(x) {
    const { left, right } = this.layout;
    return this.view.from + ((x - left) / (right - left)) * this.length;
  }

  show(from, length) {
    const { end } = this.pipeline;
    const wanted = Math.min(end, Math.max(end / MOST_ZOOM, length));
    const start = Math.max(0, Math.min(end - wanted, from));
    this.view = { from: start, to: start + wanted };
    this.drawSoon();
  }

  // By a factor; what is at x stays there.
  zoom(factor, x) {
    const { left, right } = this.layout;
    const at = x ?? (left + right) / 2;
    const length = Math.min(this.pipeline.end, this.length / factor);
    this.show(this.momentAt(at) - (length * (at - left)) / (right - left), length);
  }

  pan(pixels) {
    const { left, right } = this.layout;
    this.show(this.view.from + (pixels / (right - left)) * this.length, this.length);
  }

  showAll() {
    this.show(0, this.pipeline.end);
  }

  // What is chosen

  // The piece under a point: what is sent, else what the device does or waits for.
  pieceAt({ x, y }) {
    const { layout, pipeline } = this;
    const side = Math.floor(y / (layout.panel + PANEL_GAP));
    const below = y - rowTop(layout, side, 0);
    const device = Math.floor(below / layout.row);
    if (!pipeline.sides[side] || below < 0 || device >= pipeline.numDevices || x < layout.left) return null;
    const row = pipeline.sides[side].rows[device];
    const moment = this.momentAt(x);
    const isStrip = layout.strip && below - device * layout.row >= layout.row - layout.strip - 2;
    const send = isStrip && row.sends.find((one) => one.start <= moment && moment < one.end);
    const stop = row.stops[firstAfter(row.stops, moment)];
    const piece = send || (stop && stop.start <= moment ? stop : null);
    return piece && { side, piece };
  }

  // A piece with its side, or null for none; its words near a point of the window.
  choose(found, x, y) {
    const isNew = found?.piece !== this.piece;
    this.piece = found ? found.piece : null;
    if (found) {
      this.side = found.side;
      showTip(wordsFor(this.pipeline, this.pipeline.sides[found.side], found.piece), x, y);
    } else {
      hideTip();
    }
    if (isNew) this.drawSoon();
  }

  // By keyboard: the piece into view, its words below it and to the screen reader.
  go(side, piece) {
    if (!piece) return;
    if (piece.start < this.view.from || piece.end > this.view.to) {
      this.show((piece.start + piece.end - this.length) / 2, this.length);
    }
    const { layout } = this;
    const box = this.canvas.getBoundingClientRect();
    const share = ((piece.start + piece.end) / 2 - this.view.from) / this.length;
    const x = box.left + layout.left + share * (layout.right - layout.left);
    this.choose({ side, piece }, x, box.top + rowTop(layout, side, piece.device) + layout.row - 8);
    const { name } = this.pipeline.sides[side];
    this.said.textContent = `${name}: ${wordsFor(this.pipeline, this.pipeline.sides[side], piece).join("; ")}`;
  }

  stops() {
    return this.pipeline.sides[this.side].rows[this.piece.device].stops;
  }

  // To the next piece of the device, or the one before.
  step(by) {
    if (!this.piece) return this.go(0, this.pipeline.sides[0].rows[0].stops[0]);
    const piece = this.piece.type === "send" ? this.piece.box : this.piece;
    return this.go(this.side, this.stops()[this.stops().indexOf(piece) + by]);
  }

  // To what the next device, or the one before, does at that time.
  climb(by) {
    if (!this.piece) return this.step(0);
    const { numDevices, sides } = this.pipeline;
    const place = this.side * numDevices + this.piece.device + by;
    const side = Math.floor(place / numDevices);
    if (!sides[side]) return undefined;
    const { stops } = sides[side].rows[place % numDevices];
    const moment = (this.piece.start + this.piece.end) / 2;
    return this.go(side, stops[Math.min(stops.length - 1, firstAfter(stops, moment))]);
  }

  toEdge(isLast) {
    if (this.piece) this.go(this.side, isLast ? this.stops().at(-1) : this.stops()[0]);
  }

  // Keys, wheel and pointers

  listen() {
    const { canvas, figure } = this;
    const deeds = { in: () => this.zoom(2), out: () => this.zoom(0.5), all: () => this.showAll() };
    for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", deeds[button.dataset.do]);
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(2, this.placeOf(event).x));
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointercancel", (event) => this.held.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.held.size || this.choose(null));
    new ResizeObserver(() => this.drawSoon()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawSoon());
  }

  placeOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => (event.shiftKey ? this.pan(-120) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.pan(120) : this.step(1)),
      ArrowUp: () => this.climb(-1),
      ArrowDown: () => this.climb(1),
      Home: () => this.toEdge(false),
      End: () => this.toEdge(true),
      "+": () => this.zoom(2),
      "=": () => this.zoom(2),
      "-": () => this.zoom(0.5),
      0: () => this.showAll(),
      Escape: () => this.choose(null),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  onWheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 200), this.placeOf(event).x);
    else if (event.shiftKey || (isSideways && !this.isWhole)) this.pan(isSideways ? event.deltaX : event.deltaY);
    else return; // the page scrolls
    event.preventDefault();
    hideTip();
  }

  onDown(event) {
    this.held.set(event.pointerId, { ...this.placeOf(event), isMoved: false });
    this.canvas.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    const before = this.held.get(event.pointerId);
    const now = this.placeOf(event);
    if (!before) return this.choose(this.pieceAt(now), event.clientX, event.clientY);
    const isMoved = before.isMoved || this.held.size > 1 || Math.hypot(now.x - before.x, now.y - before.y) > 3;
    if (!isMoved) return undefined;
    const other = [...this.held.values()].find((one) => one !== before);
    if (other) this.pinch(before, now, other);
    else this.pan(before.x - now.x);
    this.held.set(event.pointerId, { ...now, isMoved });
    return hideTip();
  }

  // Two fingers: their distance zooms.
  pinch(before, now, other) {
    const wide = (one) => Math.max(20, Math.abs(one.x - other.x));
    this.zoom(wide(now) / wide(before), (now.x + other.x) / 2);
  }

  onUp(event) {
    const before = this.held.get(event.pointerId);
    this.held.delete(event.pointerId);
    if (before && !before.isMoved) this.choose(this.pieceAt(this.placeOf(event)), event.clientX, event.clientY);
  }
}

for (const figure of document.querySelectorAll(".pipeline")) new PipelineView(figure);
