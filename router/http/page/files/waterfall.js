// Requests that have ended, with the stages of each.

import { h, s } from "./dom.js";
import { number } from "./samples.js";
import { clockTime, endOf, milliseconds, seconds } from "./texts.js";

const BAR = { width: 1000, height: 14 };
const STAGE_HEADS = ["stage", "where", "", "starts", "takes"];
const KINDS = [
  ["failed", "failed"],
  ["queue", "queue"],
  ["wait", "queue"],
  ["prefill", "prefill"],
  ["transfer", "transfer"],
  ["load", "load"],
  ["decode", "decode"],
  ["rpc", "rpc"],
];

// A list of requests that unfold.
export function requestList(traces) {
  if (!traces.length) return h("p", { class: "dim" }, "No request has ended yet.");
  const longest = Math.max(...traces.map((trace) => number(trace.total_ms)), 1e-6);
  const seen = new Map(); // requests of two tenants may have one id
  return h("ul", { class: "requests" }, traces.map((trace) => {
    const count = (seen.get(trace.request_id) ?? 0) + 1;
    seen.set(trace.request_id, count);
    return requestItem(trace, longest, `${count} ${trace.request_id}`);
  }));
}

function requestItem(trace, longest, key) {
  const total = number(trace.total_ms);
  const isFailed = /^[A-Z_]+$/.test(trace.outcome ?? "");
  return h("li", { "data-key": key },
    h("details", {},
      h("summary", {},
        h("span", { class: "dim" }, clockTime(number(trace.arrived_s) * 1000)),
        h("span", { class: "id" }, endOf(trace.request_id, 28)),
        h("span", { class: isFailed ? "bad" : "" }, trace.outcome ?? ""),
        h("span", {}, `first token ${milliseconds(trace.first_token_ms)}`),
        h("span", {}, milliseconds(total)),
        bar(trace.stages ?? [], longest)),
      details(trace, total)));
}

function details(trace, total) {
  const usage = trace.usage ?? {};
  const facts = [
    `model ${trace.model}`,
    trace.tenant && `tenant ${trace.tenant}`,
    `${number(usage.prompt_tokens)} prompt tokens, ${number(usage.cached_tokens)} of them cached, `
      + `${number(usage.completion_tokens)} generated`,
    trace.trace_id && `trace ${trace.trace_id}`,
  ];
  return [
    h("p", { class: "small" }, h("code", {}, trace.request_id), ` ${facts.filter(Boolean).join(" · ")}`),
    h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Stages" },
      h("table", { class: "stages" },
        h("thead", {}, h("tr", {}, STAGE_HEADS.map((text, i) => h("th", { class: i > 2 && "right" }, text)))),
        h("tbody", {}, (trace.stages ?? []).map((stage) => stageRow(stage, total))))),
    (trace.choices ?? []).map(choice),
  ];
}

function stageRow(stage, total) {
  const start = number(stage.start_ms);
  const length = number(stage.end_ms) - start;
  return h("tr", {}, h("td", {}, stage.name ?? ""), h("td", {}, endOf(stage.where, 24)),
    h("td", {}, bar([stage], total)), h("td", { class: "right" }, milliseconds(start)),
    h("td", { class: "right" }, milliseconds(length)));
}

function bar(stages, longest) {
  const place = (ms) => (ms / Math.max(longest, 1e-6)) * BAR.width;
  const rects = stages.map((stage) => {
    const x = place(number(stage.start_ms));
    const width = Math.max(place(number(stage.end_ms)) - x, 2);
    return s("rect", { class: `stage ${kindOf(stage.name ?? "")}`, x, width, y: 1, height: BAR.height - 2 },
      s("title", {}, `${stage.name}: ${milliseconds(number(stage.end_ms) - number(stage.start_ms))}`));
  });
  return s("svg", {
    class: "bar",
    viewBox: `0 0 ${BAR.width} ${BAR.height}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  }, rects);
}

function kindOf(name) {
  return KINDS.find(([part]) => name.includes(part))?.[1] ?? "other";
}

// Why a replica was chosen.
function choice({ tier, policy, reason, num_candidates: candidates, costs = [] }) {
  const texts = costs.map((cost) =>
    `${cost.replica} ${seconds(number(cost.seconds))} (queue ${seconds(number(cost.queue_s))}, `
      + `compute ${seconds(number(cost.compute_s))}, load ${seconds(number(cost.load_s))})`);
  return h("p", { class: "small" },
    `${tier}: ${reason} (${policy}, ${number(candidates)} replicas)`,
    texts.length > 0 && h("span", { class: "dim" }, ` ${texts.join("; ")}`));
}

// What the colours mean.
export function legend() {
  const kinds = [...new Set(KINDS.map(([, kind]) => kind)), "other"];
  return h("p", { class: "legend small", "aria-hidden": "true" },
    kinds.map((kind) => h("span", {}, s("svg", { viewBox: "0 0 10 10", width: 10, height: 10 },
      s("rect", { class: `stage ${kind}`, width: 10, height: 10 })), ` ${kind} `)));
}
