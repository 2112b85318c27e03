// The conversation and the settings, kept in this browser alone (localStorage).

const CONVERSATION = "baton.conversation";
const SETTINGS = "baton.settings";
const MAX_CHARS = 4_000_000; // browsers keep about 5 million for a site
const ROLES = ["user", "assistant", "tool"];

// The fields of the settings. A number that is left empty is the model's default.
export const FIELDS = [
  { name: "system", label: "System message", kind: "text" },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top-p", kind: "number", min: 0, max: 1, step: 0.01 },
  { name: "top_k", label: "Top-k", kind: "number", min: -1, step: 1 },
  { name: "min_p", label: "Min-p", kind: "number", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Most tokens", kind: "number", min: 1, step: 1 },
  { name: "seed", label: "Seed", kind: "number", step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { name: "stop", label: "Stop texts, one a line", kind: "text" },
  {
    name: "reasoning_effort",
    label: "Reasoning effort",
    kind: "choice",
    choices: ["", "none", "minimal", "low", "medium", "high"],
  },
  { name: "tools", label: "Tools: a JSON list, as in OpenAI's API", kind: "text" },
  { name: "plain", label: "Complete the message as plain text, without a chat template", kind: "switch" },
];

// The messages: `{role, content, reasoning, calls, callId, facts, problem}`; what is absent is empty.
export function loadConversation() {
  const stored = parsed(CONVERSATION);
  return Array.isArray(stored) ? stored.map(checkedMessage).filter(Boolean) : [];
}

// Returns whether there was room for it.
export function keepConversation(messages) {
  return keep(CONVERSATION, messages);
}

// The settings by name; all are texts, as the fields show them.
export function loadSettings() {
  const stored = parsed(SETTINGS) ?? {};
  const names = ["model", ...FIELDS.map((field) => field.name)];
  return Object.fromEntries(names.map((name) => [name, text(stored[name])]));
}

export function keepSettings(settings) {
  return keep(SETTINGS, settings);
}

function parsed(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // nothing that this page has written
  }
}

function keep(name, value) {
  const json = JSON.stringify(value);
  if (json.length > MAX_CHARS) return false;
  try {
    localStorage.setItem(name, json);
    return true;
  } catch {
    return false; // full, or turned off
  }
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function checkedMessage(stored) {
  if (!stored || !ROLES.includes(stored.role)) return null;
  const calls = Array.isArray(stored.calls) ? stored.calls : [];
  return {
    role: stored.role,
    content: text(stored.content),
    reasoning: text(stored.reasoning),
    calls: calls.map((call) => ({
      id: text(call?.id),
      name: text(call?.name),
      arguments: text(call?.arguments),
    })),
    callId: text(stored.callId),
    facts: text(stored.facts),
    problem: text(stored.problem),
  };
}

// The body of a request that continues the conversation. Throws an Error that names a bad setting.
export function requestBody(messages, settings) {
  const body = { model: settings.model || undefined, stream: true };
  body.stream_options = { include_usage: true };
  for (const field of FIELDS) {
    if (field.kind === "number" && settings[field.name].trim() !== "") {
      body[field.name] = numberOf(field, settings[field.name]);
    }
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (settings.plain) return { ...body, prompt: messages.at(-1)?.content ?? "" };
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.tools.trim()) body.tools = toolsOf(settings.tools);
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  body.messages = [...system, ...messages.filter(isSent).map(messageFields)];
  return body;
}

function numberOf(field, value) {
  const number = Number(value);
  if (!Number.isFinite(number)) throw new Error(`${field.label} is "${value}"; it must be a number`);
  return number;
}

function toolsOf(value) {
  try {
    const tools = JSON.parse(value);
    if (Array.isArray(tools)) return tools;
  } catch {
    // The same message as for what is no list.
  }
  throw new Error("Tools is not a JSON list");
}

// An answer that was stopped before its first token says nothing.
function isSent(message) {
  return message.role !== "assistant" || message.content !== "" || message.calls.length > 0;
}

function messageFields(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.callId, content: message.content };
  }
  const fields = { role: message.role, content: message.content };
  if (message.reasoning) fields.reasoning_content = message.reasoning;
  if (message.calls.length) {
    fields.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return fields;
}
