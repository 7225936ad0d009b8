// The page: its state, its reactions to the pointer and the keys, and the texts beside the canvases.

import { MEMORY, MODES, colorNumbers, legendOf, paletteOf } from "./colors.js";
import { figureRows } from "./figures.js";
import { AXIS, firstAbove, hitTest, layoutOf, trackBox, visibleRows } from "./layout.js";
import { unpack } from "./model.js";
import { GUTTER, drawMemory, drawTimelines } from "./paint.js";
import { memoryText, panBy, pixelAt, showInterval, showMoment, timeText, wholeView, zoomAt } from "./scale.js";
import { drawValues, liveValues, momentsOf } from "./values.js";
import { capital, chainOf, factsOf, gapSentences, opName, placedName, rowName } from "./words.js";

const KEYS = [
  ["wheel, + −", "zoom"],
  ["drag, ← →", "move in time"],
  ["shift wheel, page up, page down", "scroll the ranks"],
  ["↑ ↓", "rank above, below"],
  [", .", "op before, after"],
  ["j", "to what the op waited for"],
  ["z", "zoom to the op"],
  ["0", "whole step"],
  ["p", "critical path"],
  ["space", "play op by op"],
  ["c", "next colour"],
  ["d", "light, dark"],
  ["v", "memory, values"],
  ["escape", "select nothing"],
];

/** Milliseconds between two moments of playback. */
const BEAT = 350;

/** Largest number of ops in each direction that a tooltip names. */
const NAMED = 4;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Viewer of one page. `show` gives it a step; it may be called again with another one. */
export class Viewer {
  constructor() {
    this.scene = {
      view: wholeView(1, 100), layout: layoutOf(1, 1, 100), scroll: 0, mode: "kind", theme: "light", row: 0,
      timeline: 0, hover: null, selected: -1, chain: [], gap: null, gapPlace: null, showPath: false, cursor: null,
      scratch: scratchCanvas(),
    };
    this.frames = [];
    this.tools = { pixelAt, trackBox, unpack };
    this.playing = 0;
    this.tab = "memory";
    const dark = matchMedia("(prefers-color-scheme: dark)");
    this.setTheme(stored("theme") ?? (dark.matches ? "dark" : "light"));
    dark.addEventListener("change", (event) => {
      if (stored("theme") === null) this.setTheme(event.matches ? "dark" : "light");
    });
    this.listen();
  }

  /** Show a step. If `keep` is set, the visible interval does not change. */
  show(model, keep = false) {
    const { scene } = this;
    const before = keep && scene.model ? [scene.view.from / scene.view.end, scene.view.to / scene.view.end] : [0, 1];
    Object.assign(scene, { model, hover: null, selected: -1, chain: [], gap: null, cursor: null });
    scene.timeline = model.timelines.length - 1;
    scene.row = keep ? Math.min(scene.row, model.rows - 1) : fullestRow(model, scene.timeline);
    if (!keep) scene.scroll = 0;
    this.moments = momentsOf(model.timelines[scene.timeline]);
    document.title = model.header.title;
    byId("title").textContent = model.header.title;
    byId("note").textContent = model.header.note;
    this.fillModes();
    this.setMode(scene.mode);
    this.resize();
    scene.view = { ...wholeView(model.end, scene.view.width), from: before[0] * model.end, to: before[1] * model.end };
    byId("moment").max = this.moments.length - 1;
    byId("values").hidden = this.tab !== "values" || !model.hasProgram;
    byId("tab-values").disabled = !model.hasProgram;
    byId("remarks").replaceChildren(...model.header.remarks.map((text) => element("p", { class: "faint" }, text)));
    this.writeFigures();
    this.writeSelection();
    this.draw();
  }

