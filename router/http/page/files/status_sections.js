// The parts of the status.

import { loadChart } from "./charts.js";
import { h } from "./dom.js";
import { BAD_STATES, keyOf, number, stateOf, tierOf, usedKv } from "./samples.js";
import { clockTime, duration, endOf, milliseconds, percent, seconds, short } from "./texts.js";
import { topology } from "./topology.js";
import { legend, requestList } from "./waterfall.js";

const queries = (replica) => number(replica.load?.prefix_cache_queries);
const hits = (replica) => number(replica.load?.prefix_cache_hits);
const generated = (replica) => number(replica.counters?.generated_tokens);
const prompts = (replica) => number(replica.counters?.prompt_tokens);
const loaded = (replica) => number(replica.counters?.loaded_tokens);
const failedTransfers = (replica) => number(replica.counters?.failed_transfers);

// Returns all parts, for a place that is `width` pixels wide.
export function sections(samples, width) {
  const state = samples.now;
  const replicas = samples.shownReplicas();
  return [
    warnings(state),
    section("overview", "Overview", overview(samples)),
    section("cluster", "Cluster", h("div", { class: "drawing" }, topology(state, replicas, width))),
    section("replicas", "Replicas", replicaTable(samples, replicas, state)),
    section("changes", "Changes since this page was opened", changeList(samples)),
    section("errors", "Recent errors", errorList(state.cluster.activity)),
    section("recent", "Recent requests", legend(), requestList(state.recent)),
    section("slowest", "Slowest of the last requests", requestList(state.slowest)),
    section("index", "Prefix index", prefixIndex(state.prefix_index)),
    section("configuration", "Configuration", configuration(state.configuration)),
  ];
}

function section(key, title, ...children) {
  return h("section", { "data-key": key, "aria-labelledby": `title-${key}` },
    h("h2", { id: `title-${key}` }, title), children);
}

function table(label, heads, rows) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads.map(headCell))),
      h("tbody", {}, rows)));
}

// A name that begins with ">" is that of a column of numbers.
function headCell(name) {
  const isNumber = name.startsWith(">");
  return h("th", { scope: "col", class: isNumber && "right" }, isNumber ? name.slice(1) : name);
}

function warnings(state) {
  const problems = state.cluster.replicas?.flatMap((replica) =>
    (replica.kv_backends ?? []).filter((backend) => backend.problem)
      .map((backend) => `${replica.address}: ${backend.name} ${backend.problem}`)) ?? [];
  const texts = [...(state.cluster.warnings ?? []), ...problems];
  return h("div", { "data-key": "warnings" },
    texts.slice(0, 20).map((text) => h("p", { class: "notice bad" }, text)));
}

