// How does the text of a model become elements? Markdown in, nodes out. Text is always text: nothing is parsed as HTML,
// nothing is loaded, and a link leads only to http, https or mailto.

import { copyText, h } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
// Lists in lists and quotes in quotes; deeper ones are shown as text.
const DEPTH_MAX = 8;
// Longer lines and paragraphs are shown as they are: no text may keep the page busy.
const CHARS_MAX = 5000;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// --- inside a line ---

// The first of these in the text; what follows an opening mark must have its closing mark.
const INLINE =
  /\\([!-/:-@[-`{-~])|(`+)([^`]|[^`][\s\S]*?[^`])\2(?!`)|(!?)\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)|<((?:https?:|mailto:)[^\s<>]+)>|(\*\*|__)(?=\S)([\s\S]*?\S)\8(?!\*)|~~(?=\S)([\s\S]*?\S)~~|(?<![\w*])([*_])(?=\S)((?:(?!\11)[\s\S])*?\S)\11(?![\w*])|(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]])/;

const link = (address, children) => {
  try {
    const url = new URL(address);
    if (SCHEMES.has(url.protocol))
      return h(
        "a",
        { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" },
        children,
      );
  } catch {
    // Not an absolute URL: only its text is shown.
  }
  return h("span", { title: address }, children);
};

const inline = (text, depth = 0) => {
  const nodes = [];
  let rest = text;
  while (rest) {
    const found = depth < DEPTH_MAX && text.length <= CHARS_MAX ? INLINE.exec(rest) : null;
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    const [whole, escaped, , code, isImage, label, address, auto, , strong, gone, , soft, bare] = found;
    if (escaped) nodes.push(escaped);
    else if (code !== undefined) nodes.push(h("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (address !== undefined)
      // An image is not loaded: its address would learn that this page was read.
      nodes.push(link(address, isImage ? [`image: ${label || address}`] : inline(label, depth + 1)));
    else if (auto ?? bare) nodes.push(link(auto ?? bare, [auto ?? bare]));
    else if (strong) nodes.push(h("strong", {}, inline(strong, depth + 1)));
    else if (gone) nodes.push(h("del", {}, inline(gone, depth + 1)));
    else nodes.push(h("em", {}, inline(soft, depth + 1)));
    rest = rest.slice(found.index + whole.length);
  }
  return nodes;
};

// --- blocks ---

const cells = (line) =>
  line
    .trim()
    .replace(/^\||(?<!\\)\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

const sides = (line) =>
  cells(line).map((cell) =>
    /^:-+:$/.test(cell) ? "centre" : /^-+:$/.test(cell) ? "right" : "",
  );

const isTable = (lines, at) =>
  lines[at].includes("|") &&
  DIVIDER.test(lines[at + 1] ?? "") &&
  cells(lines[at]).length === cells(lines[at + 1]).length;

const table = (lines) => {
  const side = sides(lines[1]);
  const row = (line, tag) =>
    h(
      "tr",
      {},
      cells(line)
        .slice(0, side.length)
        .map((cell, at) => h(tag, { class: side[at] }, inline(cell))),
    );
  return h(
    "div",
    { class: "table", tabindex: 0, role: "group", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row(lines[0], "th")),
      h(
        "tbody",
        {},
        lines.slice(2).map((line) => row(line, "td")),
      ),
    ),
  );
};

const codeBlock = (language, text) => {
  const button = h("button", { type: "button", class: "quiet copy" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  });
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language), button),
    h("pre", { tabindex: 0, "aria-label": "Code" }, h("code", {}, text)),
  );
};

const isBreak = (lines, at) =>
  !lines[at].trim() || (lines[at].length <= CHARS_MAX && isMarked(lines, at));

const isMarked = (lines, at) =>
  FENCE.test(lines[at]) ||
  HEADING.test(lines[at]) ||
  RULE.test(lines[at]) ||
  QUOTE.test(lines[at]) ||
  ITEM.test(lines[at]) ||
  isTable(lines, at);

