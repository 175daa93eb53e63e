"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const entries = report.checkpoints;
const byName = (id) => document.getElementById(id);
const two = (value) => value.toFixed(2);
const times = (value) => `${value.toFixed(2)}x`;
const percent = (value) => `${Math.round(100 * value)}%`;
let shown = Math.max(0, entries.findIndex((entry) => entry.name === report.best));

function figure(id, visible, draw, names = []) {
  const whole = byName(id);
  whole.hidden = !visible;
  if (!visible) return;
  Charts.legend(whole.querySelector(".legend"), names.length > 1 ? names : []);
  draw(whole.querySelector(".chart"));
}

const PLAIN = {name: "plain decoding"};
const named = (series) => series.map((s, i) => ({name: s.name, fill: Charts.colour(s.colour ?? i)}));

function acceptance() {
  const engines = report.engines.filter((one) => one.alpha_by_position).map((one) => ({...one, name: one.label}));
  const drawn = entries.filter((entry) => entry.alpha_by_position.length);
  const series = [...drawn.slice(-Math.max(1, 6 - engines.length)), ...engines].slice(0, 6).map((entry) => ({
    name: entry.tau === null ? entry.name : `${entry.name} (tau ${two(entry.tau)})`,
    points: entry.alpha_by_position.map(([y, low, high], i) => ({x: i + 1, y, low, high, lines: [
      `${entry.name}, position ${i + 1}`, `accepted ${(100 * y).toFixed(1)}%, if all earlier drafts were`,
      `95% interval ${percent(low)} to ${percent(high)}`]})),
  }));
  const y = {low: 0, high: 1, label: "acceptance", format: percent};
  figure("acceptance", series.length, (box) => Charts.lines(box, series, {label: "draft position", whole: true}, y), named(series));
}

function categories() {
  const slices = entries[shown].slices.filter((slice) => slice.by === "category" && slice.tau !== null);
  const predicted = slices.some((slice) => slice.expected_tau !== null);
  const interval = (slice, key) => key === "expected_tau" && slice.expected_tau_interval
    ? [`95% interval ${slice.expected_tau_interval.map(two).join(" to ")}`] : [];
  const value = (slice, key, what) => slice[key] === null ? null : {y: slice[key], lines: [
    slice.value, `${what} tau ${two(slice[key])}`, ...interval(slice, key), `${slice.prompts} prompts`,
    ...(slice.speedup === null ? [] : [`speedup ${times(slice.speedup)}`])]};
  const series = [{name: "measured", values: slices.map((slice) => value(slice, "tau", "measured"))}];
  if (predicted) series.push({name: "expected", colour: 5, values: slices.map((slice) => value(slice, "expected_tau", "expected"))});
  const most = Math.max(1, ...slices.map((slice) => Math.max(slice.tau, slice.expected_tau ?? 0)));
  const y = {low: 0, high: 1.1 * most, label: "tokens per verification", format: (v) => String(v)};
  figure("categories", slices.length > 1, (box) =>
    Charts.bars(box, slices.map((slice) => String(slice.value)), series, {label: "category"}, y, 1), [...named(series), PLAIN]);
}

function crossover(points) {
  for (let i = 1; i < points.length; i++) {
    const [a, b] = [points[i - 1], points[i]];
    if (a.y >= 1 && b.y < 1) {
      const share = (a.y - 1) / (a.y - b.y);
      return `faster than plain decoding up to a batch size of about ${Math.round(2 ** (Math.log2(a.x) + share * Math.log2(b.x / a.x)))}`;
    }
  }
  if (points.every((point) => point.y >= 1)) return "faster than plain decoding at every timed batch size";
  return points.every((point) => point.y < 1) ? "slower than plain decoding at every timed batch size" : "";
}

const timed = (entry, by) => entry.slices.filter((slice) => slice.by === by && slice.speedup !== null);
const batches = (entry) => timed(entry, "batch_size");

function speedups(id, by, label) {
  const places = [...new Set(entries.flatMap((entry) => timed(entry, by).map((slice) => slice.value)))].sort((a, b) => a - b);
  const series = entries.slice(-6).map((entry) => ({name: entry.name, values: places.map((place) => {
    const slice = timed(entry, by).find((one) => one.value === place);
    return slice ? {y: slice.speedup, low: slice.speedup_min, high: slice.speedup_max, lines: [
      `${entry.name}, ${label} ${place.toLocaleString("en")}`,
      `${times(slice.speedup)} (${two(slice.speedup_min)} to ${two(slice.speedup_max)})`, `tau ${two(slice.tau)}`,
      `${Math.round(slice.tokens_per_s)} tokens/s, plain ${Math.round(slice.baseline_tokens_per_s)}`]} : null;
  })}));
  const tops = entries.flatMap((entry) => timed(entry, by).map((slice) => slice.speedup_max));
  const y = {low: 0, high: 1.15 * Math.max(1, ...tops), label: "speedup", format: times};
  figure(id, places.length, (box) => Charts.bars(box, places.map((place) => place.toLocaleString("en")), series, {label}, y, 1),
    [...named(series), PLAIN]);
}