function overview(samples) {
  const { activity = {}, uptime_s: uptime, version, num_processes: processes } = samples.now.cluster;
  const sum = (counts) => Object.values(counts ?? {}).reduce((total, count) => total + number(count), 0);
  const finished = (state) => sum(state.cluster.activity?.finished);
  const failed = (state) => sum(state.cluster.activity?.failed);
  const waiting = Object.entries(activity.waiting ?? {}).filter(([, count]) => number(count))
    .map(([model, count]) => `${model}: ${count}`);
  const several = number(processes) > 1 ? `, ${processes} processes` : "";
  const codes = Object.entries(activity.failed ?? {}).map(([code, count]) => `${count} ${code}`);
  const facts = [
    ["Router", `version ${version}, up ${duration(uptime ?? 0)}${several}`],
    ["Requests", `${number(activity.num_running)} running, ${short(samples.rate(finished))}/s, `
      + `${short(finished(samples.now))} finished, ${number(activity.finished?.CANCELLED)} cancelled, `
      + `${number(activity.num_resumes)} resumed`],
    ["Waiting queue", `${sum(activity.waiting)} waiting${waiting.length ? ` (${waiting.join(", ")})` : ""}`],
    ["Errors", `${short(samples.rate(failed))}/s, ${short(failed(samples.now))} in all`
      + `${codes.length ? ` (${codes.join(", ")})` : ""}, ${short(sum(activity.refused))} calls refused`],
    ["Tokens", tokens(samples)],
    ["First token", times(activity.first_token)],
    ["Time per token", times(activity.token)],
  ];
  return h("dl", { class: "facts" }, facts.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

function tokens(samples) {
  const replicas = samples.replicas();
  const total = (countOf) => {
    const growths = replicas.map((replica) => samples.growth(replica, countOf)).filter((n) => n !== null);
    return growths.length ? growths.reduce((all, growth) => all + growth, 0) : null;
  };
  const per = (growth) => (growth === null ? null : growth / (samples.now.time_s - samples.before.time_s));
  const share = (part, whole) => (total(whole) ? percent(total(part) / total(whole)) : "-");
  const failures = replicas.reduce((sum, replica) => sum + failedTransfers(replica), 0);
  return `${short(per(total(generated)))}/s generated, ${short(per(total(prompts)))}/s of prompts, `
    + `${share(hits, queries)} prefix hits, ${share(loaded, prompts)} loaded, ${failures} failed transfers`;
}

function times(recent) {
  if (!number(recent?.count)) return "no request ended in the last minute";
  return `${milliseconds(number(recent.p50_ms))} (median), ${milliseconds(number(recent.p99_ms))} (99%), `
    + `${recent.count} requests of the last minute`;
}

function replicaTable(samples, replicas, state) {
  const hidden = number(state.num_hidden_replicas);
  const heads = ["tier", "replica", "state", ">run", ">wait", ">queue", ">KV", ">tokens/s", ">prompt/s",
    ">hits", "last five minutes"];
  return [
    replicas.length
      ? table("Replicas", heads, replicas.map((replica) => replicaRow(samples, replica)))
      : h("p", { class: "notice bad" }, "No replica has been found yet."),
    hidden > 0 && h("p", { class: "dim" }, `${hidden} more replicas are not shown.`),
    h("p", { class: "legend small", "aria-hidden": "true" },
      h("span", { class: "key-kv" }, "KV"), h("span", { class: "key-running" }, "running"),
      h("span", { class: "key-waiting" }, "running and waiting")),
  ];
}

function replicaRow(samples, replica) {
  const state = stateOf(replica);
  const { load } = replica;
  const several = new Set(samples.replicas().map((other) => other.model)).size > 1;
  const start = [
    h("td", {}, tierOf(replica)),
    h("th", { scope: "row" }, endOf(replica.address, 40), several && h("span", { class: "dim" }, ` ${replica.model}`)),
    h("td", { class: `state ${state}` }, state),
  ];
  const chart = h("td", {}, loadChart(samples.points.get(keyOf(replica)) ?? [],
    samples.now.time_s * 1000, samples.seats.get(replica.address) ?? 1));
  if (BAD_STATES.includes(state) && !load) {
    return h("tr", { "data-key": keyOf(replica) }, start,
      h("td", { colspan: 7, class: "bad" }, replica.problem ?? ""), chart);
  }
  const looked = samples.growth(replica, queries);
  const rate = looked ? samples.growth(replica, hits) / looked : replica.hit_rate;
  const cells = [
    number(load?.num_running), number(load?.num_waiting), seconds(number(replica.backlog_s)),
    percent(usedKv(replica)), short(samples.replicaRate(replica, generated)),
    short(samples.replicaRate(replica, prompts)), percent(rate),
  ];
  return h("tr", { "data-key": keyOf(replica) }, start, cells.map((cell) => h("td", { class: "right" }, cell)), chart);
}

function changeList(samples) {
  if (!samples.changes.length) return h("p", { class: "dim" }, "None.");
  return table("Changes", ["time", "tier", "replica", "state", "what happened"], samples.changes.map((change) =>
    h("tr", {}, h("td", {}, clockTime(change.timeMs)), h("td", {}, change.tier),
      h("td", {}, endOf(change.address, 40)),
      h("td", { class: `state ${change.state}` }, change.state), h("td", {}, change.text))));
}

function errorList(activity) {
  const errors = activity?.errors ?? [];
  if (!errors.length) return h("p", { class: "dim" }, "None. Clients' mistakes are counted only.");
  return table("Recent errors", ["time", "error", "request", "message"], errors.map((error) =>
    h("tr", {}, h("td", {}, clockTime(number(error.time_s) * 1000)), h("td", { class: "bad" }, error.code ?? ""),
      h("td", {}, h("code", {}, endOf(error.request_id, 40))), h("td", {}, error.message ?? ""))));
}

function prefixIndex(counts) {
  if (!counts.length) return h("p", { class: "dim" }, "No replica tells of its prefix cache.");
  return table("Prefix index", ["tier", "replica", ">blocks known here", ">blocks on the replica", "news"],
    counts.map((count) => h("tr", {}, h("td", {}, count.tier), h("td", {}, endOf(count.replica, 40)),
      h("td", { class: "right" }, short(count.believed)), h("td", { class: "right" }, short(count.held)),
      h("td", {}, newsOf(count)))));
}

function newsOf(count) {
  if (count.lacks_events) return "none; only prompts that were sent there count";
  return count.staleness_s > 0 ? `${seconds(count.staleness_s)} late` : "up to date";
}

function configuration({ router, workers }) {
  const rows = workers.map((worker) => h("tr", {},
    h("th", { scope: "row" }, endOf(worker.address, 40)), h("td", {}, worker.model), h("td", {}, worker.kv_form),
    h("td", {}, worker.kv_connector || "none"),
    h("td", { class: "right" }, `${short(worker.num_blocks)} × ${worker.pool_block_size}`),
    h("td", { class: "right" }, short(worker.max_model_len)), h("td", { class: "right" }, worker.max_num_seqs)));
  const heads = ["worker", "model", "KV", "connector", ">blocks × tokens", ">longest sequence", ">seats"];
  return [
    h("details", {}, h("summary", {}, "Flags of the router that are not at their defaults"),
      h("pre", { tabindex: "0" }, router.join("\n") || "none")),
    h("details", {}, h("summary", {}, "Connected workers"), table("Connected workers", heads, rows)),
  ];
}
