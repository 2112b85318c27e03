// The cluster as a drawing: router, prefill replicas, KV stores, decode replicas.

import { s } from "./dom.js";
import { number, stateOf, tierOf, usedKv } from "./samples.js";
import { endOf, percent } from "./texts.js";

const BOX = { width: 176, height: 50 };
const GAP = { between: 14, columns: 72, rows: 44 };
const TITLE_PX = 22;
const MAX_BOXES = 16;
const MARKS = { ready: "●", draining: "◐", ejected: "▲", lost: "✕", gone: "✕" };

// Returns the drawing, for a place that is `width` pixels wide.
export function topology(state, replicas, width) {
  const columns = columnsOf(state, replicas);
  const isWide = width >= columns.length * (BOX.width + GAP.columns) - GAP.columns;
  const size = isWide ? placeInColumns(columns) : placeInRows(columns, width);
  const boxes = columns.flatMap((column) => column.boxes);
  const edges = edgesOf(columns).map(([from, to, kind]) => edge(from, to, kind, isWide));
  return s("svg", {
    viewBox: `-2 -2 ${size.width + 4} ${size.height + 4}`,
    width: size.width + 4,
    height: size.height + 4,
    role: "img",
    "aria-label": summaryOf(columns),
  }, edges, columns.map(titleOf), boxes.map(boxOf));
}

function columnsOf(state, replicas) {
  const ofTier = (...tiers) => replicas.filter((replica) => tiers.includes(tierOf(replica)));
  const { num_processes: processes, activity } = state.cluster;
  const router = {
    title: "Router",
    text: number(processes) > 1 ? `${processes} processes` : `${number(activity?.num_running)} run`,
    state: "ready",
  };
  return [
    columnOf("Router", [router]),
    columnOf("Prefill", ofTier("prefill").map(replicaBox)),
    columnOf("KV between tiers", storeBoxes(state, replicas)),
    columnOf("Decode", ofTier("decode", "both", "unknown").map(replicaBox)),
  ].filter((column) => column.boxes.length > 0);
}

function columnOf(name, boxes) {
  const shown = boxes.slice(0, MAX_BOXES);
  const numHidden = boxes.length - shown.length;
  if (numHidden) shown.push({ title: `and ${numHidden} more`, text: "in the table below", state: "" });
  return { name, boxes: shown };
}

function replicaBox(replica) {
  const state = stateOf(replica);
  const load = replica.load
    ? `${number(replica.load.num_running)} run · KV ${percent(usedKv(replica))}`
    : (replica.problem ?? "");
  return { title: replica.address ?? "", text: `${state}${load && ` · ${load}`}`, state, replica };
}

// Stores by their identity; peers of one connector are one box, since each meets each.
function storeBoxes(state, replicas) {
  const connectors = new Map(state.configuration.workers.map((w) => [w.address, w.kv_connector]));
  const boxes = new Map();
  for (const replica of replicas) {
    for (const backend of replica.kv_backends ?? []) {
      const connector = connectors.get(replica.address) ?? "";
      const isStore = Boolean(backend.identity) || backend.name?.startsWith("KV store");
      const key = backend.identity || (isStore ? backend.name : connector);
      const title = isStore ? backend.name.replace("KV store ", "") : `${connector} peers`;
      const box = boxes.get(key) ?? { title, text: "", state: "ready", users: [] };
      box.users.push(replica.address);
      if (box.state === "ready") box.text = `reached by ${box.users.length}`;
      if (backend.problem) Object.assign(box, { text: backend.problem, state: "ejected" });
      boxes.set(key, box);
    }
  }
  return [...boxes.values()];
}

function placeInColumns(columns) {
  const tallest = Math.max(...columns.map((column) => column.boxes.length));
  const step = BOX.height + GAP.between;
  const height = TITLE_PX + tallest * step;
  columns.forEach((column, i) => {
    column.x = i * (BOX.width + GAP.columns);
    column.y = TITLE_PX - 8;
    const top = TITLE_PX + ((tallest - column.boxes.length) * step) / 2;
    column.boxes.forEach((box, j) => Object.assign(box, { x: column.x, y: top + j * step }));
  });
  return { width: columns.length * (BOX.width + GAP.columns) - GAP.columns, height };
}

function placeInRows(columns, width) {
  const perRow = Math.max(1, Math.floor((width + GAP.between) / (BOX.width + GAP.between)));
  let y = 0;
  for (const column of columns) {
    Object.assign(column, { x: 0, y: y + TITLE_PX - 8 });
    column.boxes.forEach((box, j) => {
      box.x = (j % perRow) * (BOX.width + GAP.between);
      box.y = y + TITLE_PX + Math.floor(j / perRow) * (BOX.height + GAP.between);
    });
    y = column.boxes.at(-1).y + BOX.height + GAP.rows;
  }
  const used = Math.min(perRow, Math.max(...columns.map((column) => column.boxes.length)));
  return { width: used * (BOX.width + GAP.between) - GAP.between, height: y - GAP.rows + 4 };
}

function edgesOf(columns) {
  const boxes = (name) => columns.find((column) => column.name === name)?.boxes ?? [];
  const [router] = boxes("Router");
  const calls = [...boxes("Prefill"), ...boxes("Decode")].filter((box) => box.replica);
  const stores = boxes("KV between tiers").filter((box) => box.users);
  const uses = (box, store) => box.replica && store.users.includes(box.replica.address);
  return [
    ...calls.map((box) => [router, box, "calls"]),
    ...stores.flatMap((store) => [
      ...boxes("Prefill").filter((box) => uses(box, store)).map((box) => [box, store, "kv"]),
      ...boxes("Decode").filter((box) => uses(box, store)).map((box) => [store, box, "kv"]),
    ]),
  ];
}

function edge(from, to, kind, isWide) {
  const [x1, y1] = isWide
    ? [from.x + BOX.width, from.y + BOX.height / 2]
    : [from.x + BOX.width / 2, from.y + BOX.height];
  const [x2, y2] = isWide ? [to.x, to.y + BOX.height / 2] : [to.x + BOX.width / 2, to.y];
  const bend = isWide
    ? `${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2}`
    : `${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2}`;
  return s("path", { class: `edge ${kind}`, d: `M${x1} ${y1}C${bend} ${x2} ${y2}` });
}

function titleOf(column) {
  return s("text", { class: "column", x: column.x, y: column.y }, column.name);
}

function boxOf(box) {
  const mark = MARKS[box.state] ? `${MARKS[box.state]} ` : "";
  return s("g", { class: `box ${box.state}`, transform: `translate(${box.x} ${box.y})` },
    s("title", {}, `${box.title}: ${box.text}`),
    s("rect", { width: BOX.width, height: BOX.height, rx: 7 }),
    s("text", { class: "name", x: 10, y: 20 }, endOf(box.title, 21)),
    s("text", { class: "state", x: 10, y: 38 }, `${mark}${box.text}`.slice(0, 27)));
}

function summaryOf(columns) {
  const parts = columns.map(({ name, boxes }) => {
    const states = boxes.map((box) => `${box.title} ${box.text}`);
    return `${name}: ${states.join(", ")}`;
  });
  return parts.join(". ");
}
