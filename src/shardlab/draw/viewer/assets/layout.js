// Positions of rows and lanes on the canvas, the item below the pointer, and the ops that are visible.
//
// A row has a track for each timeline, one below the other, and a track has a lane for compute and a flatter one for
// communication below it.

import { pixelAt, timeAt } from "./scale.js";

/** Height of the time axis above the rows. */
export const AXIS = 26;

/** Smallest and largest height of a track in pixels. */
const LOWEST = 6;
const HIGHEST = 44;

/** Height of a row's label in pixels. */
const LABEL = 11;

/** Height of the compute lane as a share of its track. */
const COMPUTE = 0.62;

/** Number of boxes per pixel above which a lane is drawn as a strip of pixels. */
const CROWDED = 0.2;

/** Distance in pixels from a box at which the pointer still hits it. */
const NEAR = 2;

/** Positions of all rows for a height of the canvas. */
export function layoutOf(rows, timelines, height) {
  const free = Math.max(0, height - AXIS);
  const track = Math.min(HIGHEST, Math.max(LOWEST, Math.floor((free / Math.max(1, rows) - 1) / timelines)));
  const gap = track >= 14 ? 4 : 1;
  const row = track * timelines + gap;
  return { rows, timelines, track, gap, row, height, total: rows * row + AXIS, most: Math.max(0, rows * row - free) };
}

/** Top and heights of a track if the rows are scrolled by some pixels. */
export function trackBox(layout, row, timeline, scroll) {
  const top = AXIS + row * layout.row - scroll + timeline * layout.track;
  const inner = layout.track - (layout.track > 10 ? 2 : 0);
  const compute = Math.round(inner * COMPUTE);
  return { top, compute, communicationTop: top + compute, communication: inner - compute };
}

/** First and last row that is visible. */
export function visibleRows(layout, scroll) {
  const first = Math.max(0, Math.floor(scroll / layout.row));
  const last = Math.min(layout.rows - 1, Math.floor((scroll + layout.height - AXIS) / layout.row));
  return [first, last];
}

/** Rows that have a label: the selected one, and as many others as do not overlap it or each other. */
export function labelledRows(layout, scroll, selected) {
  const [first, last] = visibleRows(layout, scroll);
  const every = Math.max(1, Math.ceil(LABEL / layout.row));
  const rows = [];
  for (let row = first; row <= last; row += 1) {
    if (row === selected || (row % every === 0 && Math.abs(row - selected) >= every)) rows.push(row);
  }
  return rows;
}

/** First entry of a sorted array that is above a value. */
export function firstAbove(values, value) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Range of a lane's ops that may be visible between two moments. */
export function visibleRange(lane, from, to) {
  return [firstAbove(lane.reach, from), firstAbove(lane.starts, to)];
}

/** Whether a lane has too many visible ops to draw a box for each. */
export function isCrowded(lane, view) {
  const [first, last] = visibleRange(lane, view.from, view.to);
  return last - first > CROWDED * view.width;
}

/**
 * Add up the colours of a lane's ops by pixel: red, green, blue and the covered share of each pixel.
 *
 * An op that is narrower than a pixel counts by its width, so that a crowded pixel has the mean colour of its ops.
 */
export function coverPixels(lane, view, colorOf, rgb, cover) {
  cover.fill(0);
  const scale = view.width / (view.to - view.from);
  const [first, last] = visibleRange(lane, view.from, view.to);
  for (let at = first; at < last; at += 1) {
    const left = Math.max(0, (lane.starts[at] - view.from) * scale);
    const right = Math.min(view.width, (lane.ends[at] - view.from) * scale);
    if (right <= left) continue;
    const color = 3 * colorOf[lane.ops[at]];
    for (let pixel = Math.floor(left); pixel < right; pixel += 1) {
      const share = Math.min(right, pixel + 1) - Math.max(left, pixel);
      cover[4 * pixel] += share * rgb[color];
      cover[4 * pixel + 1] += share * rgb[color + 1];
      cover[4 * pixel + 2] += share * rgb[color + 2];
      cover[4 * pixel + 3] += share;
    }
  }
  return cover;
}

/** Blend covered pixels with a background, and write them into a row of RGBA bytes. */
export function writePixels(cover, width, background, bytes, offset) {
  for (let pixel = 0; pixel < width; pixel += 1) {
    const share = cover[4 * pixel + 3];
    const times = share > 1 ? 1 / share : 1;
    const free = share > 1 ? 0 : 1 - share;
    for (let part = 0; part < 3; part += 1) {
      bytes[offset + 4 * pixel + part] = cover[4 * pixel + part] * times + background[part] * free;
    }
    bytes[offset + 4 * pixel + 3] = 255;
  }
}

/** Item below a pixel: its row, its timeline, and the op or the gap; null outside of the rows. */
export function hitTest(model, view, layout, scroll, x, y) {
  const place = y - AXIS + scroll;
  const row = Math.floor(place / layout.row);
  if (y < AXIS || row < 0 || row >= layout.rows || x < 0 || x > view.width) return null;
  const number = Math.min(layout.timelines - 1, Math.floor((place - row * layout.row) / layout.track));
  const timeline = model.timelines[number];
  const box = trackBox(layout, row, number, scroll);
  const inCompute = y < box.communicationTop;
  const lane = (inCompute ? timeline.compute : timeline.communication)[row];
  const [top, height] = inCompute ? [box.top, box.compute] : [box.communicationTop, box.communication];
  const op = opAt(lane, view, x, (y - top) / height);
  const time = timeAt(view, x);
  const gap = op < 0 && inCompute ? gapAt(timeline.compute[row], time, timeline.end) : null;
  return { row, timeline: number, op, gap, time };
}

/** Shortest op of a lane at or very near a pixel, at a height from 0 (the lane's top) to 1; -1 if there is none. */
export function opAt(lane, view, x, height) {
  const time = timeAt(view, x);
  const near = timeAt(view, x + NEAR) - time;
  const [first, last] = visibleRange(lane, time - near, time + near);
  let [found, best] = [-1, Infinity];
  for (let at = first; at < last; at += 1) {
    if (lane.ends[at] < time - near || lane.starts[at] > time + near) continue;
    if (height < lane.upper[at] || height > lane.lower[at]) continue;
    const away = Math.max(0, lane.starts[at] - time, time - lane.ends[at]);
    const length = lane.ends[at] - lane.starts[at];
    const rank = away > 0 ? 1e9 * (1 + pixelAt(view, view.from + away)) : length;
    if (rank < best) [found, best] = [lane.ops[at], rank];
  }
  return found;
}

/** Interval around a moment in which a row does not compute, and the op that ends it (-1: the end of the step). */
export function gapAt(lane, time, end) {
  if (time < 0 || time > end) return null;
  const next = firstAbove(lane.starts, time);
  const start = next > 0 ? lane.reach[next - 1] : 0;
  const gap = { start, end: next < lane.starts.length ? lane.starts[next] : end, before: -1 };
  if (next < lane.starts.length) gap.before = lane.ops[next];
  return time >= start && gap.end > start ? gap : null;
}
