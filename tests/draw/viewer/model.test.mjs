import assert from "node:assert/strict";
import { test } from "node:test";
import { near, opNamed, script, step } from "./common.mjs";

const { parseTables } = await script("model");
const { opName } = await script("words");

test("lanes have each op that takes time once, in order", () => {
  for (const name of ["gpipe", "fsdp", "two", "trace"]) {
    const model = step(name);
    for (const timeline of model.timelines) {
      const shown = [...timeline.compute, ...timeline.communication].flatMap((lane) => [...lane.ops]);
      const timed = [...timeline.ends.keys()].filter((op) => timeline.ends[op] > timeline.starts[op]);
      assert.deepEqual(shown.toSorted((one, other) => one - other), timed);
      for (const lane of timeline.compute) {
        lane.starts.slice(1).forEach((start, at) => assert.ok(start >= lane.starts[at]));
      }
    }
  }
});

test("the critical path is unbroken, from the start of the step to its end", () => {
  for (const name of ["gpipe", "fsdp", "pipeline"]) {
    const model = step(name);
    const [timeline] = model.timelines;
    assert.ok(near(timeline.path[0].start, 0) && near(timeline.path.at(-1).end, timeline.end, 1e-6));
    timeline.path.slice(1).forEach((link, at) => assert.ok(near(link.start, timeline.path[at].end, 1e-9)));
  }
});

test("the path by causes is as long as the one that Python found", () => {
  for (const name of ["gpipe", "fsdp", "pipeline"]) {
    const model = step(name);
    const [timeline] = model.timelines;
    const path = model.pathByCauses(timeline);
    assert.ok(near(path[0].start, 0) && near(path.at(-1).end, timeline.end, 1e-6));
    path.slice(1).forEach((link, at) => assert.ok(near(link.start, path[at].end, 1e-9)));
  }
});

test("dependencies go both ways", () => {
  for (const name of ["gpipe", "fsdp"]) {
    const model = step(name);
    for (let op = 0; op < model.columns.kind.length; op += 1) {
      if ([model.header.special.free, model.header.special.wait].includes(model.columns.kind[op])) continue;
      const { before } = model.dependenciesOf(op);
      for (const other of before) {
        const back = model.dependenciesOf(other);
        assert.ok([...back.after, ...back.before].includes(op), `${opName(model, op)} and ${opName(model, other)}`);
      }
    }
  }
});

test("a forward pass needs the weight and the activation that it reads", () => {
  const model = step("gpipe");
  const { before, after } = model.dependenciesOf(opNamed(model, 1, "forward 2 (layer 1)", opName));
  assert.deepEqual(before.map((op) => opName(model, op)).toSorted(), ["load-weight (layer 1)", "receive 2 from rank 0 (layer 1)"].toSorted());
  assert.ok(after.some((op) => opName(model, op) === "send 2 to rank 2 (layer 2)"));
});

test("tables of another format are refused", () => {
  const head = new TextEncoder().encode('{"format":0,"columns":{}}    ');
  const bytes = new Uint8Array(4 + head.length);
  new DataView(bytes.buffer).setUint32(0, head.length, true);
  bytes.set(head, 4);
  assert.throws(() => parseTables(bytes.buffer), /format 0, but its scripts read format/);
});
