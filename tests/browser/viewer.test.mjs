import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { startChromium } from "./chromium.mjs";

let chromium;
before(async () => (chromium = await startChromium()));
after(() => chromium.close());

const GUTTER = 96;

async function open(name, theme = "light") {
  const page = await chromium.open(`file://${join(process.env.SHARDLAB_PAGES, `${name}.html`)}`);
  await page.prefer(theme);
  await page.until("!!globalThis.shardlabViewer?.scene.model");
  await page.settled();
  return page;
}

const text = (page, id) => page.evaluate(`document.getElementById("${id}").innerText`);

/** Pixel in the middle of an op, as an expression of the page that gives its number. */
const pixelOf = (page, op) =>
  page.evaluate(`(() => {
    const { scene } = shardlabViewer;
    const op = ${op};
    const timeline = scene.model.timelines[scene.timeline];
    const box = trackBox(scene.layout, scene.model.rowOf[op], timeline.number, scene.scroll);
    const x = pixelAt(scene.view, (timeline.starts[op] + timeline.ends[op]) / 2);
    const stage = document.getElementById("stage").getBoundingClientRect();
    const talks = scene.model.kindOf(op).communicates;
    return [stage.x + ${GUTTER} + x, stage.y + (talks ? box.communicationTop + box.communication / 2 : box.top + box.compute / 2)];
  })()`.replaceAll("trackBox(", "shardlabViewer.tools.trackBox(").replaceAll("pixelAt(", "shardlabViewer.tools.pixelAt("));

const firstBackward = "shardlabViewer.scene.model.timelines[0].compute[0].ops.find((op) => shardlabViewer.scene.model.kindOf(op).pass === 'backward')";

for (const name of ["gpipe", "fsdp", "two", "large", "trace"]) {
  test(`the page of ${name} opens without an error and loads nothing`, async () => {
    const page = await open(name);
    assert.deepEqual(page.errors, []);
    assert.equal(page.requests.filter((url) => !url.startsWith("data:")).length, 1);
    assert.match(await text(page, "figures"), /compute/);
    assert.ok(await page.evaluate("shardlabViewer.frames.length > 0"));
  });
}

test("hovering an op tells what it reads, makes and needs, and its line", async () => {
  const page = await open("fsdp");
  const op = "shardlabViewer.scene.model.timelines[0].compute[1].ops[0]";
  await page.mouse("mouseMoved", ...(await pixelOf(page, op)));
  await page.settled();
  const tip = await text(page, "tip");
  assert.match(tip, /Forward 1 \(layer 0\) of rank 1/);
  assert.match(tip, /reads\s+activations\[0\] \(microbatch 1\), weights\[0\]/);
  assert.match(tip, /line\s+shardlab\/strategies\/fsdp\.py:\d+/);
  assert.match(tip, /needs\s.*all-gather/);
  assert.match(tip, /needed by\s/);
  await page.mouse("mouseMoved", 5, 5);
  await page.settled();
  assert.ok(await page.evaluate("document.getElementById('tip').hidden"));
});

test("clicking an op shows its chain of causes, and clicking a link follows it", async () => {
  const page = await open("gpipe");
  await page.click(...(await pixelOf(page, firstBackward)));
  assert.match(await text(page, "selection"), /Backward 0 \(layer 0\) of rank 0/);
  assert.match(await text(page, "chain"), /Rank 0 waited for receive 0 from rank 1/);
  await page.clickOn("#chain li");
  assert.match(await text(page, "selection"), /Receive 0 from rank 1 \(layer 1\) of rank 0/);
});

test("clicking a gap says why it exists", async () => {
  const page = await open("gpipe");
  const [x, y] = await pixelOf(page, firstBackward);
  await page.click(x - 150, y);
  assert.match(await text(page, "selection"), /This gap of .* exists because rank 0 cannot begin backward 0 \(layer 0\) earlier/);
});

test("the wheel zooms at the pointer, dragging moves, and Fit shows all", async () => {
  const page = await open("gpipe");
  const view = () => page.evaluate("(({from, to}) => [from, to])(shardlabViewer.scene.view)");
  const whole = await view();
  await page.wheel(600, 200, -300);
  const zoomed = await view();
  assert.ok(zoomed[1] - zoomed[0] < 0.5 * (whole[1] - whole[0]));
  await page.drag([600, 300], [500, 300]);
  const moved = await view();
  assert.ok(moved[0] > zoomed[0] && Math.abs(moved[1] - moved[0] - (zoomed[1] - zoomed[0])) < 1e-9);
  assert.equal(await page.evaluate("shardlabViewer.scene.selected"), -1, "a drag selects nothing");
  await page.clickOn("#fit");
  assert.deepEqual(await view(), whole);
});