function batchSizes() {
  speedups("speedup", "batch_size", "batch");
  const points = batches(entries[shown]).map((slice) => ({x: slice.value, y: slice.speedup}));
  byName("crossover").textContent = points.length ? `${entries[shown].name}: ${crossover(points)}.` : "";
}

function engines() {
  const best = entries[shown], one = batches(best).find((slice) => slice.value === best.batch_size);
  const own = one && {...one, label: "drafttrain", batch_size: one.value, tau_here: null, exact_matches: null};
  const rows = own && report.engines.length ? [own, ...report.engines] : report.engines;
  const rate = (row, key, what) => row[key] === null ? null : {y: row[key], lines: [
    `${row.label}, ${what}`, `${row[key].toFixed(row[key] < 10 ? 1 : 0)} tokens/s`,
    `batch ${row.batch_size}, ${row.prompts} prompts`,
    ...(row.speedup === null ? [] : [`${times(row.speedup)} (${two(row.speedup_min)} to ${two(row.speedup_max)})`]),
    ...(row.tau === null ? [] : [`tau ${two(row.tau)}${row.tau_here === null ? "" : `, ours ${two(row.tau_here)}`}`]),
    ...(row.exact_matches === null ? [] : [`${row.exact_matches} outputs identical to its plain decoding`])]};
  const series = [{name: "speculative", values: rows.map((row) => rate(row, "tokens_per_s", "speculative"))},
    {name: "plain", colour: 5, values: rows.map((row) => rate(row, "baseline_tokens_per_s", "plain"))}];
  const most = Math.max(1, ...rows.flatMap((row) => [row.tokens_per_s ?? 0, row.baseline_tokens_per_s ?? 0]));
  const y = {low: 0, high: 1.1 * most, label: "tokens/s", format: (v) => v.toLocaleString("en")};
  figure("engines", rows.length, (box) => Charts.bars(box, rows.map((row) => row.label), series, {label: "engine"}, y, 0), named(series));
}

const temperatures = () => speedups("temperature", "temperature", "temperature");
const contexts = () => speedups("context", "context", "context");

function contextTaus() {
  const places = entries[shown].slices.filter((slice) => slice.by === "context" && slice.tau !== null).map((slice) => slice.value);
  const series = entries.slice(-6).map((entry) => ({name: entry.name, values: places.map((place) => {
    const slice = entry.slices.find((one) => one.by === "context" && one.value === place);
    if (!slice || slice.tau === null) return null;
    const [low, high] = slice.tau_interval ?? [slice.tau, slice.tau];
    return {y: slice.tau, low, high, lines: [`${entry.name}, ${place.toLocaleString("en")} tokens of context`,
      `tau ${two(slice.tau)}, 95% interval ${two(low)} to ${two(high)}`, `${slice.prompts} prompts`]};
  })}));
  const most = Math.max(1, ...series.flatMap((one) => one.values.map((value) => value?.high ?? 0)));
  const y = {low: 0, high: 1.1 * most, label: "tokens per verification", format: (v) => String(v)};
  figure("context-tau", places.length, (box) =>
    Charts.bars(box, places.map((place) => place.toLocaleString("en")), series, {label: "context"}, y, 1), [...named(series), PLAIN]);
}

const PARTS = [["draft", "draft_ms", 1], ["verify", "verify_ms", 0], ["commit", "commit_ms", 2], ["host", "host_ms", 4]];

function step() {
  const entry = entries[shown], timed = entry.plain_step_ms !== null;
  const draw = (box) => {
    const whole = PARTS.reduce((sum, [, key]) => sum + entry[key], 0);
    const parts = PARTS.map(([name, key, i]) => ({name, value: entry[key], colour: Charts.colour(i),
      lines: [name, `${entry[key].toFixed(3)} ms`, `${percent(entry[key] / whole)} of the step`]}));
    const plain = {name: "plain step", value: entry.plain_step_ms, colour: Charts.colour(5),
      lines: ["plain step", `${entry.plain_step_ms.toFixed(3)} ms`, "one token"]};
    Charts.stacks(box, [
      {name: `a speculative step: ${two(tauTimed(entry))} tokens`, parts}, {name: "a plain step: 1 token", parts: [plain]}], "ms");
  };
  figure("step", timed, draw, [...PARTS.map(([name, , i]) => ({name, fill: Charts.colour(i)})), {name: "plain", fill: Charts.colour(5)}]);
  byName("floor").textContent = !timed || entry.floor_fraction === null ? "" :
    `Memory floor: reading weights and cache once takes ${percent(entry.floor_fraction)} of the step. No step can be faster.`;
}

const tauTimed = (entry) => (batches(entry).find((slice) => slice.value === entry.batch_size) ?? entry).tau;

