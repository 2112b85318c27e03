// Shows odd texts as Markdown; returns the first problem, or three facts. The test replaces PARTS.
(async () => {
  const { MarkdownView } = await import(new URL("page/markdown.js", document.baseURI));
  const parts = PARTS, root = document.createElement("div");
  document.body.append(root);
  const view = new MarkdownView(root);
  let seed = 41, slowest = 0;
  const random = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
  const check = (text) => {
    const start = performance.now();
    view.update(text);
    slowest = Math.max(slowest, performance.now() - start);
    for (const element of root.querySelectorAll("*")) {
      const names = element.getAttributeNames();
      if (names.some((name) => name.startsWith("on") || name === "src" || name === "srcdoc"))
        return `${element.outerHTML} of ${text}`;
      if (element.href !== undefined && !/^(https?|mailto):/.test(element.href)) return element.outerHTML;
      if (/^(script|img|svg|iframe|object|embed|style|link|base|form)$/i.test(element.nodeName))
        return element.outerHTML;
    }
  };
  for (let i = 0; i < 1000; i += 1) {
    let text = "";
    for (let j = random(40); j >= 0; j -= 1) text += parts[random(parts.length)];
    const problem = check(text);
    if (problem) return problem;
  }
  for (const part of parts) {
    for (const text of [part.repeat(20000), `${part} a`.repeat(10000), `a${part}a `.repeat(10000)]) {
      const problem = check(text.slice(0, 200000));
      if (problem) return problem;
    }
  }
  view.update("# a\n\nb");
  const first = root.firstChild;
  view.update("# a\n\nb and *c*");
  const isKept = root.firstChild === first && root.textContent === "ab and c";
  root.remove();
  return [isKept, window.hacked ?? null, slowest];
})()
