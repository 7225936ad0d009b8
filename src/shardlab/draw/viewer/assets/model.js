// Tables of a step, as Python packed them, and the lookups that all other scripts need.
//
// An op is a number: its index in the columns, in which all tapes are concatenated. A row is a rank, or several ranks
// that do the same. A lane has the computing or the communicating ops of one row and one timeline, sorted by start.

const ARRAYS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, i32: Int32Array, f64: Float64Array };

/** Version of the tables that these scripts read. */
export const FORMAT = 1;

/** Unpack the text of a page: base64 of a zlib stream. */
export async function unpack(text) {
  const characters = atob(text.trim());
  const bytes = new Uint8Array(characters.length); // `Uint8Array.from` takes a hundred times as long
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = characters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return parseTables(await new Response(stream).arrayBuffer());
}

/** Split uncompressed tables into their header and columns. */
export function parseTables(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  if (header.format !== FORMAT) {
    throw new Error(`this page has tables of format ${header.format}, but its scripts read format ${FORMAT}`);
  }
  const columns = {};
  for (const [name, [type, offset, count]] of Object.entries(header.columns)) {
    columns[name] = new ARRAYS[type](buffer, 4 + length + offset, count);
  }
  return new Model(header, columns);
}

/** Step: its header, its columns, and data that is derived from them. */
export class Model {
  constructor(header, columns) {
    this.header = header;
    this.columns = columns;
    this.rows = header.rows.length;
    this.kinds = header.kinds;
    this.hasProgram = "input" in columns;
    this.rowOf = new Uint16Array(columns.kind.length);
    for (let row = 0; row < this.rows; row += 1) {
      this.rowOf.fill(row, columns.rowStart[row], columns.rowStart[row + 1]);
    }
    this.timelines = header.timelines.map((about, number) => this.timelineOf(about, number));
    this.end = Math.max(...this.timelines.map((timeline) => timeline.end), Number.MIN_VALUE);
    this.producers = new Map();
  }

  timelineOf(about, number) {
    const column = (name) => this.columns[`${name}${number}`];
    const timeline = { ...about, number };
    for (const name of ["start", "end", "causeRow", "causeOp", "reason", "lastAwaited", "reached"]) {
      timeline[name === "end" ? "ends" : name === "start" ? "starts" : name] = column(name);
    }
    const rows = Array.from({ length: this.rows }, (_, row) => row);
    timeline.compute = rows.map((row) => this.laneOf(timeline, row, false));
    timeline.communication = rows.map((row) => this.laneOf(timeline, row, true));
    timeline.memory = rows.map((row) => this.memoryOf(about, column, row));
    timeline.peak = Math.max(0, ...timeline.memory.map((memory) => memory.peak));
    if (about.path) {
      timeline.path = Array.from(column("pathRow"), (row, at) => ({
        op: this.columns.rowStart[row] + column("pathOp")[at],
        start: column("pathStart")[at],
        end: column("pathEnd")[at],
      }));
    } else {
      timeline.path = this.pathByCauses(timeline);
    }
    return timeline;
  }

  /** Ops of a row that take time, sorted by start, each with the latest end of any op up to it. */
  laneOf(timeline, row, communicates) {
    const found = [];
    for (let op = this.columns.rowStart[row]; op < this.columns.rowStart[row + 1]; op += 1) {
      if (timeline.ends[op] > timeline.starts[op] && this.kinds[this.columns.kind[op]].communicates === communicates) {
        found.push(op);
      }
    }
    found.sort((one, other) => timeline.starts[one] - timeline.starts[other] || one - other);
    return laneFrom(
      found,
      found.map((op) => timeline.starts[op]),
      found.map((op) => timeline.ends[op]),
    );
  }

  memoryOf(about, column, row) {
    const [from, to] = [column("memoryRows")[row], column("memoryRows")[row + 1]];
    const total = column("memoryTime").length;
    const times = column("memoryTime").subarray(from, to);
    const live = about.categories.map((_, number) =>
      column("memory").subarray(number * total + from, number * total + to),
    );
    let peak = 0;
    let peakAt = 0;
    for (let at = 0; at < times.length; at += 1) {
      const sum = live.reduce((whole, category) => whole + category[at], 0);
      if (sum > peak) [peak, peakAt] = [sum, times[at]];
    }
    return { times, live, peak, peakAt };
  }

