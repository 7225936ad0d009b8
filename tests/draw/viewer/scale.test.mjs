import assert from "node:assert/strict";
import { test } from "node:test";
import { near, random, script } from "./common.mjs";

const scale = await script("scale");

function* views() {
  const next = random(1);
  for (let time = 0; time < 300; time += 1) {
    const end = 10 ** (8 * next() - 5);
    let view = scale.wholeView(end, 100 + 1500 * next());
    for (let step = 0; step < 4; step += 1) view = scale.zoomAt(view, next() * view.width, 0.4 + 4 * next());
    yield [view, next];
  }
}

test("zooming keeps the moment below the pointer, unless an end of the step is reached", () => {
  for (const [view, next] of views()) {
    const x = next() * view.width;
    const zoomed = scale.zoomAt(view, x, 1.2 + next());
    assert.ok(near(scale.timeAt(view, x) / view.end, scale.timeAt(zoomed, x) / view.end, 1e-9));
    const back = scale.zoomAt(view, x, 0.9);
    const inner = back.from > 0 && back.to < back.end;
    if (inner) assert.ok(near(scale.timeAt(view, x) / view.end, scale.timeAt(back, x) / view.end, 1e-9));
  }
});

test("a view never leaves the step, however far it is moved", () => {
  for (const [view, next] of views()) {
    for (const moved of [scale.panBy(view, 1e5 * (next() - 0.5)), scale.zoomAt(view, 10, next()), scale.showInterval(view, next() * view.end, view.end)]) {
      assert.ok(moved.from >= 0 && moved.to <= moved.end * (1 + 1e-12) && moved.to > moved.from);
    }
  }
});

test("pixels and moments are inverse to each other", () => {
  for (const [view, next] of views()) {
    const x = next() * view.width;
    assert.ok(Math.abs(scale.pixelAt(view, scale.timeAt(view, x)) - x) < 1e-4);
  }
});

test("panning by a pixel moves the picture by a pixel", () => {
  const view = { from: 20, to: 40, width: 500, end: 100 };
  assert.ok(near(scale.pixelAt(scale.panBy(view, 30), 30), scale.pixelAt(view, 30) - 30));
});

test("zooming all the way out shows the whole step", () => {
  for (const [view] of views()) {
    const out = scale.zoomAt(view, view.width / 3, 1e-12);
    assert.deepEqual([out.from, out.to], [0, view.end]);
  }
});

test("a moment that is shown is in the view", () => {
  for (const [view, next] of views()) {
    const time = next() * view.end;
    const shown = scale.showMoment(view, time);
    assert.ok(shown.from <= time * (1 + 1e-9) && time <= shown.to * (1 + 1e-9));
    assert.ok(near(shown.to - shown.from, view.to - view.from, 1e-6));
  }
});

test("ticks are round, in the view, and as far apart as was asked for", () => {
  for (const [view] of views()) {
    const { step, ticks } = scale.ticksOf(view, 80);
    const lead = step / 10 ** Math.floor(Math.log10(step) + 1e-9);
    assert.ok([1, 2, 5, 10].some((each) => near(each, lead, 1e-6)), `${step}`);
    assert.ok((step / (view.to - view.from)) * view.width >= 79);
    for (const tick of ticks) assert.ok(tick >= view.from - 1e-9 * view.end && tick <= view.to && !Object.is(tick, -0));
  }
});

test("times and amounts are written with a unit that fits", () => {
  assert.equal(scale.timeText(17.2, ""), "17.2");
  assert.equal(scale.timeText(0.00123456, "s"), "1.235 ms");
  assert.equal(scale.timeText(2.5e-6, "s"), "2.5 µs");
  assert.equal(scale.timeText(3, "s"), "3 s");
  assert.equal(scale.memoryText(1835008, "elements"), "1,835,008 elements");
  assert.equal(scale.memoryText(3 * 2 ** 30, "bytes"), "3 GiB");
  assert.equal(scale.memoryText(100, "bytes"), "100 bytes");
  assert.equal(scale.shortMemoryText(1835008, "elements"), "1.84 M");
});
