// Elements from texts. Nothing here, nor in the other files, makes markup from a text.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children; null and false children are left out.
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// The same for SVG.
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

// Makes the children of `element` equal to `children`, and keeps those nodes that stay: what has
// the focus, is selected or unfolded stays so. Elements with `data-key` are matched by it.
export function update(element, ...children) {
  const wanted = document.createDocumentFragment();
  append(wanted, children);
  patchChildren(element, wanted);
}

function patchChildren(element, wanted) {
  const keyed = new Map();
  for (const child of element.children) {
    if (child.dataset?.key) keyed.set(child.dataset.key, child);
  }
  let at = element.firstChild;
  for (const node of [...wanted.childNodes]) {
    const key = node.dataset?.key;
    const match = key ? keyed.get(key) : at;
    if (match && isSameKind(match, node)) {
      if (match === at) at = at.nextSibling;
      else element.insertBefore(match, at);
      patch(match, node);
    } else {
      element.insertBefore(node, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function isSameKind(node, other) {
  return node.nodeName === other.nodeName && node.dataset?.key === other.dataset?.key;
}

function patch(node, wanted) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
    return;
  }
  for (const { name } of [...node.attributes]) {
    if (name !== "open" && !wanted.hasAttribute(name)) node.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "open" && node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  patchChildren(node, wanted);
}

// Says a text to screen readers.
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