  fillModes() {
    const { model, mode } = this.scene;
    const modes = Object.entries(MODES).filter(([name]) => name !== "difference" || model.timelines.length > 1);
    byId("mode").replaceChildren(...modes.map(([name, text]) => element("option", { value: name }, text)));
    if (!modes.some(([name]) => name === mode)) this.scene.mode = "kind";
    byId("which-label").hidden = model.timelines.length < 2;
    const options = model.timelines.map((each) => element("option", { value: String(each.number) }, each.name));
    byId("which").replaceChildren(...options);
    byId("which").value = String(this.scene.timeline);
  }

  setMode(mode) {
    const { scene } = this;
    scene.mode = mode;
    byId("mode").value = mode;
    scene.numbers = colorNumbers(scene.model, mode);
    scene.palette = paletteOf(scene.model, mode, scene.theme);
    byId("legend").replaceChildren(...legendOf(scene.model, mode, scene.theme).map(key));
    const timeline = scene.model.timelines[scene.timeline];
    const dark = scene.theme === "dark" ? 1 : 0;
    const names = timeline.categories.map((text) => key({ color: (MEMORY[text] ?? MEMORY.arena)[dark], text }));
    byId("memory-legend").replaceChildren(...names);
    this.draw();
  }

  setTheme(theme, chosen = false) {
    this.scene.theme = theme;
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
    if (chosen) store("theme", theme);
    if (this.scene.model) this.setMode(this.scene.mode);
  }

  setTimeline(number) {
    this.scene.timeline = number;
    this.moments = momentsOf(this.scene.model.timelines[number]);
    byId("moment").max = this.moments.length - 1;
    byId("which").value = String(number);
    this.setMode(this.scene.mode);
    this.select(this.scene.selected);
  }

  setTab(tab) {
    this.tab = tab;
    byId("tab-memory").setAttribute("aria-selected", String(tab === "memory"));
    byId("tab-values").setAttribute("aria-selected", String(tab === "values"));
    byId("values").hidden = tab !== "values";
    byId("memory-legend").style.visibility = tab === "memory" ? "visible" : "hidden";
    byId("lower").style.height = tab === "values" ? "300px" : "";
    if (tab === "values" && this.scene.cursor === null) this.moveTo(0);
    this.resize();
  }

  resize() {
    const { scene } = this;
    if (!scene.model) return;
    const stage = byId("stage");
    const [width, height] = [Math.max(160, stage.clientWidth), Math.max(60, stage.clientHeight)];
    this.context = fitCanvas(byId("timelines"), width, height);
    this.memoryContext = fitCanvas(byId("memory"), width, byId("lower").clientHeight);
    scene.view = { ...scene.view, width: width - GUTTER };
    scene.layout = layoutOf(scene.model.rows, scene.model.timelines.length, height);
    scene.scroll = Math.min(scene.scroll, scene.layout.most);
    this.draw();
  }