// Where the block that begins here ends, what it is, and the node that it becomes.
const block = (lines, at, depth) => {
  const line = lines[at];
  let end = at + 1;
  if (line.length > CHARS_MAX) return [end, () => h("p", {}, line)];
  const fence = FENCE.exec(line);
  if (fence) {
    const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    while (end < lines.length && !closing.test(lines[end])) end += 1;
    const text = lines.slice(at + 1, end).join("\n");
    return [Math.min(lines.length, end + 1), () => codeBlock(fence[2], text)];
  }
  const heading = HEADING.exec(line);
  // The page has headings of its own: those of a model begin below them.
  if (heading) return [end, () => h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].trimEnd().replace(/ #+$/, "")))];
  if (RULE.test(line)) return [end, () => h("hr")];
  if (depth < DEPTH_MAX && QUOTE.test(line)) {
    while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !isBreak(lines, end))) end += 1;
    const inner = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    return [end, () => h("blockquote", {}, nodesOf(inner, depth + 1))];
  }
  if (depth < DEPTH_MAX && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) {
    end = at + 2;
    while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
    return [end, () => table(lines.slice(at, end))];
  }
  while (end < lines.length && !isBreak(lines, end)) end += 1;
  return [end, () => h("p", {}, inline(lines.slice(at, end).join("\n").trim()))];
};

// Items of one kind at one indentation; what is indented further belongs to the item before it.
const list = (lines, from, depth) => {
  const [, indent, mark] = ITEM.exec(lines[from]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let at = from;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const width = Math.min(found[0].length, indent.length + found[2].length + 1);
    const inner = [lines[at].slice(found[0].length)];
    at += 1;
    while (at < lines.length) {
      const isIndented = /^ */.exec(lines[at])[0].length > indent.length;
      const isLazy = lines[at].trim() && lines[at - 1].trim() && !isBreak(lines, at);
      const goesOn = !lines[at].trim() && /^ */.exec(lines[at + 1] ?? "")[0].length > indent.length;
      if (!(lines[at].trim() ? isIndented || isLazy : goesOn)) break;
      inner.push(lines[at].slice(Math.min(width, /^ */.exec(lines[at])[0].length)));
      at += 1;
    }
    items.push(inner);
    // A blank line between two items does not end the list.
    const next = lines[at + 1];
    if (at < lines.length && !lines[at].trim() && next !== undefined && ITEM.exec(next)?.[1] === indent) at += 1;
  }
  const start = isOrdered ? Number.parseInt(mark, 10) : null;
  return [
    at,
    () =>
      h(
        isOrdered ? "ol" : "ul",
        start !== null && start !== 1 ? { start } : {},
        items.map((inner) => item(inner, depth)),
      ),
  ];
};

const item = (inner, depth) => {
  const task = /^\[([ xX])\]\s+/.exec(inner[0]);
  const box = task ? `${task[1] === " " ? "☐" : "☑"} ` : null;
  if (task) inner = [inner[0].slice(task[0].length), ...inner.slice(1)];
  const nodes = nodesOf(inner, depth + 1);
  // One paragraph stands in its item as plain text.
  const [first, ...others] = nodes;
  return first?.tagName === "P"
    ? h("li", {}, box, ...first.childNodes, ...others)
    : h("li", {}, box, ...nodes);
};

const sourcesOf = (lines, depth) => {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = block(lines, at, depth);
    found.push([lines.slice(at, end).join("\n"), make]);
    at = end;
  }
  return found;
};

const nodesOf = (lines, depth) => sourcesOf(lines, depth).map(([, make]) => make());

// Shows the text in the box. Called again with a longer text it replaces only the blocks that have changed, so that a
// person can select text while the model still writes.
export const showMarkdown = (box, text) => {
  const blocks = sourcesOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
  const before = box.sources ?? [];
  let same = 0;
  while (same < blocks.length && before[same] === blocks[same][0]) same += 1;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...blocks.slice(same).map(([, make]) => make()));
  box.sources = blocks.map(([source]) => source);
};
