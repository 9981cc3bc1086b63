// Which responses continue which? A chain drawn from left to right; a fork leaves its parent's row for one of its own.

import { $, h, roving, s, short, tip, took } from "./dom.js";

const ABOUT = "A response continues its parent; a second child is a fork. Select a response to read it.";
const STEP = 34;
const ROW = 30;
const COLUMNS_MAX = 60;
const ROWS_MAX = 14;
const CHIPS_MAX = 7;
const COLOURS = 6;

// The root of the selected conversation; null for all of them.
let chosen = null;
let focused = "";

// Each node gets a column (how deep) and a row (which branch): the first child stays on its parent's row.
export const layOut = (nodes) => {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const children = new Map();
  const roots = [];
  for (const node of nodes) {
    if (node.parent && byId.has(node.parent)) {
      if (!children.has(node.parent)) children.set(node.parent, []);
      children.get(node.parent).push(node);
    } else roots.push(node);
  }
  const placed = new Map();
  let rows = 0;
  // A stack, not recursion: chains are long.
  const waiting = roots.reverse().map((node) => ({ node, column: node.parent ? 1 : 0, row: null }));
  while (waiting.length) {
    const { node, column, row } = waiting.pop();
    const mine = row ?? rows++;
    placed.set(node.id, { node, column, row: mine });
    const next = children.get(node.id) ?? [];
    for (const child of next.slice(1).reverse()) waiting.push({ node: child, column: column + 1, row: null });
    if (next.length) waiting.push({ node: next[0], column: column + 1, row: mine });
  }
  return { placed, rows };
};

const forks = (nodes) => {
  const seen = new Set();
  return nodes.reduce((sum, { parent }) => {
    if (!parent) return sum;
    const again = seen.has(parent);
    seen.add(parent);
    return sum + again;
  }, 0);
};

const chip = (name, words, root, redraw) =>
  h(
    "button",
    {
      type: "button",
      role: "tab",
      "aria-selected": root === chosen,
      tabindex: root === chosen ? 0 : -1,
      onclick: () => {
        chosen = root;
        redraw();
      },
      onkeydown: (event) => roving(event, [...event.currentTarget.parentNode.children], event.currentTarget),
    },
    name ? h("b", {}, name) : null,
    words,
  );

const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const summary = ({ nodes }) => {
  const forked = forks(nodes);
  return `${many(nodes.length, "turn")}${forked ? ` · ${many(forked, "fork")}` : ""}`;
};

const details = (node) => [
  h("b", {}, node.id),
  h("div", {}, h("span", {}, node.isRunning ? "running" : node.status), h("span", {}, node.model)),
  ...(node.isRunning
    ? []
    : [
        node.replica ? h("div", {}, h("span", {}, "replica"), h("span", {}, node.replica)) : null,
        h("div", {}, h("span", {}, "duration"), h("span", {}, took(node.total_ms ?? 0))),
        h(
          "div",
          {},
          h("span", {}, "prompt tokens: reused, new"),
          h("span", {}, `${node.reused} · ${node.tokenized}`),
        ),
      ]),
];

export const drawTree = (past, running, open, redraw) => {
  const box = $("tree");
  const all = past.chains(running);
  // Single requests are not conversations; they are shown only where there is nothing else.
  const joined = all.filter((one) => one.nodes.length > 1);
  const chains = joined.length ? joined : all;
  if (!chains.length) {
    $("chains").replaceChildren();
    box.replaceChildren(h("p", { class: "empty" }, "No responses yet."));
    return;
  }
  if (!chains.some((one) => one.root === chosen)) chosen = null;
  const listed = chains.slice(0, CHIPS_MAX);
  if (chosen && !listed.some((one) => one.root === chosen))
    listed[listed.length - 1] = chains.find((one) => one.root === chosen);
  const focusedChip = [...$("chains").children].indexOf(document.activeElement);
  const singles = joined.length ? all.length - joined.length : 0;
  $("chains").replaceChildren(
    chip("", `all ${chains.length}`, null, redraw),
    ...listed.map((one) => chip(short(one.root), summary(one), one.root, redraw)),
  );
  if (focusedChip >= 0) $("chains").children[Math.min(focusedChip, listed.length)].focus();
  $("tree-sub").textContent =
    ABOUT + (singles ? ` ${many(singles, "single request")} not shown.` : "");

  // One below the other, the latest first, as many as fit.
  const { placed, rows } = layOut(
    (chosen ? chains.filter((one) => one.root === chosen) : listed).flatMap((one) => one.nodes),
  );
  const deepest = Math.max(...[...placed.values()].map((one) => one.column));
  const first = Math.max(0, deepest - COLUMNS_MAX);
  const shown = [...placed.values()].filter((one) => one.column >= first && one.row < ROWS_MAX);
  const x = (one) => 26 + (one.column - first) * STEP;
  const y = (one) => 20 + one.row * ROW;
  const width = Math.max(box.clientWidth, 52 + (deepest - first) * STEP);
  const height = 34 + Math.min(rows, ROWS_MAX) * ROW;
  const paths = shown.map((one) => {
    const up = placed.get(one.node.parent);
    if (!up)
      return one.node.parent
        ? s("path", {
            class: `branch l${one.row % COLOURS}`,
            "stroke-dasharray": "2 4",
            d: `M${x(one) - STEP + 8} ${y(one)}H${x(one)}`,
          })
        : null;
    const from = Math.max(4, x(up));
    return s("path", {
      class: `branch l${one.row % COLOURS}`,
      d:
        up.row === one.row
          ? `M${from} ${y(up)}H${x(one)}`
          : `M${from} ${y(up)}C${from + STEP * 0.7} ${y(up)} ${x(one) - STEP * 0.8} ${y(one)} ${x(one)} ${y(one)}`,
    });
  });
  const nodes = shown.map((one) =>
    s(
      "g",
      {
        class: `node l${one.row % COLOURS} ${one.node.isRunning ? "running" : one.node.status}`,
        role: "button",
        tabindex: -1,
        "data-id": one.node.id,
        "aria-label": `Response ${short(one.node.id)}, ${one.node.status}`,
        onclick: () => open(one.node.id),
        onmousemove: (event) => tip.show(event, details(one.node)),
        onmouseleave: tip.hide,
        onblur: tip.hide,
        onfocus: (event) => {
          focused = one.node.id;
          tip.show(event, details(one.node));
        },
        onkeydown: (event) => {
          if (event.key === "Enter") open(one.node.id);
          else roving(event, [...box.querySelectorAll(".node")], event.currentTarget);
        },
      },
      s("circle", { cx: x(one), cy: y(one), r: 7.5 }),
    ),
  );
  (nodes.find((one) => one.dataset.id === focused) ?? nodes.at(-1))?.setAttribute("tabindex", 0);
  const hidden =
    rows > ROWS_MAX
      ? [
          s(
            "text",
            { class: "faint", x: 20, y: height - 4 },
            `${rows - ROWS_MAX} more branches not shown`,
          ),
        ]
      : [];
  const wasAtEnd = box.scrollLeft + box.clientWidth > box.scrollWidth - 60;
  const hadFocus = box.contains(document.activeElement);
  box.replaceChildren(
    s(
      "svg",
      { width, height, role: "group", "aria-label": "Responses of this conversation" },
      ...paths,
      ...nodes,
      ...hidden,
    ),
  );
  if (wasAtEnd) box.scrollLeft = box.scrollWidth;
  if (hadFocus) box.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
};
