// Steps that Python packed for these tests, and what several of them need.

import { readFileSync } from "node:fs";
import { join } from "node:path";

const scripts = new URL("../../../src/shardlab/draw/viewer/assets/", import.meta.url);

export const script = (name) => import(new URL(`${name}.js`, scripts));

const { parseTables } = await script("model");

/** The step of this name, of those that `test_scripts.py` writes. */
export function step(name) {
  const bytes = readFileSync(join(process.env.SHARDLAB_TABLES, `${name}.bin`));
  return parseTables(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
}

/** Numbers from 0 to 1 that are the same in each run (mulberry32). */
export function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** The op of a row whose name is given. */
export function opNamed(model, row, name, opName) {
  const { rowStart } = model.columns;
  for (let op = rowStart[row]; op < rowStart[row + 1]; op += 1) if (opName(model, op) === name) return op;
  throw new Error(`row ${row} has no op ${name}`);
}

export const near = (one, other, tolerance = 1e-9) => Math.abs(one - other) <= tolerance * Math.max(1, Math.abs(one));