  /** Request a redraw in the next frame. */
  draw() {
    if (this.waiting || !this.scene.model || !this.context) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const begun = performance.now();
      drawTimelines(this.context, this.scene);
      if (this.tab === "memory") drawMemory(this.memoryContext, this.scene, byId("lower").clientHeight);
      else this.drawPictures();
      this.frames.push(performance.now() - begun);
      if (this.frames.length > 200) this.frames.shift();
    });
  }

  drawPictures() {
    const { model, theme, cursor, timeline } = this.scene;
    const panel = byId("values");
    const across = Math.max(1, Math.min(model.rows, Math.floor(panel.clientWidth / 300)));
    const [wide, high] = [Math.floor((panel.clientWidth - 16) / across), 118];
    const canvas = byId("pictures");
    const context = fitCanvas(canvas, wide * across, high * Math.ceil(model.rows / across));
    context.clearRect(0, 0, wide * across, high * model.rows);
    for (let row = 0; row < model.rows; row += 1) {
      const [left, top] = [8 + wide * (row % across), high * Math.floor(row / across)];
      const live = liveValues(model, model.timelines[timeline], row, cursor ?? 0);
      context.fillStyle = getComputedStyle(document.body).color;
      context.font = "11px system-ui, sans-serif";
      context.fillText(`${rowName(model, row)}: ${this.doing(row)}`, left, top + 13, wide - 20);
      drawValues(context, model, row, live, [left, top + 19, wide - 24, high - 28], theme);
    }
  }

  /** Activity of a row at the current moment of playback. */
  doing(row) {
    const { model, cursor, timeline } = this.scene;
    const [compute, communication] = [model.timelines[timeline].compute[row], model.timelines[timeline].communication[row]];
    const at = (lane) => {
      const place = firstAbove(lane.starts, cursor) - 1;
      return place >= 0 && lane.ends[place] > cursor ? lane.ops[place] : -1;
    };
    const op = at(compute) >= 0 ? at(compute) : at(communication);
    return op < 0 ? "–" : opName(model, op);
  }

  // What is selected.

  select(op, { keepView = true } = {}) {
    const { scene } = this;
    const { model } = scene;
    const timeline = model.timelines[scene.timeline];
    Object.assign(scene, { selected: op, gap: null, gapPlace: null, chain: [] });
    if (op >= 0) {
      scene.row = model.rowOf[op];
      scene.chain = chainOf(model, timeline, op).map((link) => link.op).filter((each) => each >= 0);
      if (!keepView) scene.view = showMoment(scene.view, timeline.starts[op]);
      this.showRow();
    }
    this.writeSelection();
    this.draw();
  }

  selectGap(place) {
    Object.assign(this.scene, { selected: -1, chain: [], gap: place.gap, gapPlace: place, row: place.row });
    this.writeSelection();
    this.draw();
  }

  selectRow(row) {
    this.scene.row = Math.min(this.scene.model.rows - 1, Math.max(0, row));
    this.showRow();
    this.writeSelection();
    this.draw();
  }

  /** Scroll so that the selected row is visible. */
  showRow() {
    const { scene } = this;
    const [first, last] = visibleRows(scene.layout, scene.scroll);
    if (scene.row <= first || scene.row >= last) {
      const middle = scene.row * scene.layout.row - (scene.layout.height - AXIS) / 2;
      scene.scroll = Math.min(scene.layout.most, Math.max(0, middle));
    }
  }

  /** Select the op before or after the selected one on its rank. */
  step(direction) {
    const { scene } = this;
    const timeline = scene.model.timelines[scene.timeline];
    const talks = scene.selected >= 0 && scene.model.kindOf(scene.selected).communicates;
    const lane = (talks ? timeline.communication : timeline.compute)[scene.row];
    if (!lane.ops.length) return;
    const now = lane.ops.indexOf(scene.selected);
    const from = firstAbove(lane.starts, scene.view.from);
    const next = now < 0 ? from : now + direction;
    this.select(lane.ops[Math.min(lane.ops.length - 1, Math.max(0, next))], { keepView: false });
  }

  writeSelection() {
    const { scene } = this;
    const { model, selected, gap } = scene;
    const timeline = model.timelines[scene.timeline];
    const parts = [];
    if (selected >= 0) {
      parts.push(element("h2", {}, capital(placedName(model, selected))), list(factsOf(model, timeline, selected)));
      const { before, after } = model.dependenciesOf(selected);
      parts.push(...this.links("Needs", before), ...this.links("Is needed by", after));
      const chain = chainOf(model, timeline, selected);
      parts.push(element("h2", {}, "Why it starts no earlier"));
      parts.push(element("ol", { id: "chain" }, ...chain.map((link) => this.linked(link.sentence, link.op))));
    } else if (gap) {
      parts.push(element("h2", {}, `Gap of ${rowName(model, scene.gapPlace.row)}`));
      parts.push(...gapSentences(model, model.timelines[scene.gapPlace.timeline], scene.gapPlace.row, gap).map((text) => element("p", {}, text)));
      if (gap.before >= 0) {
        parts.push(element("button", { onclick: () => this.select(gap.before) }, "Show all links to the start"));
      }
    } else {
      const peak = timeline.memory[scene.row];
      parts.push(element("h2", {}, capital(rowName(model, scene.row))));
      const ranks = timeline.figures.ranks[scene.row];
      const unit = model.header.unit;
      parts.push(
        list([
          ["computes", timeText(ranks.computing, unit)],
          ["exposed", timeText(ranks.exposed, unit)],
          ["idle", timeText(ranks.idle, unit)],
          ["others wait for it", timeText(ranks.waited_for, unit)],
          ...(peak.peak > 0 ? [["peak memory", `${memoryText(peak.peak, model.header.memory)} at ${timeText(peak.peakAt, unit)}`]] : []),
        ]),
        element("p", { class: "faint" }, "Click an op to see what it waited for, or a gap to see why it exists."),
      );
    }
    byId("selection").replaceChildren(...parts);
  }

  /** List item that selects an op when it is clicked. */
  linked(text, op) {
    const timeline = this.scene.model.timelines[this.scene.timeline];
    if (!(op >= 0 && timeline.ends[op] >= timeline.starts[op])) return element("li", { class: "fixed" }, text);
    const go = () => this.select(op, { keepView: false });
    return element("li", { tabindex: "0", onclick: go, onkeydown: (event) => event.key === "Enter" && go() }, text);
  }

  links(title, ops) {
    if (!ops.length) return [];
    const { model } = this.scene;
    return [element("h2", {}, title), element("ol", {}, ...ops.map((op) => this.linked(placedName(model, op), op)))];
  }

  writeFigures() {
    const { model } = this.scene;
    const several = model.timelines.length > 1;
    const head = ["", ...model.timelines.map((each) => each.name), ...(several ? ["difference"] : [])];
    const rows = figureRows(model).map((row) =>
      element(
        "tr",
        { ...(row.indented ? { class: "indented" } : {}), ...(row.about ? { title: row.about } : {}) },
        ...[row.label, ...row.values, ...(several ? [row.difference] : [])].map((text) => element("td", {}, text)),
      ),
    );
    const body = element("tbody", {}, ...rows);
    const heading = several ? [element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text))))] : [];
    byId("figures").replaceChildren(element("h2", {}, "Figures"), element("table", {}, ...heading, body));
  }

  // What is hovered.

  hoverAt(x, y, pageX, pageY) {
    const { scene } = this;
    scene.hover = hitTest(scene.model, scene.view, scene.layout, scene.scroll, x - GUTTER, y);
    const tip = byId("tip");
    const texts = scene.hover ? this.tipOf(scene.hover) : null;
    tip.hidden = texts === null;
    if (texts) {
      tip.replaceChildren(...texts);
      const [width, height] = [tip.offsetWidth, tip.offsetHeight];
      tip.style.left = `${Math.max(4, Math.min(pageX + 14, innerWidth - width - 8))}px`;
      tip.style.top = `${pageY + 18 + height > innerHeight ? Math.max(4, pageY - height - 12) : pageY + 18}px`;
    }
    this.draw();
  }

  tipOf(hover) {
    const { model } = this.scene;
    const timeline = model.timelines[hover.timeline];
    if (hover.op >= 0) {
      const names = (ops) => {
        const shown = ops.slice(0, NAMED).map((op) => placedName(model, op));
        return [...shown, ...(ops.length > NAMED ? [`${ops.length - NAMED} more`] : [])].join(", ");
      };
      const { before, after } = model.dependenciesOf(hover.op);
      const facts = factsOf(model, timeline, hover.op);
      if (before.length) facts.push(["needs", names(before)]);
      if (after.length) facts.push(["needed by", names(after)]);
      const which = timeline.name ? ` (${timeline.name})` : "";
      return [element("b", {}, `${capital(placedName(model, hover.op))}${which}`), list(facts)];
    }
    if (!hover.gap) return null;
    const [first] = gapSentences(model, timeline, hover.row, hover.gap);
    return [element("span", {}, first), element("div", { class: "faint" }, "Click for the reasons.")];
  }

  // Playing.

  moveTo(number) {
    const { scene } = this;
    const at = Math.min(this.moments.length - 1, Math.max(0, number));
    scene.cursor = this.moments[at];
    byId("moment").value = String(at);
    byId("now").textContent = timeText(scene.cursor, scene.model.header.unit);
    scene.view = showMoment(scene.view, scene.cursor);
    this.draw();
    return at;
  }

  moved(by) {
    return this.moveTo((this.scene.cursor === null ? -1 : Number(byId("moment").value)) + by);
  }

  togglePlay() {
    if (this.playing) {
      clearInterval(this.playing);
      this.playing = 0;
    } else {
      if (this.scene.cursor !== null && Number(byId("moment").value) >= this.moments.length - 1) this.moveTo(0);
      this.playing = setInterval(() => {
        if (this.moved(1) >= this.moments.length - 1) this.togglePlay();
      }, BEAT);
    }
    byId("play").textContent = this.playing ? "❚❚ Pause" : "▶ Play";
  }

  // The pointer and the keys.

  listen() {
    const canvas = byId("timelines");
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { scene } = this;
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (event.shiftKey && !across) this.scrollBy(event.deltaY);
      else if (across) scene.view = panBy(scene.view, event.deltaX);
      else scene.view = zoomAt(scene.view, event.offsetX - GUTTER, Math.exp(-event.deltaY / 300));
      this.draw();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.hoverAt(event.offsetX, event.offsetY, event.clientX, event.clientY);
      const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(x, y) < 4) return undefined;
      this.scene.view = panBy(this.scene.view, -x);
      this.scrollBy(-y);
      Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
      byId("tip").hidden = true;
      return this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const clicked = drag && !drag.moved;
      drag = null;
      if (clicked) this.click(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointerleave", () => {
      this.scene.hover = null;
      byId("tip").hidden = true;
      this.draw();
    });
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(byId("stage"));
    byId("mode").addEventListener("change", (event) => this.setMode(event.target.value));
    byId("which").addEventListener("change", (event) => this.setTimeline(Number(event.target.value)));
    byId("fit").addEventListener("click", () => this.fit());
    byId("path").addEventListener("click", () => this.togglePath());
    byId("theme").addEventListener("click", () => this.setTheme(this.scene.theme === "dark" ? "light" : "dark", true));
    byId("help").addEventListener("click", () => this.toggleKeys());
    byId("play").addEventListener("click", () => this.togglePlay());
    byId("back").addEventListener("click", () => this.moved(-1));
    byId("forward").addEventListener("click", () => this.moved(1));
    byId("moment").addEventListener("input", (event) => this.moveTo(Number(event.target.value)));
    byId("tab-memory").addEventListener("click", () => this.setTab("memory"));
    byId("tab-values").addEventListener("click", () => this.setTab("values"));
    const keys = KEYS.map(([names, about]) => element("div", {}, element("kbd", {}, names), ` ${about}`));
    byId("keys").replaceChildren(...keys);
  }

  click(x, y) {
    const { scene } = this;
    const hit = hitTest(scene.model, scene.view, scene.layout, scene.scroll, x - GUTTER, y);
    if (!hit) {
      const row = Math.floor((y - AXIS + scene.scroll) / scene.layout.row);
      if (x < GUTTER && row >= 0 && row < scene.model.rows) this.selectRow(row);
      return;
    }
    if (hit.timeline !== scene.timeline) this.setTimeline(hit.timeline);
    if (hit.op >= 0) this.select(hit.op);
    else if (hit.gap) this.selectGap(hit);
    else this.selectRow(hit.row);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.target.tagName === "BUTTON" && (event.key === " " || event.key === "Enter")) return;
    const { scene } = this;
    const pan = (pixels) => (scene.view = panBy(scene.view, pixels));
    const zoom = (factor) => (scene.view = zoomAt(scene.view, this.focus(), factor));
    const actions = {
      ArrowLeft: () => pan(-0.15 * scene.view.width),
      ArrowRight: () => pan(0.15 * scene.view.width),
      ArrowUp: () => this.selectRow(scene.row - 1),
      ArrowDown: () => this.selectRow(scene.row + 1),
      PageUp: () => this.scrollBy(-scene.layout.height / 2),
      PageDown: () => this.scrollBy(scene.layout.height / 2),
      "+": () => zoom(1.5),
      "=": () => zoom(1.5),
      "-": () => zoom(1 / 1.5),
      0: () => this.fit(),
      ",": () => this.step(-1),
      ".": () => this.step(1),
      j: () => this.jump(),
      z: () => this.zoomToOp(),
      p: () => this.togglePath(),
      " ": () => this.togglePlay(),
      c: () => this.nextMode(),
      d: () => this.setTheme(scene.theme === "dark" ? "light" : "dark", true),
      v: () => this.setTab(this.tab === "memory" && scene.model.hasProgram ? "values" : "memory"),
      "?": () => this.toggleKeys(),
      Escape: () => this.select(-1),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
    this.draw();
  }

  /** Pixel around which the keys zoom: the selected op, or the middle. */
  focus() {
    const { scene } = this;
    const middle = scene.view.width / 2;
    if (scene.selected < 0) return middle;
    const x = pixelAt(scene.view, scene.model.timelines[scene.timeline].starts[scene.selected]);
    return x >= 0 && x <= scene.view.width ? x : middle;
  }

  jump() {
    const { scene } = this;
    if (scene.selected < 0) return;
    const cause = scene.model.causeOf(scene.model.timelines[scene.timeline], scene.selected);
    if (cause >= 0) this.select(cause, { keepView: false });
  }

  zoomToOp() {
    const { scene } = this;
    if (scene.selected < 0) return;
    const timeline = scene.model.timelines[scene.timeline];
    scene.view = showInterval(scene.view, timeline.starts[scene.selected], timeline.ends[scene.selected], 6);
    this.draw();
  }

  nextMode() {
    const names = [...byId("mode").options].map((option) => option.value);
    this.setMode(names[(names.indexOf(this.scene.mode) + 1) % names.length]);
  }

  fit() {
    this.scene.view = wholeView(this.scene.model.end, this.scene.view.width);
    this.draw();
  }

  togglePath() {
    this.scene.showPath = !this.scene.showPath;
    byId("path").setAttribute("aria-pressed", String(this.scene.showPath));
    this.draw();
  }

  toggleKeys() {
    const keys = byId("keys");
    keys.hidden = !keys.hidden;
    byId("help").setAttribute("aria-expanded", String(!keys.hidden));
  }

  scrollBy(pixels) {
    const { scene } = this;
    scene.scroll = Math.min(scene.layout.most, Math.max(0, scene.scroll + pixels));
  }
}

function key({ color, text }) {
  const box = element("i");
  box.style.background = color;
  return element("span", { class: "key", role: "listitem" }, box, text);
}

function list(facts) {
  return element("dl", {}, ...facts.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
}

function fullestRow(model, timeline) {
  const peaks = model.timelines[timeline].memory.map((memory) => memory.peak);
  return Math.max(0, peaks.indexOf(Math.max(...peaks)));
}

/** Set the size of a canvas in CSS pixels, and return a context that draws in them. */
function fitCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    Object.assign(canvas, { width: wide, height: high });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** A canvas for strips of pixels, which grows as needed. */
function scratchCanvas() {
  const canvas = document.createElement("canvas");
  return (width, height) => {
    if (canvas.width < width || canvas.height < height) Object.assign(canvas, { width, height });
    return { canvas, context: canvas.getContext("2d") };
  };
}

/** Stored choice of the reader. A page that is opened from a disk may have no storage. */
function stored(name) {
  try {
    return localStorage.getItem(`shardlab-${name}`);
  } catch {
    return null;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(`shardlab-${name}`, value);
  } catch {
    // the choice holds for this page only
  }
}
