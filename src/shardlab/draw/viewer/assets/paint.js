// Drawing on the two canvases: the rows of all ranks with their time axis, and the memory of one row below them.

import { KINDS, MEMORY, SURFACES, inkOn } from "./colors.js";
import { AXIS, coverPixels, firstAbove, isCrowded, labelledRows, trackBox, visibleRange, visibleRows, writePixels } from "./layout.js";
import { pixelAt, shortMemoryText, ticksOf, timeText } from "./scale.js";

/** Width of the column with the row names in pixels. */
export const GUTTER = 96;

const FONT = "system-ui, sans-serif";

/** Draw all visible rows. `scene` is the state of a viewer. */
export function drawTimelines(context, scene) {
  const { view, layout, scroll, theme } = scene;
  const surface = SURFACES[theme];
  const width = GUTTER + view.width;
  context.fillStyle = surface.ground;
  context.fillRect(0, 0, width, layout.height);
  const [first, last] = visibleRows(layout, scroll);
  drawTracks(context, scene, first, last);
  if (scene.showPath) drawPath(context, scene);
  drawMarks(context, scene);
  drawAxis(context, scene);
  drawNames(context, scene);
}

function drawTracks(context, scene, first, last) {
  const { model, view, layout, scroll, theme } = scene;
  const surface = SURFACES[theme];
  context.fillStyle = surface.idle;
  const tracks = [];
  for (let row = first; row <= last; row += 1) {
    for (const timeline of model.timelines) {
      const box = trackBox(layout, row, timeline.number, scroll);
      const ended = Math.min(view.width, pixelAt(view, timeline.end));
      if (ended > 0) context.fillRect(GUTTER, box.top, ended, box.compute);
      tracks.push([timeline.compute[row], box.top, box.compute, surface.idle, false]);
      if (box.communication > 0) {
        tracks.push([timeline.communication[row], box.communicationTop, box.communication, surface.ground, true]);
      }
    }
  }
  const strips = tracks.filter(([lane]) => isCrowded(lane, view));
  drawStrips(context, scene, strips);
  for (const [lane, top, height, , talks] of tracks) {
    if (!isCrowded(lane, view)) drawBoxes(context, scene, lane, top, height, talks);
  }
}

/** Draw each crowded lane as one line of pixels, stretched to the lane's height. */
function drawStrips(context, scene, strips) {
  if (!strips.length) return;
  const { view, palette, numbers } = scene;
  const width = Math.max(1, Math.floor(view.width));
  const scratch = scene.scratch(width, strips.length);
  const image = scratch.context.createImageData(width, strips.length);
  const cover = new Float32Array(4 * (width + 1));
  const exact = { ...view, width };
  strips.forEach(([lane, , , ground], line) => {
    const background = [1, 3, 5].map((at) => Number.parseInt(ground.slice(at, at + 2), 16));
    coverPixels(lane, exact, numbers, palette.rgb, cover);
    writePixels(cover, width, background, image.data, 4 * width * line);
  });
  scratch.context.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  strips.forEach(([, top, height], line) => {
    context.drawImage(scratch.canvas, 0, line, width, 1, GUTTER, top, width, height);
  });
}

