import assert from "node:assert/strict";
import { test } from "node:test";
import { script, step } from "./common.mjs";

const { figureRows, percent } = await script("figures");

test("a share is rounded to tenths as the terminal rounds it", () => {
  const shares = [0, 1 / 3, 0.0625, 0.1875, 0.08125, 0.9999, -0.0625];
  assert.deepEqual(shares.map(percent), ["0.0 %", "33.3 %", "6.2 %", "18.8 %", "8.1 %", "100.0 %", "-6.2 %"]);
});

test("the table has the six figures", () => {
  const labels = figureRows(step("gpipe")).map((row) => row.label);
  for (const label of ["compute", "exposed communication", "overlap", "idle", "bubble", "bubble with communication", "closed form", "straggler"]) {
    assert.ok(labels.includes(label), label);
  }
});

test("shares of compute, exposed communication and idle time add up to the step", () => {
  for (const name of ["gpipe", "fsdp", "two", "trace"]) {
    for (const { figures } of step(name).timelines) {
      const idle = Object.values(figures.idle).reduce((sum, share) => sum + share, 0);
      assert.ok(Math.abs(figures.compute + figures.exposed_communication + idle - 1) < 1e-6);
    }
  }
});

test("a second timeline has a column and a difference, with its sign", () => {
  const rows = figureRows(step("two"));
  const row = rows.find((each) => each.label === "step");
  assert.equal(row.values.length, 2);
  assert.match(row.difference, /^\+/);
});

test("a straggler has the name of its row, and equal ranks have none", () => {
  const model = step("gpipe");
  const last = () => figureRows(model).at(-1);
  assert.deepEqual([last().label, last().values], ["straggler", ["none"]]);
  model.timelines[0].figures.straggler = { row: 1, excess: 0.125 };
  assert.deepEqual([last().label, last().values], ["straggler: rank 1", ["+12.5 %"]]);
});

test("without communication there is no overlap", () => {
  const model = step("fsdp");
  model.timelines[0].figures.overlap = null;
  assert.deepEqual(figureRows(model).find((row) => row.label === "overlap").values, ["no communication"]);
});

test("without a pipeline there is no bubble", () => {
  assert.ok(!figureRows(step("fsdp")).some((row) => row.label.startsWith("bubble")));
});
