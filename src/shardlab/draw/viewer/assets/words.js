// Sentences about ops: their names, inputs, outputs and waits, and the causes of gaps.

import { timeText } from "./scale.js";

/** Largest number of links that a chain of causes shows. */
export const LONGEST_CHAIN = 400;

/** Name of an op, such as `forward 0 (layer 3)` or `send 0 to rank 1 (layer 3)`. */
export function opName(model, op) {
  const { columns, header } = model;
  const parts = [model.kindOf(op).name];
  const text = header.texts[columns.text[op]];
  if (text) parts.push(text);
  if (columns.peer && columns.peer[op] >= 0) {
    parts.push(columns.kind[op] === header.special.send ? `to rank ${columns.peer[op]}` : `from rank ${columns.peer[op]}`);
  }
  if (columns.group && columns.group[op] >= 0) parts.push(`on ${header.groups[columns.group[op]]}`);
  const where = columns.modelLayer[op] >= 0 ? ` (layer ${columns.modelLayer[op]})` : "";
  return `${parts.join(" ")}${where}`;
}

export function rowName(model, row) {
  return model.header.rows[row].name;
}

/** Name of an op with the name of its row. */
export function placedName(model, op) {
  return `${opName(model, op)} of ${rowName(model, model.rowOf[op])}`;
}

/** Line of the program that issued an op, as `file:line`; empty if it is unknown. */
export function lineOf(model, op) {
  const { file, line } = model.columns;
  return file && file[op] >= 0 ? `${model.header.files[file[op]]}:${line[op]}` : "";
}

/** Facts about an op in one timeline: pairs of a label and a text. */
export function factsOf(model, timeline, op) {
  const unit = model.header.unit;
  const [start, end] = [timeline.starts[op], timeline.ends[op]];
  const facts = [["time", `${timeText(start, unit)} to ${timeText(end, unit)}, ${timeText(end - start, unit)} long`]];
  if (model.kindOf(op).communicates && timeline.reached && timeline.reached[op] < start) {
    facts.push(["issued", `at ${timeText(timeline.reached[op], unit)}`]);
  }
  for (const other of model.timelines) {
    if (other !== timeline && other.ends[op] >= other.starts[op]) {
      const length = other.ends[op] - other.starts[op];
      const more = end - start - length;
      const share = length > 0 ? `, ${((100 * more) / length).toFixed(0)} %` : "";
      const sign = more < 0 ? "" : "+";
      facts.push([other.name, `${timeText(length, unit)} long; ${timeline.name} ${sign}${timeText(more, unit)}${share}`]);
    }
  }
  const row = model.rowOf[op];
  for (const [which, label] of [["input", "reads"], ["output", "makes"]]) {
    const texts = model.valuesOf(op, which).map((value) => model.valueText(row, value));
    if (texts.length) facts.push([label, texts.join(", ")]);
  }
  const line = lineOf(model, op);
  if (line) facts.push(["line", line]);
  return facts;
}

/** One step of a chain: the op that was waited for, and a sentence about it. */
function causeLink(model, timeline, op) {
  const cause = model.causeOf(timeline, op);
  const unit = model.header.unit;
  const at = (time) => timeText(time, unit);
  const here = rowName(model, model.rowOf[op]);
  const start = at(timeline.starts[op]);
  if (cause < 0) {
    const sentence =
      model.reasonOf(timeline, op) === "unknown"
        ? `Nothing that was recorded explains what ${here} did before ${opName(model, op)} (${start}).`
        : `${capital(opName(model, op))} is the first op of ${here}.`;
    return { op: -1, sentence };
  }
  const name = opName(model, cause);
  const there = rowName(model, model.rowOf[cause]);
  const until = at(timeline.ends[cause]);
  const sentences = {
    busy: () => `${capital(here)} computed ${name} until ${until}.`,
    waited: () => `${capital(here)} waited for ${name}, which ended at ${until}.`,
    member: () => memberSentence(model, cause, there, at(timeline.reached?.[cause] ?? timeline.starts[cause])),
    sent: () => `The message was sent by ${there} from ${at(timeline.starts[cause])} to ${until}.`,
    stream: () => `Its stream was taken by ${name} of ${there} until ${until}.`,
    unknown: () => `After ${name} (until ${until}), ${here} did nothing that was recorded.`,
  };
  return { op: cause, sentence: sentences[model.reasonOf(timeline, op)]() };
}

function memberSentence(model, cause, there, time) {
  const { send, recv } = model.header.special;
  if (model.columns.kind[cause] === send) return `The sender, ${there}, came to it at ${time}.`;
  if (model.columns.kind[cause] === recv) return `The receiver, ${there}, came to it at ${time}.`;
  return `The last member to come was ${there}, at ${time}.`;
}

/** Reason why an op does not start earlier: a chain of causes back to the start of the step. */
export function chainOf(model, timeline, op) {
  const links = [];
  const seen = new Set([op]);
  for (let at = op; links.length < LONGEST_CHAIN; ) {
    const link = causeLink(model, timeline, at);
    links.push(link);
    if (link.op < 0 || seen.has(link.op)) break;
    seen.add(link.op);
    at = link.op;
  }
  return links;
}

/** First links of a chain, which explain a gap: until a link where another rank computed, or without a cause. */
export function reasonsOf(model, timeline, op) {
  const links = chainOf(model, timeline, op);
  const row = model.rowOf[op];
  const busy = links.findIndex((link) => link.op < 0 || (!model.kindOf(link.op).communicates && model.rowOf[link.op] !== row));
  return links.slice(0, busy + 1);
}

/** Sentences about a gap of a row. */
export function gapSentences(model, timeline, row, gap) {
  const unit = model.header.unit;
  const name = rowName(model, row);
  const long = timeText(gap.end - gap.start, unit);
  if (gap.before >= 0) {
    const reasons = reasonsOf(model, timeline, gap.before).map((link) => link.sentence);
    return [`This gap of ${long} exists because ${name} cannot begin ${opName(model, gap.before)} earlier.`, ...reasons];
  }
  const awaited = timeline.lastAwaited[row];
  const last = timeline.path.length ? timeline.path.at(-1).op : -1;
  const sentences = [];
  if (awaited >= 0) {
    const op = model.columns.rowStart[row] + awaited;
    const ended = timeText(timeline.ends[op], unit);
    sentences.push(`This gap of ${long} exists because ${name} waits for ${opName(model, op)}, which ends at ${ended}.`);
    sentences.push(...reasonsOf(model, timeline, op).map((link) => link.sentence));
  } else {
    sentences.push(`This gap of ${long} exists because ${name} has done everything, and the step goes on elsewhere.`);
  }
  if (last >= 0 && model.rowOf[last] !== row) sentences.push(`The step ends with ${placedName(model, last)}.`);
  return sentences;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