test("everything can be done with keys", async () => {
  const page = await open("gpipe");
  const scene = (field) => page.evaluate(`shardlabViewer.scene.${field}`);
  await page.press(".");
  const first = await scene("selected");
  assert.ok(first >= 0);
  await page.press(".");
  assert.ok((await scene("selected")) > first);
  await page.press("j");
  assert.equal(await scene("selected"), first);
  const row = await scene("row");
  await page.press("ArrowDown", "");
  assert.equal(await scene("row"), Math.min(3, row + 1));
  const before = await scene("view.to");
  await page.press("+");
  assert.ok((await scene("view.to")) - (await scene("view.from")) < before);
  await page.press("0");
  assert.equal(await scene("view.to"), before);
  await page.press("p");
  assert.equal(await scene("showPath"), true);
  await page.press("c");
  assert.equal(await scene("mode"), "layer");
  await page.press("d");
  assert.equal(await scene("theme"), "dark");
  await page.press("v");
  assert.equal(await page.evaluate("shardlabViewer.tab"), "values");
  await page.press("?");
  assert.match(await text(page, "keys"), /zoom/);
  await page.press("Escape", "");
  assert.equal(await scene("selected"), -1);
  assert.deepEqual(page.errors, []);
  await page.evaluate("localStorage.clear()");
});

test("the theme is that of the system until the reader chooses", async () => {
  const page = await open("fsdp", "dark");
  const theme = () => page.evaluate("document.documentElement.dataset.theme");
  assert.equal(await theme(), "dark");
  await page.prefer("light");
  assert.equal(await theme(), "light");
  await page.clickOn("#theme");
  assert.equal(await theme(), "dark");
  await page.evaluate("localStorage.clear()");
});

test("playing goes through the step op by op, with the values of each rank", async () => {
  const page = await open("fsdp");
  await page.clickOn("#tab-values");
  await page.clickOn("#forward");
  await page.clickOn("#forward");
  const cursor = await page.evaluate("shardlabViewer.scene.cursor");
  assert.ok(cursor > 0);
  await page.clickOn("#back");
  assert.ok((await page.evaluate("shardlabViewer.scene.cursor")) < cursor);
  await page.clickOn("#play");
  await page.until(`shardlabViewer.scene.cursor > ${cursor}`, 10);
  await page.clickOn("#play");
  assert.equal(await page.evaluate("shardlabViewer.playing"), 0);
  const drawn = await page.evaluate(`(() => {
    const canvas = document.getElementById("pictures");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colors = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) colors.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
    return colors.has(0x0072b2) && colors.has(0x56b4e9);
  })()`);
  assert.ok(drawn, "weights and optimizer states are in the picture");
});

test("predicted is shown above measured, with the difference", async () => {
  const page = await open("two");
  assert.match(await text(page, "figures"), /predicted\s+measured\s+difference/);
  const op = "shardlabViewer.scene.model.timelines[1].compute[0].ops.at(-1)";
  await page.click(...(await pixelOf(page, op)));
  assert.match(await text(page, "selection"), /predicted\s+.* long; measured \+/);
  await page.evaluate("shardlabViewer.setTimeline(0)");
  await page.click(...(await pixelOf(page, op)));
  assert.match(await text(page, "selection"), /measured\s+.* long; predicted -|measured\s+.* long; predicted −/);
});

test("damaged data is refused", async () => {
  const page = await open("gpipe");
  const message = await page.evaluate("shardlabViewer.tools.unpack('AAAA').then(() => 'none', (error) => String(error))");
  assert.notEqual(message, "none");
});

test("64 ranks with 256 microbatches are drawn, zoomed and moved", async () => {
  const page = await open("large");
  for (let step = 0; step < 12; step += 1) await page.wheel(700, 300, step < 8 ? -120 : 100);
  for (let step = 0; step < 3; step += 1) await page.drag([700, 300], [620, 280]);
  const frames = (await page.evaluate("shardlabViewer.frames")).toSorted((one, other) => one - other);
  console.log(`# ${frames.length} frames: median ${frames[frames.length >> 1].toFixed(1)} ms, longest ${frames.at(-1).toFixed(1)} ms`);
  assert.ok(frames.length >= 20);
  assert.deepEqual(page.errors, []);
});
