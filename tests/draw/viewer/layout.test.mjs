import assert from "node:assert/strict";
import { test } from "node:test";
import { random, script, step } from "./common.mjs";

const layout = await script("layout");
const { laneFrom } = await script("model");
const { wholeView, zoomAt, pixelAt } = await script("scale");
const { colorNumbers, paletteOf } = await script("colors");

/** A lane of random ops, which may overlap. */
function randomLane(next, count, end) {
  const spans = Array.from({ length: count }, () => {
    const start = next() * end;
    return [start, Math.min(end, start + next() ** 4 * end)];
  }).sort((one, other) => one[0] - other[0]);
  return laneFrom(spans.map((_, at) => at), spans.map(([start]) => start), spans.map(([, stop]) => stop));
}

test("ops that overlap have different parts of their lane, and each is found there", () => {
  const lane = laneFrom([0, 1, 2, 3], [0, 0, 2, 5], [3, 2, 4, 6]);
  assert.deepEqual([...lane.upper], [0, 0.5, 0.5, 0]);
  assert.deepEqual([...lane.lower], [0.5, 1, 1, 1]);
  const view = { from: 0, to: 10, width: 1000 };
  const found = [0.2, 0.8].map((height) => [1, 2.5, 5.5].map((time) => layout.opAt(lane, view, 100 * time, height)));
  assert.deepEqual(found, [[0, 0, 3], [1, 2, 3]]);
});

test("labels of rows do not overlap, and the selected row has one", () => {
  for (const [rows, height] of [[4, 500], [64, 500], [64, 300], [200, 900]]) {
    const places = layout.layoutOf(rows, 1, height);
    for (const selected of [0, 1, 2, 5, rows - 1]) {
      for (const scroll of [0, places.most]) {
        const labelled = layout.labelledRows(places, scroll, selected);
        const [first, last] = layout.visibleRows(places, scroll);
        assert.equal(labelled.includes(selected), first <= selected && selected <= last);
        labelled.slice(1).forEach((row, at) => assert.ok((row - labelled[at]) * places.row >= 11));
        assert.ok(labelled.length * 33 >= (last - first) * Math.min(11, places.row));
      }
    }
  }
});

test("the visible range has every op that overlaps the view", () => {
  const next = random(2);
  for (let time = 0; time < 200; time += 1) {
    const lane = randomLane(next, 60, 10);
    const from = 10 * next();
    const to = from + next() ** 2 * (10 - from);
    const [first, last] = layout.visibleRange(lane, from, to);
    for (let at = 0; at < lane.ops.length; at += 1) {
      if (lane.ends[at] > from && lane.starts[at] < to) assert.ok(at >= first && at < last);
    }
    assert.ok(first >= last || lane.reach[first] > from);
  }
});

test("the pixels of a crowded lane are covered by as much time as its ops take", () => {
  const next = random(3);
  const rgb = Uint8Array.from([255, 0, 0, 0, 255, 0]);
  for (let time = 0; time < 100; time += 1) {
    const end = 1 + 100 * next();
    const lane = randomLane(next, 400, end);
    let view = wholeView(end, 64);
    if (time % 2) view = zoomAt(view, 64 * next(), 1 + 9 * next());
    const colors = Uint16Array.from(lane.ops, () => (next() < 0.5 ? 0 : 1));
    const cover = layout.coverPixels(lane, view, colors, rgb, new Float32Array(4 * 65));
    let covered = 0;
    for (let pixel = 0; pixel < 64; pixel += 1) covered += cover[4 * pixel + 3];
    let expected = 0;
    for (let at = 0; at < lane.ops.length; at += 1) {
      expected += Math.max(0, Math.min(lane.ends[at], view.to) - Math.max(lane.starts[at], view.from));
    }
    const share = (view.to - view.from) / 64;
    assert.ok(Math.abs(covered * share - expected) <= 1e-4 * Math.max(expected, 1), `${covered * share} ${expected}`);
  }
});

test("a pixel that nothing covers has the colour of the ground, and one that is covered that of its op", () => {
  const lane = laneFrom([0, 1], [0, 5], [2, 5.5]);
  const cover = layout.coverPixels(lane, wholeView(10, 10), Uint16Array.from([0, 1]), Uint8Array.from([200, 0, 0, 0, 100, 0]), new Float32Array(44));
  const bytes = new Uint8ClampedArray(40);
  layout.writePixels(cover, 10, [10, 20, 30], bytes, 0);
  assert.deepEqual([...bytes.slice(0, 4)], [200, 0, 0, 255]);
  assert.deepEqual([...bytes.slice(12, 16)], [10, 20, 30, 255]);
  assert.deepEqual([...bytes.slice(20, 24)], [5, 60, 15, 255]);
});

