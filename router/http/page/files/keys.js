// The API key and the cluster's token. They are kept for this tab, in sessionStorage.

const NAMES = { api: "baton.api-key", operator: "baton.operator-token" };

// The headers that show a key: "api" for calls of the API, "operator" for the status.
export function keyHeaders(kind) {
  const key = sessionStorage.getItem(NAMES[kind]);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Connects the dialogue; `changed` is called when keys have been saved.
export function setUpKeys(changed) {
  const dialog = document.getElementById("keys");
  const inputs = {
    api: document.getElementById("api-key"),
    operator: document.getElementById("operator-token"),
  };
  document.getElementById("open-keys").addEventListener("click", openKeys);
  // While the form is sent, not with "close": that event comes later, and by then the dialogue
  // may be open again.
  dialog.addEventListener("submit", (event) => {
    if (event.submitter?.value !== "save") return;
    for (const [kind, input] of Object.entries(inputs)) keep(NAMES[kind], headerText(input.value));
    changed();
  });
  dialog.addEventListener("close", () => {
    if (dialog.open) return;
    for (const input of Object.values(inputs)) input.value = "";
  });
}

// Opens the dialogue.
export function openKeys() {
  const dialog = document.getElementById("keys");
  if (dialog.open) return;
  document.getElementById("api-key").value = sessionStorage.getItem(NAMES.api) ?? "";
  document.getElementById("operator-token").value = sessionStorage.getItem(NAMES.operator) ?? "";
  dialog.showModal();
}

function keep(name, value) {
  if (value) sessionStorage.setItem(name, value);
  else sessionStorage.removeItem(name);
}

// A header can only have these characters; what was pasted may have others around it.
function headerText(text) {
  return text.replace(/[^\x21-\x7e]/g, "");
}
