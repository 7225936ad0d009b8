// Colours of ops, in a light and a dark theme.
//
// The colours of kinds are those of Okabe and Ito (2008) and of Tol (2021, "Colour schemes"), which can be told apart
// with every kind of colour vision. Layers and microbatches have the colours of cividis (Nuñez et al. 2018, doi
// 10.1371/journal.pone.0199239), whose order is visible with every kind of colour vision as well.

/** Colours of the colour names in the table of ops, in the light and in the dark theme. */
export const KINDS = {
  blue: ["#0072b2", "#3d9bdc"],
  "light blue": ["#56b4e9", "#8fd0f5"],
  orange: ["#e69f00", "#e69f00"],
  teal: ["#009e73", "#1bb98d"],
  green: ["#f0e442", "#f0e442"],
  black: ["#24292f", "#e6edf3"],
  brown: ["#7a5a00", "#c9a227"],
  grey: ["#8c959f", "#8c959f"],
  "light grey": ["#b4bcc4", "#6e7681"],
  yellow: ["#c76ba0", "#e08fbd"],
  magenta: ["#882255", "#a3326e"],
  red: ["#d55e00", "#f07a2b"],
  violet: ["#332288", "#8878e0"],
  lilac: ["#aa99dd", "#b9abea"],
  pink: ["#e2a7c8", "#eebad6"],
  cream: ["#cbb677", "#ddcc77"],
  rose: ["#cc6677", "#dd7788"],
  slate: ["#6e7781", "#d9e0e6"],
  "light slate": ["#c8d0d8", "#7d8894"],
  olive: ["#6f7a1e", "#a3ad4a"],
  "light olive": ["#bfc777", "#ccd392"],
};

/** Colours of the page around the ops, in the light and in the dark theme. */
export const SURFACES = {
  light: { ink: "#1f2328", faint: "#59636e", line: "#d1d9e0", ground: "#ffffff", idle: "#f0f2f4", accent: "#b5006a" },
  dark: { ink: "#e6edf3", faint: "#9198a1", line: "#3d444d", ground: "#0d1117", idle: "#1b222b", accent: "#ff7ab8" },
};

/** Categories of memory, in the light and in the dark theme. */
export const MEMORY = {
  parameters: ["#0072b2", "#3d9bdc"],
  gradients: ["#d55e00", "#f07a2b"],
  optimizer: ["#56b4e9", "#8fd0f5"],
  activations: ["#009e73", "#1bb98d"],
  gathered: ["#cc79a7", "#e08fbd"],
  communication: ["#e69f00", "#e69f00"],
  arena: ["#8c959f", "#8c959f"],
};

const CIVIDIS = ["#00224e", "#2a3f6d", "#575d6d", "#7c7b78", "#a59c74", "#d2c060", "#fee838"];
const SLOWER = ["#2166ac", "#f7f7f7", "#b2182b"];

/** Largest number of colours of a scale; more layers or microbatches share them. */
const SHADES = 64;

/** Modes of colour, with their names. */
export const MODES = { kind: "kind", layer: "layer", microbatch: "microbatch", difference: "difference" };

/** Colour of each op in a mode, as an index into `paletteOf`. */
export function colorNumbers(model, mode, timeline = null) {
  const { kind, modelLayer, first } = model.columns;
  const numbers = new Uint16Array(kind.length);
  for (let op = 0; op < kind.length; op += 1) {
    const pass = model.kinds[kind[op]].pass;
    if (mode === "kind") numbers[op] = kind[op];
    else if (mode === "difference") numbers[op] = differenceShade(model, timeline, op);
    else {
      const [value, count] =
        mode === "layer" ? [modelLayer[op], model.header.layers] : [first[op], model.header.microbatches];
      numbers[op] = value < 0 || !pass ? 2 * SHADES : 2 * shadeOf(value, count) + (pass === "forward" ? 0 : 1);
    }
  }
  return numbers;
}

