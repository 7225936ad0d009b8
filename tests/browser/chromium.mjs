// Headless Chromium over its DevTools protocol: start it, open pages, press keys, move the pointer, take screenshots.
//
// `run.py` finds Chromium. The protocol: chromedevtools.github.io/devtools-protocol. Node's own WebSocket carries it, so nothing is installed.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** Start the Chromium of the environment variable CHROMIUM. Close it at the end, which removes its profile. */
export async function startChromium() {
  const profile = mkdtempSync(join(tmpdir(), "shardlab-chromium-"));
  const options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"];
  const child = spawn(process.env.CHROMIUM, [...options, `--user-data-dir=${profile}`, "about:blank"], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  const address = await new Promise((resolve, reject) => {
    let text = "";
    child.stderr.on("data", (part) => {
      text += part;
      const found = /DevTools listening on (ws:\S+)/.exec(text);
      if (found) resolve(found[1]);
    });
    child.on("exit", (code) => reject(new Error(`Chromium ended with status ${code}: ${text}`)));
    child.on("error", reject);
  });
  const connection = await connect(address);
  return {
    open: (url, size) => openPage(connection, url, size),
    close: async () => {
      const ended = new Promise((resolve) => child.once("exit", resolve));
      connection.close();
      child.stderr.destroy();
      child.kill("SIGKILL");
      await ended;
      rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
    },
  };
}

async function connect(address) {
  const socket = new WebSocket(address);
  await new Promise((resolve, reject) => {
    socket.onopen = resolve;
    socket.onerror = () => reject(new Error(`no connection to ${address}`));
  });
  const waiting = new Map();
  const listeners = [];
  let number = 0;
  socket.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (!message.id) return listeners.forEach((listen) => listen(message));
    const { resolve, reject } = waiting.get(message.id);
    waiting.delete(message.id);
    return message.error ? reject(new Error(message.error.message)) : resolve(message.result);
  };
  return {
    listeners,
    close: () => socket.close(),
    send: (method, params = {}, sessionId = undefined) =>
      new Promise((resolve, reject) => {
        number += 1;
        waiting.set(number, { resolve, reject });
        socket.send(JSON.stringify({ id: number, method, params, sessionId }));
      }),
  };
}

async function openPage(connection, url, { width = 1280, height = 800 } = {}) {
  const { targetId } = await connection.send("Target.createTarget", { url: "about:blank" });
  const { sessionId } = await connection.send("Target.attachToTarget", { targetId, flatten: true });
  const send = (method, params) => connection.send(method, params, sessionId);
  const page = new Page(send);
  connection.listeners.push((message) => {
    if (message.sessionId === sessionId) page.note(message);
  });
  for (const domain of ["Page", "Runtime", "Network", "Log"]) await send(`${domain}.enable`);
  await send("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: false });
  await page.go(url);
  return page;
}

/** A tab. `errors` has what its scripts raised or logged as an error, `requests` the addresses that it asked for. */
class Page {
  constructor(send) {
    this.send = send;
    this.errors = [];
    this.requests = [];
  }

  note({ method, params }) {
    if (method === "Runtime.exceptionThrown") {
      this.errors.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
    }
    if (method === "Log.entryAdded" && params.entry.level === "error") this.errors.push(params.entry.text);
    if (method === "Network.requestWillBeSent") this.requests.push(params.request.url);
    if (method === "Page.loadEventFired") this.loaded?.();
  }

  async go(url) {
    const loaded = new Promise((resolve) => (this.loaded = resolve));
    await this.send("Page.navigate", { url });
    await loaded;
  }

  /** Value of an expression in the page; it may be a promise. */
  async evaluate(expression) {
    const result = await this.send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
    if (result.exceptionDetails) throw new Error(result.exceptionDetails.exception?.description ?? expression);
    return result.result.value;
  }

  /** Wait until an expression, which should give a boolean, is true in the page. */
  async until(expression, seconds = 60) {
    const end = Date.now() + 1000 * seconds;
    while (!(await this.evaluate(expression))) {
      if (Date.now() > end) throw new Error(`after ${seconds} s, this is not so: ${expression}`);
      await new Promise((resolve) => setTimeout(resolve, 30));
    }
  }

  /** Wait until the page has drawn what was asked for. */
  async settled() {
    await this.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))");
  }

  async mouse(type, x, y, more = {}) {
    await this.send("Input.dispatchMouseEvent", { type, x, y, ...more });
  }

  async click(x, y) {
    const button = { button: "left", clickCount: 1 };
    await this.mouse("mouseMoved", x, y);
    await this.mouse("mousePressed", x, y, button);
    await this.mouse("mouseReleased", x, y, button);
    await this.settled();
  }

  async drag(from, to) {
    await this.mouse("mousePressed", ...from, { button: "left", buttons: 1, clickCount: 1 });
    for (let step = 1; step <= 8; step += 1) {
      const at = [0, 1].map((axis) => from[axis] + ((to[axis] - from[axis]) * step) / 8);
      await this.mouse("mouseMoved", ...at, { button: "left", buttons: 1 });
    }
    await this.mouse("mouseReleased", ...to, { button: "left", clickCount: 1 });
    await this.settled();
  }

  async wheel(x, y, deltaY, modifiers = 0) {
    await this.mouse("mouseWheel", x, y, { deltaX: 0, deltaY, modifiers });
    await this.settled();
  }

  async press(key, text = key.length === 1 ? key : "") {
    await this.send("Input.dispatchKeyEvent", { type: "keyDown", key, text });
    await this.send("Input.dispatchKeyEvent", { type: "keyUp", key });
    await this.settled();
  }

  async clickOn(selector) {
    const box = await this.evaluate(
      `(() => { const b = document.querySelector(${JSON.stringify(selector)}).getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()`,
    );
    await this.click(...box);
  }

  async prefer(theme) {
    await this.send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: theme }] });
    await this.settled();
  }

  async screenshot(path) {
    const { data } = await this.send("Page.captureScreenshot", { format: "png" });
    writeFileSync(path, Buffer.from(data, "base64"));
  }
}
