import assert from "node:assert/strict";
import { test } from "node:test";
import { random, script } from "./common.mjs";

const schedule = await script("schedule");

function randomRows(next) {
  return Array.from({ length: 1 + Math.floor(4 * next()) }, (_, rank) =>
    Array.from({ length: 1 + Math.floor(8 * next()) }, (_, at) => `${rank}${"FBIW"[Math.floor(4 * next())]}${at}`),
  );
}

test("rows that are written are read again", () => {
  const next = random(4);
  for (let time = 0; time < 100; time += 1) {
    const rows = randomRows(next);
    assert.deepEqual(schedule.parseRows(schedule.writeRows(rows)), rows);
  }
});

test("a move keeps the actions of every row, and moving back restores the order", () => {
  const next = random(5);
  for (let time = 0; time < 200; time += 1) {
    const rows = randomRows(next);
    const row = Math.floor(next() * rows.length);
    const [from, to] = [0, 0].map(() => Math.floor(next() * rows[row].length));
    const moved = schedule.moveAction(rows, row, from, to);
    assert.equal(moved[row][to], rows[row][from]);
    assert.deepEqual(moved.map((words) => words.toSorted()), rows.map((words) => words.toSorted()));
    assert.deepEqual(schedule.moveAction(moved, row, to, from), rows);
  }
});

test("undo goes back and redo forth, and a change forgets what was undone", () => {
  const history = new schedule.History("a");
  assert.equal(history.change("a"), false);
  history.change("b");
  history.change("c");
  assert.deepEqual([history.undo(), history.undo(), history.undo(), history.redo()], ["b", "a", "a", "b"]);
  history.change("d");
  assert.deepEqual([history.redo(), history.undo()], ["d", "b"]);
});

test("a link holds any text and its level", () => {
  for (const text of ["0F0,0B0\n", "async def f(rank):\n    ...  # ä → 漢 😀\n", "", "x".repeat(5000)]) {
    const found = schedule.textOfLink(schedule.linkOf("one_f_one_b", text));
    if (text) assert.deepEqual(found, { level: "one_f_one_b", text });
  }
  for (const wrong of ["", "#", "#level=x", "#text=abc", "#level=&text=%%%", "#level=&text=_"]) {
    assert.equal(schedule.textOfLink(wrong), null, wrong);
  }
});

test("the cell that a sentence blames is found", () => {
  const sentence = "row 2 (rank 1), column 3, 1B0: it needs 1F0, which comes only in column 4";
  assert.deepEqual(schedule.blamedCell(sentence), { row: 1, column: 2 });
  assert.equal(schedule.blamedCell("mine.py:3: nothing"), null);
});

test("actions are read by their parts", () => {
  assert.deepEqual(schedule.actionOf("12F3"), { stage: 12, kind: "F", microbatch: 3 });
  assert.equal(schedule.actionOf("0UNSHARD"), null);
});

test("a figure says by how much it differs from the start", () => {
  const text = (value) => value.toFixed(1);
  assert.equal(schedule.comparedText(10, 10, text), "10.0 (as at the start)");
  assert.equal(schedule.comparedText(8, 10, text), "8.0 (−2.0)");
  assert.equal(schedule.comparedText(null, 10, text), "–");
});
