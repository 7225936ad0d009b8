// The six figures beside a timeline, as rows of a table. Python computes the figures; this script formats them.

import { timeText } from "./scale.js";

/** Smallest share of the mean by which a rank that computes longer than the others is named as a straggler. */
const UNEQUAL = 0.0005;

/** Rows of the table: label, text for each timeline, difference between the last and the first, and explanation. */
export function figureRows(model) {
  const all = model.timelines.map((timeline) => timeline.figures);
  const unit = model.header.unit;
  const rows = [];
  const add = (label, values, text, about = "", indented = false, none = "–") => {
    const known = values.every((value) => value !== null && value !== undefined);
    const difference = values.length > 1 && known ? signed(values.at(-1) - values[0], text) : "";
    rows.push({ label, values: values.map((value) => (value == null ? none : text(value))), difference, about, indented });
  };
  add("step", all.map((each) => each.end), (value) => timeText(value, unit), "From the start of the first op to the end of the last one.");
  add("compute", all.map((each) => each.compute), percent, "Share of the step, mean over ranks.");
  add(
    "exposed communication",
    all.map((each) => each.exposed_communication),
    percent,
    "Share of the step in which a rank communicates but does not compute.",
  );
  const hidden = "Share of the communication that runs during compute.";
  add("overlap", all.map((each) => each.overlap), percent, hidden, false, "no communication");
  const causes = [...new Set(all.flatMap((each) => Object.keys(each.idle)))];
  const idle = (each) => Object.values(each.idle).reduce((sum, share) => sum + share, 0);
  add("idle", all.map(idle), percent, "Share of the step in which a rank neither computes nor communicates.");
  for (const cause of causes) add(cause, all.map((each) => each.idle[cause] ?? 0), percent, "", true);
  if (all.some((each) => each.bubble_with_communication !== null)) {
    const about = "Share of the time from the first to the last pass, if communication took no time.";
    if (all[0].bubble !== null) add("bubble", all.map((each) => each.bubble), percent, about);
    add("bubble with communication", all.map((each) => each.bubble_with_communication), percent);
    if (all[0].bubble_closed_form !== null) {
      add("closed form", all.map((each) => each.bubble_closed_form), percent, all[0].bubble_formula, true);
    }
  }
  const excess = all.map((each) => (each.straggler.excess >= UNEQUAL ? each.straggler.excess : null));
  const longest = model.header.rows[all.at(-1).straggler.row].name;
  const straggler = excess.some((value) => value !== null) ? `straggler: ${longest}` : "straggler";
  add(straggler, excess, (value) => `+${percent(value)}`, "Compute of the rank that computes longest, beyond the mean.", false, "none");
  return rows;
}

export function percent(share) {
  const tenths = 1000 * share;
  const isTie = tenths - Math.floor(tenths) === 0.5; // rounded to even, as in the terminal
  return `${((isTie ? 2 * Math.round(tenths / 2) : Math.round(tenths)) / 10).toFixed(1)} %`;
}

function signed(difference, text) {
  const written = text(Math.abs(difference)).replace("+", "");
  return `${difference < 0 ? "−" : "+"}${written}`;
}
