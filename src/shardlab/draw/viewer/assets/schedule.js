// Schedules as rows of words, versions of a text, and links that contain a text.
//
// A word such as `0F3` is an action: its stage, its kind (F, B, I or W) and its microbatch.

/** Rows of words in a CSV text; empty cells are left out. */
export function parseRows(text) {
  return text
    .trim()
    .split(/\r?\n/)
    .map((line) => line.split(",").map((word) => word.trim()).filter(Boolean));
}

export function writeRows(rows) {
  return rows.map((row) => `${row.join(",")}\n`).join("");
}

/** Rows after an action has moved to another position in its row. */
export function moveAction(rows, row, from, to) {
  return rows.map((words, at) => {
    if (at !== row) return words;
    const moved = words.toSpliced(from, 1);
    moved.splice(Math.min(moved.length, Math.max(0, to)), 0, words[from]);
    return moved;
  });
}

/** Parts of the word of an action; null if the word is not an action. */
export function actionOf(word) {
  const found = /^(\d+)([FBIW])(\d+)$/.exec(word);
  return found && { stage: Number(found[1]), kind: found[2], microbatch: Number(found[3]) };
}

/** Row and column, from 0, of the cell that an error message names; null if it names none. */
export function blamedCell(sentence) {
  const found = /row (\d+) \(rank \d+\), column (\d+)/.exec(sentence);
  return found && { row: Number(found[1]) - 1, column: Number(found[2]) - 1 };
}

/** Versions of a text, with undo and redo. */
export class History {
  constructor(text) {
    this.texts = [text];
    this.at = 0;
  }

  get text() {
    return this.texts[this.at];
  }

  change(text) {
    if (text === this.text) return false;
    this.texts = [...this.texts.slice(0, this.at + 1), text];
    this.at += 1;
    return true;
  }

  undo() {
    this.at = Math.max(0, this.at - 1);
    return this.text;
  }

  redo() {
    this.at = Math.min(this.texts.length - 1, this.at + 1);
    return this.text;
  }
}

/** Fragment of an address with a text and its level. */
export function linkOf(level, text) {
  const bytes = new TextEncoder().encode(text);
  const coded = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return `#level=${encodeURIComponent(level)}&text=${coded.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}

/** Level and text of such a fragment; null if it has none. */
export function textOfLink(fragment) {
  const found = /^#level=([^&]*)&text=([\w-]+)$/.exec(fragment);
  if (!found) return null;
  try {
    const coded = atob(found[2].replaceAll("-", "+").replaceAll("_", "/"));
    const text = new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(coded, (each) => each.charCodeAt(0)));
    return { level: decodeURIComponent(found[1]), text };
  } catch {
    return null;
  }
}

/** Text of a figure beside that of the starting point. */
export function comparedText(value, start, text) {
  if (value === null || value === undefined) return "–";
  const difference = value - start;
  const same = Math.abs(difference) <= 1e-9 * Math.max(1, Math.abs(start));
  return `${text(value)} (${same ? "as at the start" : `${difference < 0 ? "−" : "+"}${text(Math.abs(difference))}`})`;
}
