// Values that each rank holds at a moment, and their picture: a network in which the held parts are filled.
//
// A value lives from the end of the op that made it (a result of communication: from its start, in flight until its
// end) to the op that frees it. Between the layers are columns of activations and of their gradients, with a row for
// each microbatch. A layer's box has its weights, its gradient and its optimizer state, cut into the slices of ranks.

import { KINDS, SURFACES } from "./colors.js";

/** Kinds of value in the picture, each with its colour and its part of a layer's box or column. */
export const PARTS = {
  weights: { color: "blue", band: [0, 0.3] },
  grad_weights: { color: "red", band: [0.34, 0.78] },
  opt_states: { color: "light blue", band: [0.82, 1] },
  activations: { color: "teal", half: [0, 0.48] },
  grad_activations: { color: "orange", half: [0.52, 1] },
};

/** Largest number of microbatches for which the rows of a column are ruled. */
const RULED = 32;

/** Values of a row that are live at a moment: their numbers, and whether each is still in flight. */
export function liveValues(model, timeline, row, time) {
  const { kind, rowStart, input, inputStart, output, outputStart } = model.columns;
  const live = new Map();
  for (let op = rowStart[row]; op < rowStart[row + 1]; op += 1) {
    const about = model.kinds[kind[op]];
    const timed = timeline.ends[op] >= timeline.starts[op];
    const begins = about.communicates || !timed ? timeline.reached[op] : timeline.ends[op];
    if (timeline.reached[op] > time) break;
    if (begins > time) continue;
    for (let at = outputStart[op]; at < outputStart[op + 1]; at += 1) {
      live.set(output[at], about.communicates && timeline.ends[op] > time);
    }
    for (const place of about.ends) live.delete(input[inputStart[op] + place]);
  }
  return live;
}

/** Moments at which an op begins or ends, in order: the steps of playback. */
export function momentsOf(timeline) {
  const moments = new Set([0]);
  for (let op = 0; op < timeline.ends.length; op += 1) {
    if (timeline.ends[op] > timeline.starts[op]) {
      moments.add(timeline.starts[op]);
      moments.add(timeline.ends[op]);
    }
  }
  return Float64Array.from(moments).sort();
}

/** Numbers of the set bits of a hexadecimal text. */
export function bitsOf(hex) {
  const bits = [];
  for (let at = 0; at < hex.length; at += 1) {
    const digit = Number.parseInt(hex[hex.length - 1 - at], 16);
    for (let bit = 0; bit < 4; bit += 1) if (digit & (1 << bit)) bits.push(4 * at + bit);
  }
  return bits;
}

/** Parts of its area that a value holds: columns and rows, each as [numbers, total]. */
export function heldParts(model, spec) {
  const { specForm, specCells } = model.columns;
  const form = model.header.forms[specForm[spec]];
  const cells = bitsOf(model.header.cells[specCells[spec]]);
  const microbatches = model.header.microbatches;
  let columns = [[0], 1];
  let rows = [[0], 1];
  if (PARTS[form.kind]?.half) {
    rows = [cells, microbatches * form.sequence];
    if (form.slices) columns = [bitsOf(form.slices[0]), form.slices[1]];
  } else {
    columns = [bitsOf(form.holds[0]), form.holds[1]];
  }
  if (form.kind === "grad_weights") {
    const summed = cells.map((cell) => Math.floor((cell % form.uses) / form.sequence));
    rows = [[...new Set(summed)], microbatches];
  }
  return { form, columns, rows };
}

/** Area of a kind of value at a layer, inside a picture of `width` by `height` pixels. */
export function areaOf(kind, layer, layers, width, height) {
  const pitch = width / (layers + 0.28);
  const column = 0.28 * pitch;
  const left = layer * pitch;
  const part = PARTS[kind];
  if (part.half) return [left + part.half[0] * column, 0, left + part.half[1] * column, height];
  const gap = Math.min(3, 0.1 * pitch);
  return [left + column + gap, part.band[0] * height, left + pitch - gap, part.band[1] * height];
}

/** Draw the values of a row into a box of a canvas. */
export function drawValues(context, model, row, live, box, theme) {
  const surface = SURFACES[theme];
  const [left, top, width, height] = box;
  const count = model.header.programLayers;
  context.fillStyle = surface.idle;
  for (let layer = 0; layer <= count; layer += 1) {
    for (const [kind, part] of Object.entries(PARTS)) {
      if (!part.half && layer === count) continue;
      const [x0, y0, x1, y1] = areaOf(kind, layer, count, width, height);
      context.fillRect(left + x0, top + y0, x1 - x0, y1 - y0);
    }
  }
  for (const [value, flies] of live) {
    const { form, columns, rows } = heldParts(model, model.specOf(row, value));
    const part = PARTS[form.kind];
    if (!part || form.layer > count) continue;
    const [x0, y0, x1, y1] = areaOf(form.kind, form.layer, count, width, height);
    const [wide, high] = [(x1 - x0) / columns[1], (y1 - y0) / rows[1]];
    const space = rows[1] <= RULED && high > 3 ? 0.5 : 0;
    context.fillStyle = KINDS[part.color][theme === "dark" ? 1 : 0];
    context.globalAlpha = flies ? 0.4 : form.partial ? 0.65 : 1;
    for (const column of columns[0]) {
      for (const line of rows[0]) {
        context.fillRect(left + x0 + column * wide, top + y0 + line * high, Math.max(0.7, wide - space), Math.max(0.7, high - space));
      }
    }
  }
  context.globalAlpha = 1;
}
