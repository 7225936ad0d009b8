// The page of `shardlab view --edit`: a schedule or a program beside its picture. Python checks each change.

import { unpack } from "./model.js";
import { percent } from "./figures.js";
import { memoryText, timeText } from "./scale.js";
import { History, actionOf, blamedCell, comparedText, linkOf, moveAction, parseRows, textOfLink, writeRows } from "./schedule.js";
import { Viewer, byId, element } from "./viewer.js";

/** Milliseconds from the last key press until a text is checked. */
const PAUSE = 250;

class EditPage {
  constructor(viewer) {
    this.viewer = viewer;
    this.level = "";
    this.asText = false;
    this.asked = 0;
    const button = (text, title, click) => element("button", { title, onclick: click }, text);
    this.parts = {
      level: element("select", { "aria-label": "Level", onchange: (event) => this.open(event.target.value) }),
      undo: button("Undo", "Undo (ctrl z)", () => this.go(this.history.undo())),
      redo: button("Redo", "Redo (ctrl shift z)", () => this.go(this.history.redo())),
      reset: button("Start", "Back to the starting point", () => this.change(this.start)),
      asText: button("As text", "Edit the rows as text", () => this.toggleText()),
      link: button("Copy link", "A link that holds this version", () => this.copyLink()),
      files: element("span"),
      verdict: element("p", { id: "verdict", role: "status" }),
      compared: element("p", { id: "compared" }),
      rows: element("div", { id: "rows" }),
      text: element("textarea", { id: "text", spellcheck: "false", "aria-label": "Text", oninput: () => this.typed() }),
    };
    const { level, undo, redo, reset, asText, link, files, verdict, compared, rows, text } = this.parts;
    const bar = element("div", { class: "controls" }, level, undo, redo, reset, asText, link, files);
    byId("edit").replaceChildren(bar, verdict, compared, rows, text);
    byId("edit").hidden = false;
    document.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.id === "text") return;
      event.preventDefault();
      this.go(event.shiftKey ? this.history.redo() : this.history.undo());
    });
  }

  /** Open a level, with the text of the link if there is one. */
  async open(level, text = null) {
    this.level = level;
    const answer = await this.ask(null);
    if (answer === null) return;
    this.start = answer.start;
    this.first = answer.figures;
    this.schedule = answer.schedule;
    this.asText = !answer.schedule;
    this.history = new History(answer.start);
    const own = element("option", { value: "" }, level === "" ? answer.name : "no level");
    const options = answer.levels.map((each) => element("option", { value: each.name }, each.title));
    this.parts.level.replaceChildren(own, ...options);
    this.parts.level.value = level;
    this.parts.level.hidden = !answer.levels.length;
    this.parts.asText.hidden = !answer.schedule;
    await this.show(answer, false);
    if (text !== null) await this.change(text);
  }

  /** Ask Python to check a text. The result is null if a later request was sent meanwhile, or there is no answer. */
  async ask(text) {
    this.asked += 1;
    const number = this.asked;
    try {
      const body = JSON.stringify({ level: this.level, ...(text === null ? {} : { text }) });
      const response = await fetch("judge", { method: "POST", body });
      if (!response.ok) throw new Error(await response.text());
      const answer = await response.json();
      return number === this.asked ? answer : null;
    } catch (error) {
      this.say(`Python does not answer (${error.message}); is shardlab view --edit still running?`, false);
      return null;
    }
  }

  change(text) {
    return this.history.change(text) ? this.go(text) : undefined;
  }

  async go(text) {
    this.write();
    const answer = await this.ask(text);
    if (answer !== null) await this.show(answer, true);
  }

  async show(answer, keep) {
    this.say(answer.sentence || "Legal.", answer.legal);
    this.blamed = answer.legal ? null : blamedCell(answer.sentence);
    this.parts.compared.textContent = answer.figures ? this.comparedFigures(answer.figures) : "";
    const saves = Object.entries(answer.files).map(([name, text]) =>
      element("button", { title: "Save this file", onclick: () => save(name, text) }, `Save ${name}`),
    );
    this.parts.files.replaceChildren(...saves);
    byId("stage").style.opacity = answer.legal ? 1 : 0.35;
    this.write();
    if (answer.data) this.viewer.show(await unpack(answer.data), keep);
    this.viewer.resize();
  }

  comparedFigures(figures) {
    const start = this.first ?? figures;
    const parts = [
      `time ${comparedText(figures.time, start.time, (time) => timeText(time, ""))}`,
      `memory ${comparedText(figures.memory, start.memory, (amount) => memoryText(amount, "elements"))}`,
    ];
    if (figures.bubble !== null) parts.push(`bubble ${comparedText(figures.bubble, start.bubble, percent)}`);
    return parts.join(" · ");
  }

  say(sentence, legal) {
    this.parts.verdict.textContent = sentence;
    this.parts.verdict.className = legal ? "legal" : "illegal";
  }

  /** Write the current version into the page. */
  write() {
    const { undo, redo, rows, text } = this.parts;
    undo.disabled = this.history.at === 0;
    redo.disabled = this.history.at === this.history.texts.length - 1;
    rows.hidden = this.asText;
    text.hidden = !this.asText;
    if (text.value !== this.history.text) text.value = this.history.text;
    if (this.asText) return;
    const focused = document.activeElement?.dataset?.place;
    rows.replaceChildren(...parseRows(this.history.text).map((words, row) => this.rowOf(words, row)));
    if (focused) rows.querySelector(`[data-place="${focused}"]`)?.focus();
  }

  rowOf(words, row) {
    const chips = words.map((word, column) => {
      const action = actionOf(word);
      const blamed = this.blamed && this.blamed.row === row && this.blamed.column === column;
      const kind = action ? action.kind : "other";
      return element(
        "button",
        {
          class: `chip ${kind}${blamed ? " blamed" : ""}`,
          "data-place": `${row},${column}`,
          title: `${word}: drag it, or press alt ← →`,
          onpointerdown: (event) => this.drag(event, row, column),
          onkeydown: (event) => this.moveByKey(event, row, column),
        },
        word,
      );
    });
    return element("div", { class: "row", "data-row": String(row) }, element("span", { class: "faint" }, `rank ${row}`), ...chips);
  }

  move(row, from, to) {
    const text = writeRows(moveAction(parseRows(this.history.text), row, from, to));
    this.change(text);
    this.parts.rows.querySelector(`[data-place="${row},${to}"]`)?.focus();
  }

  moveByKey(event, row, column) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const to = column + by;
    if (to < 0 || to >= parseRows(this.history.text)[row].length) return;
    if (event.altKey) this.move(row, column, to);
    else this.parts.rows.querySelector(`[data-place="${row},${to}"]`)?.focus();
  }

  drag(event, row, column) {
    const chip = event.target;
    let target = column;
    chip.setPointerCapture(event.pointerId);
    const moved = (move) => {
      const below = document.elementFromPoint(move.clientX, move.clientY)?.closest(".chip");
      const [overRow, over] = (below?.dataset.place ?? "-1,-1").split(",").map(Number);
      if (overRow !== row) return;
      target = over;
      for (const each of chip.parentElement.querySelectorAll(".chip")) each.classList.toggle("target", each === below);
    };
    const done = () => {
      chip.removeEventListener("pointermove", moved);
      if (target !== column) this.move(row, column, target);
    };
    chip.addEventListener("pointermove", moved);
    chip.addEventListener("pointerup", done, { once: true });
  }

  typed() {
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.change(this.parts.text.value), PAUSE);
  }

  toggleText() {
    this.asText = !this.asText;
    this.parts.asText.textContent = this.asText ? "As rows" : "As text";
    this.write();
    this.viewer.resize();
  }

  async copyLink() {
    location.hash = linkOf(this.level, this.history.text);
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      // the address of the page has it
    }
  }
}

function save(name, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

const editPage = new EditPage(new Viewer());
globalThis.shardlabViewer = editPage.viewer; // for a console, and for tests
globalThis.shardlabEdit = editPage;
const linked = textOfLink(location.hash);
await editPage.open(linked?.level ?? "", linked?.text ?? null);
