import assert from "node:assert/strict";
import { test } from "node:test";
import { opNamed, script, step } from "./common.mjs";

const words = await script("words");

for (const name of ["gpipe", "fsdp", "two", "trace"]) {
  test(`every op of ${name} has a chain of causes that goes back in time to the start of the step`, () => {
    const model = step(name);
    for (const timeline of model.timelines) {
      for (const lane of [...timeline.compute, ...timeline.communication]) {
        for (const op of lane.ops) {
          const links = words.chainOf(model, timeline, op);
          const ops = [op, ...links.map((link) => link.op)];
          assert.equal(ops.at(-1), -1, words.opName(model, op));
          for (let at = 1; at < ops.length - 1; at += 1) {
            const tolerance = 1e-6 * model.end;
            assert.ok(timeline.starts[ops[at]] <= timeline.starts[ops[at - 1]] + tolerance);
          }
          for (const link of links) assert.match(link.sentence, /^[A-Z].*\.$/);
        }
      }
    }
  });
}

test("the chain of a backward pass leads through the messages to the last rank", () => {
  const model = step("gpipe");
  const [timeline] = model.timelines;
  const op = opNamed(model, 0, "backward 0 (layer 0)", words.opName);
  const links = words.chainOf(model, timeline, op);
  assert.match(links[0].sentence, /^Rank 0 waited for receive 0 from rank 1 \(layer 1\), which ended at /);
  assert.match(links[1].sentence, /^The sender, rank 1, came to it at /);
  assert.match(links[2].sentence, /^Rank 1 computed backward 0 \(layer 1\) until /);
  assert.ok(links.some((link) => link.op >= 0 && model.rowOf[link.op] === 3));
});

test("a gap says which op cannot begin, and which rank it waits for", () => {
  const model = step("gpipe");
  const [timeline] = model.timelines;
  const before = opNamed(model, 0, "backward 0 (layer 0)", words.opName);
  const sentences = words.gapSentences(model, timeline, 0, { start: 4, end: timeline.starts[before], before });
  assert.match(sentences[0], /^This gap of .* exists because rank 0 cannot begin backward 0 \(layer 0\) earlier\.$/);
  assert.match(sentences.at(-1), /^Rank 1 computed backward 0 \(layer 1\) until /);
});

test("a rank that has done everything says where the step goes on", () => {
  const model = step("pipeline");
  const [timeline] = model.timelines;
  const row = model.timelines[0].figures.ranks.findIndex((rank) => rank.idle_by_cause["has ended"] > 0);
  const end = timeline.compute[row].ends.at(-1);
  const sentences = words.gapSentences(model, timeline, row, { start: end, end: model.end, before: -1 });
  assert.match(sentences[0], /has done everything/);
  assert.match(sentences.at(-1), /^The step ends with /);
});

test("an op says what it reads and makes, and its line of the program", () => {
  const model = step("fsdp");
  const facts = new Map(words.factsOf(model, model.timelines[0], opNamed(model, 1, "forward 1 (layer 0)", words.opName)));
  assert.equal(facts.get("reads"), "activations[0] (microbatch 1), weights[0]");
  assert.match(facts.get("makes"), /^activations\[1\] \(microbatch 1\)/);
  assert.match(facts.get("line"), /^shardlab\/strategies\/fsdp\.py:\d+$/);
});

test("a measured op says by how much it differs from the prediction", () => {
  const model = step("two");
  const op = model.timelines[1].compute[0].ops[0];
  const facts = new Map(words.factsOf(model, model.timelines[1], op));
  assert.match(facts.get("predicted"), /long; measured [+-]/);
});

test("names have the peer of a message and the group of a collective", () => {
  const gpipe = step("gpipe");
  assert.equal(words.opName(gpipe, opNamed(gpipe, 0, "send 2 to rank 1 (layer 1)", words.opName)), "send 2 to rank 1 (layer 1)");
  const fsdp = step("fsdp");
  const gather = [...fsdp.timelines[0].communication[2].ops][0];
  assert.match(words.placedName(fsdp, gather), /^all-gather .*\(layer 0\) of rank 2$/);
});
