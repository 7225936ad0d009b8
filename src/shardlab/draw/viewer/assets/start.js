// Start of a page with one step: unpack its data and show it.

import { unpack } from "./model.js";
import { Viewer, byId } from "./viewer.js";

const viewer = new Viewer();
globalThis.shardlabViewer = viewer; // for a console, and for tests
try {
  viewer.show(await unpack(byId("data").textContent));
} catch (error) {
  byId("title").textContent = "This page cannot be shown";
  byId("note").textContent = String(error.message ?? error);
}