/** Position of one of several values on a scale of `SHADES` colours. */
export function shadeOf(value, count) {
  return count <= 1 ? SHADES >> 1 : Math.round((value / (count - 1)) * (SHADES - 1));
}

/** Shade of an op by its duration relative to the first timeline, from half as long to twice as long. */
function differenceShade(model, timeline, op) {
  const [predicted, measured] = [model.timelines[0], timeline ?? model.timelines.at(-1)];
  const [one, other] = [predicted, measured].map((each) => each.ends[op] - each.starts[op]);
  if (!(one > 0) || !(other > 0)) return SHADES >> 1;
  const place = Math.min(1, Math.max(-1, Math.log2(other / one)));
  return Math.round(((place + 1) / 2) * (SHADES - 1));
}

/** Colours of a mode as CSS texts, and as red, green and blue bytes. */
export function paletteOf(model, mode, theme) {
  const dark = theme === "dark";
  let css;
  if (mode === "kind") css = model.kinds.map((kind) => KINDS[kind.color][dark ? 1 : 0]);
  else if (mode === "difference") css = shades((place) => scaleColor(SLOWER, place));
  else {
    css = [];
    const darkest = dark ? 0.22 : 0.05; // so that it differs from the ground
    for (const color of shades((place) => scaleColor(CIVIDIS, darkest + (1 - darkest) * place))) {
      css.push(color, mixed(color, dark ? "#000000" : "#ffffff", 0.45));
    }
    css.push(KINDS.grey[dark ? 1 : 0]);
  }
  const rgb = new Uint8Array(3 * css.length);
  css.forEach((color, number) => rgb.set(rgbOf(color), 3 * number));
  return { css, rgb };
}

function shades(color) {
  return Array.from({ length: SHADES }, (_, at) => color(at / (SHADES - 1)));
}

/** Colour at a position from 0 to 1 on a scale. */
export function scaleColor(scale, place) {
  const at = Math.min(scale.length - 1 - 1e-9, Math.max(0, place * (scale.length - 1)));
  const low = Math.floor(at);
  return mixed(scale[low], scale[low + 1], at - low);
}

/** Mix a colour with another one, whose share is given. */
export function mixed(color, other, share) {
  const [one, two] = [rgbOf(color), rgbOf(other)];
  const parts = one.map((part, at) => Math.round(part * (1 - share) + two[at] * share));
  return `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
}

export function rgbOf(color) {
  return [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));
}

/** Black or white, whichever has more contrast to a colour (relative luminance, WCAG 2). */
export function inkOn(color) {
  return luminance(color) < 0.207 ? "#ffffff" : "#14181d";
}

export function luminance(color) {
  const [red, green, blue] = rgbOf(color).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Entries of the legend for a mode, each with a colour and a text. */
export function legendOf(model, mode, theme) {
  const { css } = paletteOf(model, mode, theme);
  if (mode === "kind") {
    const used = new Set();
    for (const timeline of model.timelines) {
      for (const lane of [...timeline.compute, ...timeline.communication]) {
        for (const op of lane.ops) used.add(model.columns.kind[op]);
      }
    }
    return [...used].sort((one, other) => one - other).map((kind) => ({ color: css[kind], text: model.kinds[kind].name }));
  }
  if (mode === "difference") {
    return [
      { color: css[0], text: "half as long as predicted" },
      { color: css[SHADES >> 1], text: "as predicted" },
      { color: css[SHADES - 1], text: "twice as long, or longer" },
    ];
  }
  const count = mode === "layer" ? model.header.layers : model.header.microbatches;
  const values = [...new Set([0, Math.round((count - 1) / 3), Math.round((2 * (count - 1)) / 3), count - 1])];
  const entries = values.map((value) => ({ color: css[2 * shadeOf(value, count)], text: `${mode} ${value}` }));
  return [...entries, { color: css[2 * shadeOf(0, count) + 1], text: `backward: ${theme === "dark" ? "darker" : "paler"}` }, { color: css[2 * SHADES], text: "other" }];
}
