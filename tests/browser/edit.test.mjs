import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { after, before, test } from "node:test";
import { startChromium } from "./chromium.mjs";

let chromium;
let server;
let address;

before(async () => {
  chromium = await startChromium();
  server = spawn(process.env.SHARDLAB_PYTHON, ["-m", "shardlab", "view", "gpipe", "--edit"], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  address = await new Promise((resolve, reject) => {
    let text = "";
    server.stdout.on("data", (part) => {
      text += part;
      const found = /(http:\S+)/.exec(text);
      if (found) resolve(found[1]);
    });
    server.on("exit", () => reject(new Error(`the server ended: ${text}`)));
  });
});

after(async () => {
  server.removeAllListeners("exit");
  server.stdout.destroy();
  server.kill("SIGKILL");
  await chromium.close();
});

async function open(fragment = "") {
  const page = await chromium.open(`${address}${fragment}`);
  await page.until("!!globalThis.shardlabEdit?.history && document.querySelectorAll('.chip').length > 0 && !!shardlabViewer.scene.model");
  await page.settled();
  return page;
}

const text = (page, id) => page.evaluate(`document.getElementById("${id}").innerText`);
const version = (page) => page.evaluate("shardlabEdit.history.text");
const focus = (page, place) => page.evaluate(`document.querySelector('[data-place="${place}"]').focus()`);
const altRight = async (page) => {
  const key = { key: "ArrowRight", code: "ArrowRight", windowsVirtualKeyCode: 39, modifiers: 1 };
  await page.send("Input.dispatchKeyEvent", { type: "rawKeyDown", ...key });
  await page.send("Input.dispatchKeyEvent", { type: "keyUp", ...key });
};

test("the page shows the schedule beside its picture, and its figures", async () => {
  const page = await open();
  assert.deepEqual(page.errors, []);
  assert.equal(await text(page, "verdict"), "Legal.");
  assert.match(await text(page, "compared"), /time 22.5.* · memory .* · bubble /);
  assert.equal(await page.evaluate("document.querySelectorAll('.chip').length"), 32);
  assert.equal(await page.evaluate("shardlabViewer.scene.model.rows"), 4);
});

test("a move that is illegal is refused with its reason, and undone", async () => {
  const page = await open();
  const start = await version(page);
  await focus(page, "3,3");
  await altRight(page);
  await page.until("document.getElementById('verdict').className === 'legal' && shardlabEdit.history.at === 1");
  assert.match((await version(page)).split("\n")[3], /^3F0,3F1,3F2,3B0,3F3/);
  await page.evaluate("shardlabEdit.move(0, 4, 0)");
  await page.until("document.getElementById('verdict').className === 'illegal'");
  assert.match(await text(page, "verdict"), /row 1 \(rank 0\), column 1, 0B0: it needs 0F0/);
  assert.equal(await page.evaluate("document.querySelector('.blamed').innerText"), "0B0");
  await page.evaluate("shardlabEdit.parts.undo.click()");
  await page.until("document.getElementById('verdict').className === 'legal'");
  await page.evaluate("shardlabEdit.parts.undo.click()");
  await page.until("shardlabEdit.history.at === 0");
  assert.equal(await version(page), start);
});

test("an action is dragged to another place", async () => {
  const page = await open();
  const middle = (place) =>
    page.evaluate(`(() => { const b = document.querySelector('[data-place="${place}"]').getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()`);
  await page.drag(await middle("1,4"), await middle("1,2"));
  await page.until("shardlabEdit.history.at === 1");
  assert.match((await version(page)).split("\n")[1], /^1F0,1F1,1B0,1F2,1F3/);
  await page.until("document.getElementById('verdict').innerText !== ''");
});

test("a link opens the version that it holds", async () => {
  const page = await open();
  await page.evaluate("shardlabEdit.move(3, 4, 1)");
  await page.until("shardlabEdit.history.at === 1");
  await page.evaluate("shardlabEdit.copyLink()");
  const fragment = await page.evaluate("location.hash");
  const other = await open(fragment);
  await other.until("shardlabEdit.history.at === 1");
  assert.equal(await version(other), await version(page));
});

test("rows are edited as text too, and both files can be saved", async () => {
  const page = await open();
  await page.evaluate("shardlabEdit.parts.asText.click()");
  assert.equal(await page.evaluate("document.getElementById('text').hidden"), false);
  await page.evaluate("(() => { const t = document.getElementById('text'); t.value = t.value.replace('0F0,', ''); t.dispatchEvent(new Event('input')); })()");
  await page.until("document.getElementById('verdict').className === 'illegal'");
  await page.evaluate("shardlabEdit.parts.reset.click()");
  await page.until("document.getElementById('verdict').className === 'legal'");
  const saves = await page.evaluate("shardlabEdit.parts.files.innerText");
  assert.match(saves, /Save schedule\.csv/);
  assert.match(saves, /Save schedule-with-messages\.csv/);
});

async function openLevel(number) {
  const page = await open();
  await page.evaluate(`(() => { const l = shardlabEdit.parts.level; l.value = [...l.options].find((o) => o.text.startsWith('${number}:')).value; l.dispatchEvent(new Event('change')); })()`);
  return page;
}

test("a level of the course shows its goals", async () => {
  const page = await openLevel(15);
  await page.until("document.getElementById('verdict').innerText.includes('goal')");
  assert.deepEqual(page.errors, []);
});

test("a level that asks for a program shows its text and its goals", async () => {
  const page = await openLevel(14);
  await page.until("document.getElementById('text').value.includes('async def gpipe(rank')");
  assert.equal(await page.evaluate("document.getElementById('text').hidden"), false);
  assert.match(await page.evaluate("document.getElementById('verdict').innerText"), /goal/);
  assert.deepEqual(page.errors, []);
});

test("without the token the server answers 403", async () => {
  const { origin } = new URL(address);
  for (const path of ["/", "/judge", "/wrong/"]) assert.equal((await fetch(`${origin}${path}`)).status, 403);
});
