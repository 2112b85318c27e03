// The view of the cluster's state. It asks while it is shown and the tab is visible, at the pace
// that the router names; nothing is asked or computed otherwise.

import { announce, h, update } from "./dom.js";
import { checkResponse, url } from "./events.js";
import { keyHeaders, openKeys } from "./keys.js";
import { Samples } from "./samples.js";
import { sections } from "./status_sections.js";

const RETRY_MS = 2000;
const TIMEOUT_MS = 15000;

export class StatusView {
  constructor(element) {
    this.element = element;
    this.samples = new Samples();
    this.isShown = false;
    this.isPaused = false;
    this.isLooking = false;
    this.isAskedAgain = false; // during a look
    this.problem = "";
    this.timer = null;
    element.addEventListener("click", (event) => this.act(event));
    document.addEventListener("visibilitychange", () => this.retry());
    window.addEventListener("resize", () => this.draw());
  }

  setShown(isShown) {
    this.isShown = isShown;
    this.retry();
  }

  // Asks now, if anybody looks.
  retry() {
    clearTimeout(this.timer);
    if (this.isShown && !document.hidden && !this.isPaused) this.look();
  }

  async look() {
    this.isAskedAgain = this.isLooking;
    if (this.isLooking) return;
    this.isLooking = true;
    let pauseMs = RETRY_MS;
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      const response = await fetch(url("status"), { headers: keyHeaders("operator"), signal });
      await checkResponse(response);
      const state = await response.json();
      this.samples.add(state);
      pauseMs = state.interval_s * 1000;
      this.setProblem("");
    } catch (error) {
      if (error.status === 401 && !this.problem) openKeys();
      this.setProblem(error.message);
      // Another try would get the same answer until there is another key.
      if (error.status === 401 || error.status === 403) pauseMs = null;
    } finally {
      this.isLooking = false;
    }
    this.draw();
    clearTimeout(this.timer);
    if (pauseMs === null && this.isAskedAgain) pauseMs = 0; // the key was changed meanwhile
    if (pauseMs !== null) this.timer = setTimeout(() => this.retry(), pauseMs);
  }

  setProblem(problem) {
    if (problem && problem !== this.problem) announce(`The router does not answer: ${problem}`);
    this.problem = problem;
  }

  draw() {
    if (!this.isShown) return;
    const width = this.element.clientWidth;
    update(this.element, this.head(), this.samples.now ? sections(this.samples, width) : this.waiting());
  }

  head() {
    const problem = this.problem && h("p", { class: "notice bad" }, this.problem, " ",
      h("button", { type: "button", "data-action": "keys" }, "Enter keys"));
    const label = this.isPaused ? "Go on" : "Pause";
    return h("div", { "data-key": "head" }, problem || null,
      h("div", { class: "row" },
        h("button", { type: "button", "data-action": "pause", "aria-pressed": String(this.isPaused) }, label),
        h("span", { class: "small dim" }, this.age())));
  }

  age() {
    const { now } = this.samples;
    if (!now) return "";
    const every = `a look every ${now.interval_s} s while this is open`;
    return `As of ${new Date(now.time_s * 1000).toLocaleTimeString([], { hour12: false })}, ${every}.`;
  }

  waiting() {
    return this.problem ? null : h("p", { class: "dim" }, "Asking the router ...");
  }

  act(event) {
    const action = event.target.closest("button[data-action]")?.dataset.action;
    if (action === "keys") openKeys();
    if (action !== "pause") return;
    this.isPaused = !this.isPaused;
    this.draw();
    this.retry();
  }
}
