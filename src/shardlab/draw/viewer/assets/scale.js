// Arithmetic of the time axis: a view is the interval from `from` to `to` on `width` pixels, inside 0 to `end`.

/** Largest factor by which a view may be narrower than the step. */
const DEEPEST = 1e7;

/** View of the whole step. */
export function wholeView(end, width) {
  return { from: 0, to: end, width, end };
}

export function timeAt(view, x) {
  return view.from + (x / view.width) * (view.to - view.from);
}

export function pixelAt(view, time) {
  return ((time - view.from) / (view.to - view.from)) * view.width;
}

/** Zoom by a factor (above 1: closer). The moment below pixel x stays at its position. */
export function zoomAt(view, x, factor) {
  const span = Math.min(view.end, Math.max(view.end / DEEPEST, (view.to - view.from) / factor));
  const fixed = timeAt(view, x);
  return inside({ ...view, from: fixed - (x / view.width) * span, to: fixed + (1 - x / view.width) * span });
}

/** Move the view by a number of pixels (above 0: later). */
export function panBy(view, pixels) {
  const time = (pixels / view.width) * (view.to - view.from);
  return inside({ ...view, from: view.from + time, to: view.to + time });
}

/** Show an interval with a margin around it. */
export function showInterval(view, from, to, margin = 0.15) {
  const span = Math.max(to - from, view.end / DEEPEST);
  return inside({ ...view, from: from - margin * span, to: to + margin * span });
}

/** Move the view by the smallest distance that makes a moment visible. */
export function showMoment(view, time) {
  if (time >= view.from && time <= view.to) return view;
  const span = view.to - view.from;
  const from = time < view.from ? time - 0.1 * span : time - 0.9 * span;
  return inside({ ...view, from, to: from + span });
}

/** Clamp a view to the step. */
export function inside(view) {
  const span = view.to - view.from;
  if (span >= view.end * (1 - 1e-12)) return { ...view, from: 0, to: view.end };
  const from = Math.min(Math.max(0, view.from), view.end - span);
  return { ...view, from, to: from + span };
}

/** Round moments of a view, about `pixels` apart: 1, 2 or 5 times a power of ten. */
export function ticksOf(view, pixels = 90) {
  const least = ((view.to - view.from) * pixels) / view.width;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= least * 0.999);
  const ticks = [];
  for (let number = Math.max(0, Math.ceil(view.from / step - 1e-9)); number * step <= view.to; number += 1) ticks.push(number * step || 0);
  return { step, ticks };
}

/** Text of a time: seconds in a suitable unit, time units as a plain number. */
export function timeText(time, unit, digits = 4) {
  if (unit !== "s") return plain(time, digits);
  const size = Math.abs(time);
  if (size >= 1 || size === 0) return `${plain(time, digits)} s`;
  if (size >= 1e-3) return `${plain(time * 1e3, digits)} ms`;
  return `${plain(time * 1e6, digits)} µs`;
}

/** Text of an amount of memory: elements with separators, bytes in a suitable unit. */
export function memoryText(amount, unit) {
  if (unit !== "bytes") return `${Math.round(amount).toLocaleString("en-US")} elements`;
  for (const [size, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(amount) >= size) return `${plain(amount / size, 4)} ${name}`;
  }
  return `${Math.round(amount)} bytes`;
}

/** Short text of an amount of memory, for an axis. */
export function shortMemoryText(amount, unit) {
  if (unit === "bytes") return memoryText(amount, unit);
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (amount >= size) return `${plain(amount / size, 3)} ${name}`;
  }
  return String(Math.round(amount));
}

/** Number with a limited number of significant digits, without trailing zeros. */
export function plain(number, digits) {
  if (Number.isInteger(number) && Math.abs(number) < 1e12) return number.toLocaleString("en-US");
  return Number(number.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}
