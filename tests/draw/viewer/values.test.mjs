import assert from "node:assert/strict";
import { test } from "node:test";
import { opNamed, script, step } from "./common.mjs";

const values = await script("values");
const { opName } = await script("words");

const texts = (model, timeline, row, time) =>
  [...values.liveValues(model, timeline, row, time).keys()].map((value) => model.valueText(row, value));

test("a rank of FSDP holds its shard, and the whole layer only around its use", () => {
  const model = step("fsdp");
  const [timeline] = model.timelines;
  const forward = opNamed(model, 0, "forward 0 (layer 1)", opName);
  const during = texts(model, timeline, 0, (timeline.starts[forward] + timeline.ends[forward]) / 2);
  assert.ok(during.includes("weights[1]"), during.join("; "));
  assert.ok(during.includes("weights[1] (shard 0 of 4)"));
  assert.ok(!during.includes("weights[0]"), "the layer before was freed");
  assert.ok(during.includes("weights[3] (shard 0 of 4)"));
});

test("a result of communication is in flight until it has arrived", () => {
  const model = step("fsdp");
  const [timeline] = model.timelines;
  const gather = timeline.communication[0].ops[1];
  const [value] = model.valuesOf(gather, "output");
  const during = values.liveValues(model, timeline, 0, (timeline.starts[gather] + timeline.ends[gather]) / 2);
  assert.equal(during.get(value), true);
  const after = values.liveValues(model, timeline, 0, timeline.ends[gather]);
  assert.ok(after.get(value) === false || !after.has(value));
});

test("what a step leaves is the updated weights and optimizer states", () => {
  for (const name of ["gpipe", "fsdp"]) {
    const model = step(name);
    for (let row = 0; row < model.rows; row += 1) {
      const left = texts(model, model.timelines[0], row, 2 * model.end);
      assert.ok(left.length > 0);
      for (const text of left) assert.match(text, /^(weights|opt_states).*step 1\)$|^scalars/, text);
    }
  }
});

test("gradients sum one microbatch after the other", () => {
  const model = step("gpipe");
  const [timeline] = model.timelines;
  const summed = [];
  for (const moment of values.momentsOf(timeline)) {
    for (const [value] of values.liveValues(model, timeline, 2, moment)) {
      const { form, rows } = values.heldParts(model, model.specOf(2, value));
      if (form.kind === "grad_weights") summed.push(rows[0].length);
    }
  }
  assert.deepEqual([...new Set(summed)], [1, 2, 3, 4]);
});

test("moments are in order and begin with the start", () => {
  const moments = values.momentsOf(step("gpipe").timelines[0]);
  assert.equal(moments[0], 0);
  moments.slice(1).forEach((moment, at) => assert.ok(moment > moments[at]));
});

test("bits of a hexadecimal number of any length", () => {
  assert.deepEqual(values.bitsOf("0"), []);
  assert.deepEqual(values.bitsOf("5"), [0, 2]);
  assert.deepEqual(values.bitsOf(`1${"0".repeat(40)}`), [160]);
});

test("the areas of a picture do not overlap and lie inside it", () => {
  const boxes = [];
  for (let layer = 0; layer <= 4; layer += 1) {
    for (const [kind, part] of Object.entries(values.PARTS)) {
      if (part.half || layer < 4) boxes.push(values.areaOf(kind, layer, 4, 400, 100));
    }
  }
  boxes.forEach(([x0, y0, x1, y1], at) => {
    assert.ok(x0 >= 0 && y0 >= 0 && x1 <= 400.001 && y1 <= 100 && x1 > x0 && y1 > y0);
    for (const [u0, v0, u1, v1] of boxes.slice(at + 1)) {
      assert.ok(x1 <= u0 + 1e-9 || u1 <= x0 + 1e-9 || y1 <= v0 + 1e-9 || v1 <= y0 + 1e-9);
    }
  });
});
