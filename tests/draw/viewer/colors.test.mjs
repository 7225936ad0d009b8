import assert from "node:assert/strict";
import { test } from "node:test";
import { script, step } from "./common.mjs";

const colors = await script("colors");

const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);

/** Colours as people with each kind of colour vision see them (Machado et al. 2009, severity 1), in linear RGB. */
const VISIONS = {
  common: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

/** CIE L*a*b* of a colour as it is seen. */
function lab(color, vision) {
  const rgb = colors.rgbOf(color).map((part) => linear(part / 255));
  const seen = VISIONS[vision].map((line) => Math.min(1, Math.max(0, line.reduce((sum, part, at) => sum + part * rgb[at], 0))));
  const [x, y, z] = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]].map((line) =>
    line.reduce((sum, part, at) => sum + part * seen[at], 0),
  );
  const f = (part) => (part > 0.008856 ? Math.cbrt(part) : 7.787 * part + 16 / 116);
  const [fx, fy, fz] = [f(x / 0.9505), f(y), f(z / 1.089)];
  return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)];
}

const distance = (one, other, vision) => Math.hypot(...lab(one, vision).map((part, at) => part - lab(other, vision)[at]));

const PASSES = ["blue", "orange", "teal", "green", "black"]; // forward, backward, its two halves, update
const COLLECTIVES = ["yellow", "magenta", "red", "slate", "light slate"]; // all-gather, reduce-scatter, all-reduce, messages

for (const [number, theme] of ["light", "dark"].entries()) {
  for (const vision of Object.keys(VISIONS)) {
    test(`passes and collectives differ with ${vision} in the ${theme} theme`, () => {
      for (const names of [PASSES, COLLECTIVES]) {
        for (const one of names) {
          for (const other of names) {
            if (one === other) continue;
            const apart = distance(colors.KINDS[one][number], colors.KINDS[other][number], vision);
            assert.ok(apart > 10, `${one} and ${other}: ${apart.toFixed(1)}`); // 2.3 is just noticeable (Mahy 1994)
          }
        }
      }
    });
  }

  test(`texts of the ${theme} theme have enough contrast`, () => {
    const { ink, faint, accent, ground } = colors.SURFACES[theme];
    for (const color of [ink, faint, accent]) {
      const [low, high] = [colors.luminance(color), colors.luminance(ground)].sort((a, b) => a - b);
      assert.ok((high + 0.05) / (low + 0.05) >= 4.5, color); // WCAG 2, AA
    }
  });
}

test("a number on a box is readable on every colour", () => {
  for (const pair of Object.values(colors.KINDS)) {
    for (const color of pair) {
      const [low, high] = [colors.luminance(color), colors.luminance(colors.inkOn(color))].sort((a, b) => a - b);
      assert.ok((high + 0.05) / (low + 0.05) >= 4, color);
    }
  }
});

test("layers and microbatches become lighter in order", () => {
  for (const mode of ["layer", "microbatch"]) {
    const { css } = colors.paletteOf(step("gpipe"), mode, "light");
    const forward = css.filter((_, at) => at % 2 === 0).slice(0, -1);
    const light = forward.map((color) => lab(color, "deuteranopia")[0]);
    light.slice(1).forEach((each, at) => assert.ok(each >= light[at] - 0.5));
    assert.ok(light.at(-1) - light[0] > 40);
  }
});

test("every colour number has a colour, in every mode", () => {
  for (const name of ["gpipe", "fsdp", "two"]) {
    const model = step(name);
    for (const mode of Object.keys(colors.MODES)) {
      const numbers = colors.colorNumbers(model, mode);
      const { css, rgb } = colors.paletteOf(model, mode, "dark");
      assert.equal(rgb.length, 3 * css.length);
      for (const number of numbers) assert.ok(css[number], `${mode} ${number}`);
      assert.ok(colors.legendOf(model, mode, "dark").length > 1);
    }
  }
});

test("ops of one microbatch have one colour, and their backward passes a paler one", () => {
  const model = step("gpipe");
  const numbers = colors.colorNumbers(model, "microbatch");
  const { css } = colors.paletteOf(model, "microbatch", "light");
  const seen = new Map();
  for (const op of model.timelines[0].compute.flatMap((lane) => [...lane.ops])) {
    const { pass } = model.kindOf(op);
    if (!pass) continue;
    const key = `${pass} ${model.columns.first[op]}`;
    if (seen.has(key)) assert.equal(seen.get(key), css[numbers[op]]);
    seen.set(key, css[numbers[op]]);
  }
  assert.equal(new Set(seen.values()).size, 2 * model.header.microbatches);
  assert.ok(colors.luminance(seen.get("backward 0")) > colors.luminance(seen.get("forward 0")));
});

test("the difference is neutral where measured and predicted are alike, and red where measured is longer", () => {
  const model = step("two");
  const numbers = colors.colorNumbers(model, "difference");
  const { css } = colors.paletteOf(model, "difference", "light");
  const [predicted, measured] = model.timelines;
  let longer = 0;
  for (const op of measured.compute.flatMap((lane) => [...lane.ops])) {
    const ratio = (measured.ends[op] - measured.starts[op]) / (predicted.ends[op] - predicted.starts[op]);
    const [red, , blue] = colors.rgbOf(css[numbers[op]]);
    if (ratio > 1.5) {
      longer += 1;
      assert.ok(red > blue + 40);
    }
    if (Math.abs(ratio - 1) < 1e-9) assert.ok(Math.abs(red - blue) < 12);
  }
  assert.ok(longer > 0);
});
