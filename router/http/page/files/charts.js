// Small charts of the last minutes.

import { s } from "./dom.js";
import { percent } from "./texts.js";

const WIDTH = 150;
const HEIGHT = 30;
const SPAN_MS = 5 * 60 * 1000;

// A chart of a replica's KV and running requests in the last five minutes. Gaps stay gaps.
export function loadChart(points, nowMs, seats) {
  const recent = points.filter((point) => point.timeMs >= nowMs - SPAN_MS);
  const top = Math.max(seats, 1, ...recent.map((point) => (point.running ?? 0) + (point.waiting ?? 0)));
  const x = (point) => WIDTH - ((nowMs - point.timeMs) / SPAN_MS) * WIDTH;
  const share = (value) => (value === null ? null : value / top);
  const kv = recent.map((point) => [x(point), point.kv]);
  const running = recent.map((point) => [x(point), share(point.running)]);
  const all = recent.map((point) => [x(point), share(sumOf(point))]);
  return s("svg", {
    class: "chart",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    width: WIDTH,
    height: HEIGHT,
    role: "img",
    "aria-label": labelOf(recent, top),
  },
    s("title", {}, labelOf(recent, top)),
    s("path", { class: "frame", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }),
    s("path", { class: "kv", d: areaOf(kv) }),
    s("path", { class: "waiting", d: lineOf(all) }),
    s("path", { class: "running", d: lineOf(running) }));
}

function sumOf(point) {
  return point.running === null ? null : point.running + point.waiting;
}

function heightOf(share) {
  return (HEIGHT - 1 - share * (HEIGHT - 3)).toFixed(1);
}

// Runs of points that have a value.
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 0);
}

function lineOf(points) {
  const at = ([x, share]) => `${x.toFixed(1)} ${heightOf(share)}`;
  return runsOf(points).map((run) => `M${run.map(at).join("L")}`).join("");
}

function areaOf(points) {
  const floor = HEIGHT - 1;
  return runsOf(points)
    .map((run) => `M${run[0][0].toFixed(1)} ${floor}${run
      .map(([x, share]) => `L${x.toFixed(1)} ${heightOf(share)}`)
      .join("")}L${run.at(-1)[0].toFixed(1)} ${floor}Z`)
    .join("");
}

function labelOf(points, top) {
  const known = points.filter((point) => point.kv !== null);
  if (!known.length) return "No load is known.";
  const shares = known.map((point) => point.kv);
  const last = known.at(-1);
  return `Last five minutes: KV now ${percent(last.kv)}, between ${percent(Math.min(...shares))} and `
    + `${percent(Math.max(...shares))}; ${last.running} requests run, ${last.waiting} wait; `
    + `the chart ends at ${top} requests and 100% KV.`;
}