function waterfall() {
  const entry = entries[shown], visible = entry.plain_step_ms !== null && entry.speedup !== null;
  const draw = (box) => {
    const tau = tauTimed(entry);
    const steps = [{name: "ideal", value: tau, whole: true,
      lines: ["ideal", `${two(tau)} tokens per step on the timed prompts`, "if drafting were free and verifying cost one plain step"]}];
    let cost = 0, before = tau;
    for (const [name, key] of [["verify", "verify_ms"], ["draft", "draft_ms"], ["commit", "commit_ms"], ["host", "host_ms"]]) {
      cost += entry[key] / entry.plain_step_ms;
      const value = tau / cost;
      steps.push({name, value, lines: [name, `${two(entry[key] / entry.plain_step_ms)} plain steps`,
        `${times(before)} becomes ${times(value)}`]});
      before = value;
    }
    steps.push({name: "rest", value: entry.speedup, lines: ["rest", "time outside the parts of a step",
      `${times(before)} becomes ${times(entry.speedup)}`]});
    steps.push({name: "measured", value: entry.speedup, whole: true, lines: ["measured", `${times(entry.speedup)}`,
      `repeats ${two(entry.speedup_min)} to ${two(entry.speedup_max)}`]});
    const y = {low: 0, high: 1.12 * Math.max(...steps.map((s) => s.value)), label: "speedup", format: times};
    Charts.waterfall(box, steps, y, 1);
  };
  figure("waterfall", visible, draw, [{name: "tokens per step, or speedup", fill: Charts.colour(0)}, {name: "lost", fill: Charts.colour(3)}, PLAIN]);
}

// At most `most` points, each the mean of neighbours, because single batches scatter.
function means(points, most = 80) {
  const size = Math.ceil(points.length / most), found = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size), mean = (k) => part.reduce((sum, point) => sum + point[k], 0) / part.length;
    const [first, last] = [part[0][0], part[part.length - 1][0]].map((step) => step.toLocaleString("en"));
    found.push({x: mean(0), y: mean(1), label: first === last ? `step ${first}` : `steps ${first} to ${last}`});
  }
  return found;
}

function training() {
  for (const [id, label] of [["loss", "loss"], ["agreement", "agreement"], ["expected", "expected tau"]]) {
    const series = (report.curves[id] ?? []).map(({name, points}) => ({name,
      size: points.length > 20 ? 2 : name.includes("held-out") ? 7 : 4.5, // a ring is left where both points are the same
      points: means(points).map((point) => ({x: point.x, y: point.y, lines: [point.label, `${name} ${point.y.toPrecision(3)}`]}))}));
    const values = series.flatMap((s) => s.points.map((p) => p.y));
    const y = id === "agreement" ? {low: 0, high: 1, label, format: percent} :
      {low: Math.min(...values, id === "expected" ? 1 : 0), high: 1.05 * Math.max(...values), label, format: (v) => String(v)};
    figure(`training-${id}`, values.length, (box) => Charts.lines(box, series, {label: "step"}, y), named(series));
  }
}

function outputs() {
  const samples = entries[shown].samples ?? [];
  byName("outputs").hidden = !samples.length;
  byName("texts").replaceChildren(...samples.map((sample, number) => {
    const whole = document.createElement("details"), head = document.createElement("summary"), text = document.createElement("pre");
    const soft = document.createElement("span"), prompt = document.createElement("span");
    whole.open = number < 2;
    soft.className = prompt.className = "soft";
    soft.textContent = ` ${sample.category}, tau ${sample.tau === null ? "-" : two(sample.tau)}`
      + (sample.exact === "same" ? ", identical to plain decoding"
        : sample.exact ? `, differs from plain decoding (${sample.exact})` : "");
    head.append(`prompt ${sample.question_id}`, soft);
    prompt.textContent = sample.prompt;
    text.append(prompt, sample.first);
    for (const [drafted, accepted, own] of sample.runs) {
      if (accepted) {
        const run = document.createElement("mark");
        run.textContent = accepted;
        text.append(Charts.withTip(run, [`${drafted} ${drafted === 1 ? "draft" : "drafts"} accepted`]));
      }
      text.append(own);
    }
    whole.append(head, text);
    return whole;
  }));
}

function draw() {
  for (const part of [acceptance, categories, batchSizes, engines, temperatures, contexts, contextTaus, step, waterfall, training]) part();
}

const chooser = byName("chooser");
chooser.hidden = entries.length < 2;
entries.forEach((entry, i) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = entry.name + (entry.name === report.best ? " (best)" : "");
  button.addEventListener("click", () => choose(i));
  chooser.append(button);
});

function choose(i) {
  shown = i;
  [...chooser.querySelectorAll("button")].forEach((button, k) => button.setAttribute("aria-pressed", String(k === i)));
  draw();
  outputs();
}

choose(shown);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