function drawBoxes(context, scene, lane, top, height, talks) {
  const { model, view, palette, numbers } = scene;
  const { text, kind } = model.columns;
  const [first, last] = visibleRange(lane, view.from, view.to);
  const size = Math.min(12, height - 2);
  context.font = `${size}px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  let color = "";
  for (let at = first; at < last; at += 1) {
    const op = lane.ops[at];
    const left = Math.max(-2, pixelAt(view, lane.starts[at]));
    const right = Math.min(view.width + 2, pixelAt(view, lane.ends[at]));
    const wide = right - left;
    if (palette.css[numbers[op]] !== color) color = palette.css[numbers[op]];
    context.fillStyle = color;
    const [upper, lower] = [top + height * lane.upper[at], top + height * lane.lower[at]];
    context.fillRect(GUTTER + left, upper, Math.max(0.8, wide > 3 ? wide - 0.7 : wide), lower - upper - (talks ? 1 : 0));
    if (wide > 14 && size >= 8 && lower - upper > size) {
      const about = model.kinds[kind[op]];
      const label = talks ? about.letters : model.header.texts[text[op]];
      if (label && label.length * size * 0.62 < wide) {
        context.fillStyle = inkOn(color);
        context.fillText(label, GUTTER + (left + right) / 2, (upper + lower) / 2 + 0.5);
      }
    }
  }
}

/** Draw the critical path as a line through its ops, in the last visible timeline. */
function drawPath(context, scene) {
  const { model, view, layout, scroll, theme } = scene;
  const timeline = model.timelines[scene.timeline];
  context.strokeStyle = SURFACES[theme].accent;
  context.lineWidth = 2.5;
  context.beginPath();
  let before = null;
  for (const link of timeline.path) {
    if (link.end < view.from || link.start > view.to) {
      before = null;
      continue;
    }
    const row = model.rowOf[link.op];
    const box = trackBox(layout, row, timeline.number, scroll);
    const talks = model.kindOf(link.op).communicates;
    const y = talks ? box.communicationTop + box.communication / 2 : box.top + box.compute - 2;
    const [left, right] = [link.start, link.end].map((time) => GUTTER + pixelAt(view, time));
    if (before === null) context.moveTo(left, y);
    else context.lineTo(left, y);
    context.lineTo(right, y);
    before = y;
  }
  context.stroke();
}

/** Outline the hovered op, the selected op and the op that it waited for, and draw the current moment of playback. */
function drawMarks(context, scene) {
  const { model, view, layout, scroll, theme, hover, selected, chain, cursor } = scene;
  const surface = SURFACES[theme];
  const outline = (op, color, line) => {
    const timeline = model.timelines[scene.timeline];
    const row = model.rowOf[op];
    const box = trackBox(layout, row, timeline.number, scroll);
    const talks = model.kindOf(op).communicates;
    const [left, right] = [timeline.starts[op], timeline.ends[op]].map((time) => GUTTER + pixelAt(view, time));
    if (right < GUTTER || left > GUTTER + view.width) return;
    context.strokeStyle = color;
    context.lineWidth = line;
    const [top, height] = talks ? [box.communicationTop, box.communication] : [box.top, box.compute];
    const lane = (talks ? timeline.communication : timeline.compute)[row];
    const at = lane.ops.indexOf(op);
    const [upper, lower] = at < 0 ? [0, 1] : [lane.upper[at], lane.lower[at]]; // an op that takes no time is in no lane
    context.strokeRect(left, top + height * upper, Math.max(2, right - left - 1), height * (lower - upper) - 1);
  };
  for (const op of chain) outline(op, surface.accent, 1.5);
  if (selected >= 0) outline(selected, surface.ink, 2.5);
  const gap = scene.gap ?? hover?.gap;
  if (gap) {
    const where = scene.gap ? scene.gapPlace : hover;
    const box = trackBox(layout, where.row, where.timeline, scroll);
    const [left, right] = [gap.start, gap.end].map((time) => GUTTER + pixelAt(view, time));
    context.strokeStyle = surface.accent;
    context.lineWidth = 1.5;
    context.setLineDash([4, 3]);
    context.strokeRect(left + 1, box.top + 1, Math.max(1, right - left - 2), box.compute - 2);
    context.setLineDash([]);
  }
  if (hover && hover.op >= 0 && hover.timeline === scene.timeline) outline(hover.op, surface.ink, 1.2);
  if (cursor !== null) {
    const x = GUTTER + pixelAt(view, cursor);
    context.fillStyle = surface.accent;
    context.fillRect(x - 0.75, 0, 1.5, layout.height);
  }
}

function drawAxis(context, scene) {
  const { model, view, theme } = scene;
  const surface = SURFACES[theme];
  context.fillStyle = surface.ground;
  context.fillRect(0, 0, GUTTER + view.width, AXIS - 2);
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const { step, ticks } = ticksOf(view);
  const digits = Math.max(4, Math.ceil(Math.log10(Math.max(view.to, step) / step)) + 1);
  for (const tick of ticks) {
    const x = GUTTER + pixelAt(view, tick);
    context.fillStyle = surface.line;
    context.fillRect(x, AXIS - 6, 1, 5);
    context.fillStyle = surface.faint;
    context.fillText(timeText(tick, model.header.unit, digits), Math.max(x, GUTTER + 16), AXIS / 2 - 3);
  }
}

function drawNames(context, scene) {
  const { model, layout, scroll, theme } = scene;
  const surface = SURFACES[theme];
  context.fillStyle = surface.ground;
  context.fillRect(0, 0, GUTTER - 1, layout.height);
  const size = Math.min(12, Math.max(9, layout.row - 2));
  context.font = `${size}px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const row of labelledRows(layout, scroll, scene.row)) {
    const box = trackBox(layout, row, 0, scroll);
    const middle = Math.max(box.top + (layout.row - 4) / 2, row === 0 && !scroll ? AXIS + size / 2 : 0);
    context.fillStyle = row === scene.row ? surface.accent : surface.faint;
    const short = shortName(model, row);
    if (model.timelines.length > 1 && layout.track >= 12) {
      model.timelines.forEach((timeline) => {
        const track = trackBox(layout, row, timeline.number, scroll);
        const name = timeline.number === 0 ? `${short} ${timeline.name.slice(0, 4)}.` : timeline.name;
        context.fillText(name, GUTTER - 8, track.top + layout.track / 2);
      });
    } else {
      context.fillText(short, GUTTER - 8, middle);
    }
  }
  context.fillStyle = surface.ground;
  context.fillRect(0, 0, GUTTER - 1, AXIS - 2);
  context.fillStyle = surface.line;
  context.fillRect(GUTTER - 1, 0, 1, layout.height);
}