test("a lane is crowded if it has many ops in the view, and not once the view is narrow", () => {
  const starts = Array.from({ length: 5000 }, (_, at) => at);
  const lane = laneFrom(starts, starts, starts.map((at) => at + 0.9));
  assert.ok(layout.isCrowded(lane, wholeView(5000, 1000)));
  assert.ok(!layout.isCrowded(lane, { from: 100, to: 150, width: 1000, end: 5000 }));
});

for (const name of ["gpipe", "fsdp", "two"]) {
  test(`every op of ${name} is hit in its middle, and no gap is hit as an op`, () => {
    const model = step(name);
    const height = 520;
    const places = layout.layoutOf(model.rows, model.timelines.length, height);
    const view = wholeView(model.end, 1000);
    for (const timeline of model.timelines) {
      for (let row = 0; row < model.rows; row += 1) {
        const box = layout.trackBox(places, row, timeline.number, 0);
        for (const [lane, top, height] of [
          [timeline.compute[row], box.top, box.compute],
          [timeline.communication[row], box.communicationTop, box.communication],
        ]) {
          for (const [at, op] of lane.ops.entries()) {
            const y = top + (height * (lane.upper[at] + lane.lower[at])) / 2;
            const x = pixelAt(view, (timeline.starts[op] + timeline.ends[op]) / 2);
            const hit = layout.hitTest(model, view, places, 0, x, y);
            assert.equal(hit.row, row);
            assert.equal(hit.timeline, timeline.number);
            const shown = [timeline.starts[hit.op], timeline.ends[hit.op]];
            assert.ok(hit.op === op || shown[1] - shown[0] <= timeline.ends[op] - timeline.starts[op]);
          }
        }
      }
    }
  });
}

test("a click between two passes finds the gap and the op that ends it", () => {
  const model = step("gpipe");
  const lane = model.timelines[0].compute[0];
  const last = lane.ops.findIndex((op) => model.kindOf(op).pass === "backward");
  const gap = layout.gapAt(lane, (lane.ends[last - 1] + lane.starts[last]) / 2, model.end);
  assert.deepEqual([gap.start, gap.end, gap.before], [lane.ends[last - 1], lane.starts[last], lane.ops[last]]);
  assert.equal(layout.gapAt(lane, lane.starts[0] + 0.01, model.end), null);
});

test("rows and timelines do not overlap, and all of 64 ranks fit on a screen", () => {
  for (const [rows, timelines, height] of [[4, 1, 500], [64, 1, 520], [8, 2, 400], [200, 1, 500]]) {
    const places = layout.layoutOf(rows, timelines, height);
    let below = layout.AXIS;
    for (let row = 0; row < rows; row += 1) {
      for (let number = 0; number < timelines; number += 1) {
        const box = layout.trackBox(places, row, number, 0);
        assert.ok(box.top >= below && box.compute > 0 && box.communication >= 0);
        below = box.communicationTop + box.communication;
      }
    }
    assert.ok(below <= layout.AXIS + rows * places.row);
  }
  assert.equal(layout.layoutOf(64, 1, 520).most, 0);
});

test("only visible rows are drawn", () => {
  const places = layout.layoutOf(200, 1, 300);
  const [first, last] = layout.visibleRows(places, 50 * places.row);
  assert.ok(first === 50 && last < 200 && last - first <= 300 / places.row + 1);
});

test("a frame of 64 ranks with 32 microbatches visits each visible op once", () => {
  const model = step("large");
  assert.equal(model.rows, 64);
  const numbers = colorNumbers(model, "kind");
  const { rgb } = paletteOf(model, "kind", "light");
  const cover = new Float32Array(4 * 1001);
  const frame = (view) => {
    let visited = 0;
    for (const timeline of model.timelines) {
      for (const lane of [...timeline.compute, ...timeline.communication]) {
        const [first, last] = layout.visibleRange(lane, view.from, view.to);
        visited += last - first;
        if (layout.isCrowded(lane, view)) layout.coverPixels(lane, view, numbers, rgb, cover);
      }
    }
    return visited;
  };
  const whole = wholeView(model.end, 1000);
  const all = model.timelines[0].compute.concat(model.timelines[0].communication).reduce((sum, lane) => sum + lane.ops.length, 0);
  assert.equal(frame(whole), all);
  assert.ok(all > 64 * 32 * 2);
  assert.ok(frame(zoomAt(whole, 500, 100)) < all / 20);
});
