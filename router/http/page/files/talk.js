// The view to talk to a model.

import { receiveAnswer } from "./answer.js";
import { keepConversation, keepSettings, loadConversation, loadSettings } from "./conversation.js";
import { announce } from "./dom.js";
import { checkResponse, url } from "./events.js";
import { keyHeaders, openKeys } from "./keys.js";
import { MessageView } from "./message_view.js";
import { SettingsView } from "./settings_view.js";

const BOTTOM_PX = 80;
const WIDE = "(min-width: 62rem)";

export class TalkView {
  constructor() {
    this.messages = loadConversation();
    this.settings = loadSettings();
    this.views = [];
    this.aborting = null;
    this.isShown = false;
    this.hasModels = false;
    this.list = document.getElementById("messages");
    this.prompt = document.getElementById("prompt");
    const fields = document.getElementById("settings-fields");
    this.settingsView = new SettingsView(fields, this.settings, () => keepSettings(this.settings));
    document.getElementById("settings").open = matchMedia(WIDE).matches;
    this.listen();
    this.messages.forEach((message) => this.show(message));
    this.showButtons();
  }

  listen() {
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    document.getElementById("stop").addEventListener("click", () => this.stop());
    document.getElementById("regenerate").addEventListener("click", () => this.regenerate());
    document.getElementById("clear").addEventListener("click", () => this.clear());
    this.list.addEventListener("click", (event) => this.act(event));
    this.list.addEventListener("submit", (event) => this.sendResult(event));
  }

  setShown(isShown) {
    this.isShown = isShown;
    if (!this.hasModels) this.retry();
  }

  // Asks for the models that this key may use, if anybody looks.
  async retry() {
    if (!this.isShown) return;
    try {
      const response = await fetch(url("v1/models"), { headers: keyHeaders("api") });
      await checkResponse(response);
      const names = (await response.json()).data.map((model) => model.id);
      this.settingsView.showModels(names, "");
      this.hasModels = true;
    } catch (error) {
      this.settingsView.showModels([], `The models are not known: ${error.message}`);
      if (error.status === 401) openKeys();
    }
  }

  send() {
    const content = this.prompt.value;
    if (content.trim() === "" || this.aborting) return;
    this.prompt.value = "";
    this.add({ role: "user", content });
    this.answer();
  }

  stop() {
    this.aborting?.abort();
  }

  // Drops the last answer and asks for another one.
  regenerate() {
    if (this.aborting || !this.messages.length) return;
    if (this.messages.at(-1).role === "assistant") {
      this.messages.pop();
      this.views.pop().element.remove();
    }
    if (this.messages.length) this.answer();
  }

  clear() {
    this.stop();
    this.aborting = null; // what still comes is for a conversation that is gone
    this.messages = [];
    this.views = [];
    this.list.replaceChildren();
    this.keep();
    this.showButtons();
    this.prompt.focus();
  }

  async answer() {
    const asked = this.messages.slice();
    const { message, view } = this.add({ role: "assistant" });
    const aborting = new AbortController();
    this.aborting = aborting;
    this.showButtons();
    announce("The model answers.");
    let isDrawing = false;
    const changed = () => {
      if (isDrawing) return;
      isDrawing = true;
      requestAnimationFrame(() => {
        isDrawing = false;
        this.refresh(view);
      });
    };
    try {
      await receiveAnswer(asked, this.settings, message, aborting.signal, changed);
      announce("The answer is complete.");
    } catch (error) {
      message.problem = error.message;
      if (error.status === 401) openKeys();
    } finally {
      if (this.aborting === aborting) this.aborting = null;
      this.refresh(view);
      this.keep();
      this.showButtons();
    }
  }

  add(fields) {
    const empty = { content: "", reasoning: "", calls: [], callId: "", facts: "", problem: "" };
    const message = { ...empty, ...fields };
    this.messages.push(message);
    const view = this.show(message);
    this.keep();
    return { message, view };
  }

  show(message) {
    const view = new MessageView(message, this.views.length);
    this.views.push(view);
    this.list.append(view.element);
    const page = document.scrollingElement;
    page.scrollTop = page.scrollHeight;
    return view;
  }

  // Shows what is new, and stays at the end if the end is in sight.
  refresh(view) {
    const page = document.scrollingElement;
    const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < BOTTOM_PX;
    view.refresh();
    if (isAtEnd) page.scrollTop = page.scrollHeight;
  }

  keep() {
    const isKept = keepConversation(this.messages);
    document.getElementById("kept").textContent = isKept
      ? "The conversation is kept in this browser alone."
      : "The conversation is too long to be kept; it ends with this tab.";
  }

  showButtons() {
    const isBusy = this.aborting !== null;
    document.getElementById("send").hidden = isBusy;
    document.getElementById("stop").hidden = !isBusy;
    document.getElementById("regenerate").disabled = isBusy || this.messages.length === 0;
    document.getElementById("clear").disabled = this.messages.length === 0;
  }

  async act(event) {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    const number = Number(button.closest("li").dataset.number);
    const code = button.closest("figure")?.querySelector("code");
    const text = button.dataset.action === "copy" ? this.messages[number].content : code.textContent;
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied.");
    } catch {
      announce("The browser does not let this page copy.");
    }
  }

  // Adds what a tool has returned; once all calls have a result, the model goes on.
  sendResult(event) {
    event.preventDefault();
    if (this.aborting) return;
    const form = event.target;
    const asking = this.messages.findLast((message) => message.role === "assistant");
    const { call: callId } = form.dataset;
    if (!asking?.calls.some((call) => call.id === callId)) return;
    if (this.messages.some((message) => message.callId === callId)) return;
    this.add({ role: "tool", callId, content: form.querySelector("textarea").value });
    for (const control of form.elements) control.disabled = true;
    const answered = new Set(this.messages.map((message) => message.callId));
    if (asking.calls.every((call) => answered.has(call.id))) this.answer();
  }
}
