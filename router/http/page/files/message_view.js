// One message of the conversation on the screen.

import { h } from "./dom.js";
import { codeBlock, MarkdownView } from "./markdown.js";

const TITLES = { user: "You", assistant: "Model", tool: "Result of a tool" };

// Shows a message, which may grow; `refresh` shows what has changed.
export class MessageView {
  constructor(message, number) {
    this.message = message;
    const body = h("div", { class: "text" });
    this.body = message.role === "assistant" ? new MarkdownView(body) : plainView(body);
    this.thought = new MarkdownView(h("div", { class: "text" }));
    this.reasoning = h("details", { class: "reasoning", hidden: true },
      h("summary", {}, "Reasoning"), this.thought.element);
    this.calls = h("div", { class: "calls" });
    this.facts = h("span", { class: "facts small dim grow" });
    this.problem = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.element = h("li", { class: `message ${message.role}`, "data-number": number },
      h("h2", { class: "small dim" }, TITLES[message.role]),
      this.reasoning, body, this.calls, this.problem,
      h("div", { class: "row" }, this.facts,
        h("button", { type: "button", class: "small", "data-action": "copy" }, "Copy")));
    this.shownCalls = "";
    this.refresh();
  }

  refresh() {
    const { message } = this;
    this.reasoning.hidden = message.reasoning === "";
    if (message.reasoning) this.thought.update(message.reasoning);
    this.body.update(message.content);
    this.facts.textContent = message.facts;
    this.problem.hidden = message.problem === "";
    this.problem.textContent = message.problem;
    this.showCalls();
  }

  // Their forms are kept while nothing changes, since somebody may be writing in them.
  showCalls() {
    const calls = JSON.stringify(this.message.calls);
    if (calls === this.shownCalls) return;
    this.shownCalls = calls;
    this.calls.replaceChildren(...this.message.calls.map(callView));
  }
}

function plainView(element) {
  return { element, update: (text) => { element.textContent = text; } };
}

function callView(call, number) {
  const name = `result-${call.id || number}`;
  return h("form", { class: "call", "data-call": call.id },
    h("p", { class: "small" }, "Calls ", h("code", {}, call.name)),
    codeBlock(indented(call.arguments), "arguments"),
    h("label", { class: "small", for: name }, "Result of the tool"),
    h("textarea", { id: name, rows: "2" }),
    h("button", { type: "submit", class: "small" }, "Send the result"));
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // it is still arriving, or the model has written no JSON
  }
}
