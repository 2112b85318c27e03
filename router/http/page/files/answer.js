// One answer as it arrives: what the API streams, put together, and its times.

import { ApiError, checkResponse, events, url } from "./events.js";
import { keyHeaders } from "./keys.js";
import { requestBody } from "./conversation.js";

// Asks for an answer, and fills `message` as it comes; `changed` is called after each part. Ends
// early if `signal` says so, which cancels the request in the cluster. Throws what went wrong.
export async function receiveAnswer(messages, settings, message, signal, changed) {
  const times = { asked: performance.now(), first: null, last: null };
  const body = requestBody(messages, settings);
  const path = settings.plain ? "v1/completions" : "v1/chat/completions";
  let usage = null;
  let finish = "";
  try {
    const response = await fetch(url(path), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...keyHeaders("api") },
      body: JSON.stringify(body),
      signal,
    });
    await checkResponse(response);
    for await (const event of events(response)) {
      if (event.error) throw new ApiError(0, event.error.message ?? "the answer failed");
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) {
        finish = choice.finish_reason ?? finish;
        if (addDelta(message, choice.delta ?? { content: choice.text })) {
          times.last = performance.now();
          times.first ??= times.last;
        }
      }
      message.facts = factsOf(times, usage, finish);
      changed();
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    finish = "stopped";
    message.calls = message.calls.filter((call) => isJson(call.arguments));
  } finally {
    message.facts = factsOf(times, usage, finish);
  }
}

// Adds a part; returns whether it has anything.
function addDelta(message, delta) {
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  const content = delta.content ?? "";
  message.reasoning += reasoning;
  message.content += content;
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || content || delta.tool_calls?.length);
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// What is said below an answer. Tokens per second are those after the first token.
function factsOf(times, usage, finish) {
  const facts = [];
  if (times.first !== null) facts.push(`first token ${duration(times.first - times.asked)}`);
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (times.last - times.first) / 1000;
  if (tokens > 1 && seconds > 0) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const found = cached ? `, ${cached} of them cached` : "";
    facts.push(`${tokens} tokens after a prompt of ${usage.prompt_tokens}${found}`);
  }
  if (finish) facts.push(finish === "stopped" ? "stopped by you" : `ended by ${finish}`);
  return facts.join(" · ");
}

function duration(ms) {
  return ms < 9999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