const shortName = (model, row) => model.header.rows[row].name.replace(/ \(.*/, "");

/** Draw the memory of the selected row, and its name, by category over the same time axis. */
export function drawMemory(context, scene, height) {
  const { model, view, theme } = scene;
  const surface = SURFACES[theme];
  context.fillStyle = surface.ground;
  context.fillRect(0, 0, GUTTER + view.width, height);
  const timeline = model.timelines[scene.timeline];
  const memory = timeline.memory[scene.row];
  const top = Math.max(...model.timelines.map((each) => each.peak));
  if (!(top > 0)) {
    context.fillStyle = surface.faint;
    context.font = `12px ${FONT}`;
    context.textAlign = "left";
    context.fillText("Memory was not recorded.", GUTTER + 8, height / 2);
    return;
  }
  const base = height - 6;
  const scale = (base - 14) / top;
  const from = Math.max(0, firstAbove(memory.times, view.from) - 1);
  const to = Math.min(memory.times.length, firstAbove(memory.times, view.to) + 1);
  const below = new Float64Array(to - from);
  timeline.categories.forEach((category, number) => {
    const live = memory.live[number];
    context.fillStyle = (MEMORY[category] ?? KINDS.grey)[theme === "dark" ? 1 : 0];
    context.beginPath();
    const corner = (at) => {
      const x = GUTTER + Math.max(-2, Math.min(view.width + 2, pixelAt(view, memory.times[at])));
      const until = at + 1 < memory.times.length ? memory.times[at + 1] : timeline.end;
      return [x, GUTTER + Math.max(-2, Math.min(view.width + 2, pixelAt(view, until)))];
    };
    for (let at = from; at < to; at += 1) {
      const [x, right] = corner(at);
      const y = base - scale * (below[at - from] + live[at]);
      if (at === from) context.moveTo(x, y);
      else context.lineTo(x, y);
      context.lineTo(right, y);
    }
    for (let at = to - 1; at >= from; at -= 1) {
      const [x, right] = corner(at);
      const y = base - scale * below[at - from];
      context.lineTo(right, y);
      context.lineTo(x, y);
    }
    context.closePath();
    context.fill();
    for (let at = from; at < to; at += 1) below[at - from] += live[at];
  });
  const line = (amount, text) => {
    const y = base - scale * amount;
    context.fillStyle = surface.faint;
    context.fillRect(GUTTER, y, view.width, 0.6);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.font = `10px ${FONT}`;
    context.fillStyle = surface.ground;
    context.fillRect(0, y - 7, GUTTER - 2, 14);
    context.fillStyle = surface.faint;
    context.fillText(text, GUTTER - 6, y);
  };
  line(memory.peak, shortMemoryText(memory.peak, model.header.memory));
  context.fillStyle = surface.accent;
  context.font = `12px ${FONT}`;
  context.fillText(shortName(model, scene.row), GUTTER - 8, base - 8);
  context.fillStyle = surface.line;
  context.fillRect(GUTTER - 1, 0, 1, height);
  context.fillRect(GUTTER, base, view.width, 1);
  if (scene.cursor !== null) {
    context.fillStyle = surface.accent;
    context.fillRect(GUTTER + pixelAt(view, scene.cursor) - 0.75, 0, 1.5, height);
  }
}