  /** Critical path from the op that ends last back to the start, computed if Python gave none. */
  pathByCauses(timeline) {
    let last = -1;
    for (let op = 0; op < timeline.ends.length; op += 1) {
      if (timeline.ends[op] > (last < 0 ? -1 : timeline.ends[last])) last = op;
    }
    const path = [];
    const seen = new Set();
    let until = last < 0 ? 0 : timeline.ends[last];
    for (let op = last; op >= 0 && !seen.has(op); op = this.causeOf(timeline, op)) {
      seen.add(op);
      const start = timeline.starts[op];
      if (start < until) {
        path.push({ op, start, end: until });
        until = start;
      }
    }
    return path.reverse();
  }

  /** Op that an op waits for; -1 for the first op. */
  causeOf(timeline, op) {
    const row = timeline.causeRow[op];
    return row < 0 ? -1 : this.columns.rowStart[row] + timeline.causeOp[op];
  }

  reasonOf(timeline, op) {
    return this.header.reasons[timeline.reason[op]];
  }

  kindOf(op) {
    return this.kinds[this.columns.kind[op]];
  }

  /** Members of a communication, as ops. For a message, the sender comes first. */
  membersOf(op) {
    const { communication, memberStart, memberRow, memberOp, rowStart } = this.columns;
    const number = communication[op];
    if (number < 0) return [];
    const members = [];
    for (let at = memberStart[number]; at < memberStart[number + 1]; at += 1) {
      members.push(rowStart[memberRow[at]] + memberOp[at]);
    }
    return members;
  }

  /** Values that an op reads ("input") or writes ("output"), by their numbers in the op's row. */
  valuesOf(op, which) {
    if (!this.hasProgram) return [];
    const starts = this.columns[`${which}Start`];
    return Array.from(this.columns[which].subarray(starts[op], starts[op + 1]));
  }

  /** Text of a value of a row, such as `activations[3] (microbatch 0)`. */
  valueText(row, value) {
    return this.header.specs[this.specOf(row, value)];
  }

  specOf(row, value) {
    return this.columns.valueSpec[this.columns.valueStart[row] + value];
  }

  /** The op that made each value of a row. */
  producersOf(row) {
    if (!this.producers.has(row)) {
      const made = new Map();
      for (let op = this.columns.rowStart[row]; op < this.columns.rowStart[row + 1]; op += 1) {
        for (const value of this.valuesOf(op, "output")) made.set(value, op);
      }
      this.producers.set(row, made);
    }
    return this.producers.get(row);
  }

  /** Ops that an op depends on, and ops that depend on it, through values of its rank or through communication. */
  dependenciesOf(op) {
    const row = this.rowOf[op];
    const { kind, rowStart } = this.columns;
    const made = this.producersOf(row);
    const before = new Set();
    for (const value of this.valuesOf(op, "input")) if (made.has(value)) before.add(made.get(value));
    const after = new Set();
    const outputs = new Set(this.valuesOf(op, "output"));
    for (let later = op + 1; outputs.size && later < rowStart[row + 1]; later += 1) {
      if (kind[later] === this.header.special.free) continue;
      if (this.valuesOf(later, "input").some((value) => outputs.has(value))) after.add(later);
    }
    const members = this.membersOf(op);
    if (kind[op] === this.header.special.send && members.length === 2) after.add(members[1]);
    else if (kind[op] === this.header.special.recv && members.length === 2) before.add(members[0]);
    else for (const member of members) if (member !== op) before.add(member);
    return { before: [...before], after: [...after] };
  }
}

/** Lane of ops, sorted by start. Ops that overlap have different parts of its height, from `upper` to `lower`. */
export function laneFrom(ops, starts, ends) {
  const reach = new Float64Array(ends.length);
  let latest = -Infinity;
  ends.forEach((end, at) => {
    latest = Math.max(latest, end);
    reach[at] = latest;
  });
  const spans = { ops: Uint32Array.from(ops), starts: Float64Array.from(starts), ends: Float64Array.from(ends) };
  return { ...spans, reach, ...partsOf(starts, ends) };
}

/** Upper and lower edge of each op in its lane, from 0 (the top) to 1. */
function partsOf(starts, ends) {
  const upper = new Float32Array(starts.length);
  const lower = new Float32Array(starts.length);
  const part = [];
  let [first, last] = [0, []]; // first op of a run of overlapping ops, and the end of the last op in each part
  const endRun = (next) => {
    for (let at = first; at < next; at += 1) {
      upper[at] = part[at] / last.length;
      lower[at] = (part[at] + 1) / last.length;
    }
    [first, last] = [next, []];
  };
  starts.forEach((start, at) => {
    const isFree = (end) => end <= start * (1 + 1e-9); // equal but for rounding
    if (last.every(isFree)) endRun(at);
    const free = last.findIndex(isFree);
    part[at] = free < 0 ? last.length : free;
    last[part[at]] = ends[at];
  });
  endRun(starts.length);
  return { upper, lower };
}
