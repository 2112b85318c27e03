// The form of the settings.

import { h } from "./dom.js";
import { FIELDS } from "./conversation.js";

// Shows the settings in `element`; changes are written to `settings`, then `changed` is called.
export class SettingsView {
  constructor(element, settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.models = h("select", { id: "setting-model" });
    this.note = h("p", { class: "small dim", role: "status" });
    element.append(labelled("Model", this.models), this.note, ...FIELDS.map((field) => this.field(field)));
    this.models.addEventListener("change", () => this.set("model", this.models.value));
  }

  // Offers models by their names, or says why they are not known.
  showModels(names, problem) {
    this.models.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    this.note.textContent = problem;
    const isKnown = names.includes(this.settings.model);
    if (names.length && !isKnown) this.set("model", names[0]);
    this.models.value = this.settings.model;
  }

  set(name, value) {
    this.settings[name] = value;
    this.changed();
  }

  field(field) {
    const id = `setting-${field.name}`;
    const control = controlOf(field, id);
    if (field.kind === "switch") {
      control.checked = this.settings[field.name] !== "";
      control.addEventListener("change", () => this.set(field.name, control.checked ? "yes" : ""));
      return h("label", { class: "row" }, control, field.label);
    }
    control.value = this.settings[field.name];
    control.addEventListener("input", () => this.set(field.name, control.value));
    return labelled(field.label, control);
  }
}

function labelled(text, control) {
  return h("label", {}, text, control);
}

function controlOf(field, id) {
  const { kind, min, max, step } = field;
  if (kind === "text") return h("textarea", { id, rows: "2", spellcheck: "false" });
  if (kind === "switch") return h("input", { id, type: "checkbox" });
  if (kind === "choice") {
    const options = field.choices.map((name) => h("option", { value: name }, name || "default"));
    return h("select", { id }, options);
  }
  return h("input", { id, type: "number", min, max, step, placeholder: "default", inputmode: "decimal" });
}
