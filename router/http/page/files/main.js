// The page: two views, chosen by the part of the address after #.

import { setUpKeys } from "./keys.js";
import { StatusView } from "./status.js";
import { TalkView } from "./talk.js";

const VIEWS = ["talk", "status"];

const talk = new TalkView();
const status = new StatusView(document.getElementById("status-body"));

function show() {
  const chosen = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const name of VIEWS) {
    document.getElementById(name).hidden = name !== chosen;
    const link = document.getElementById(`to-${name}`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = chosen === "talk" ? "Talk - Baton" : "Status - Baton";
  talk.setShown(chosen === "talk");
  status.setShown(chosen === "status");
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("hashchange", show);
setUpKeys(() => {
  talk.retry();
  status.retry();
});
show();
