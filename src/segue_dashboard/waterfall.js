// Where did the last turns spend their time? One row per turn, one bar per stage, on one time axis.
// Timeline: real times, with long pauses shortened, so that settling is seen next to the following turn.
// Aligned: all turns begin at zero.

import { $, clock, count, h, roving, s, short, span, tip, took } from "./dom.js";
import { STAGES, pausesOf, stagesOf } from "./past.js";

const ABOUT = "The last turns, stage by stage. Select a turn for its figures.";
const ROW = 21;
const BAR = 11;
const TOP = 40;
const CUT = 22;
// The width of a time in words; two that are nearer than this would overlap.
const LABEL = 48;
// A pause longer than this share of the shown time is shortened.
const PAUSE_SHARE = 0.12;

let axis = "timeline";
let focused = "";

export const setAxis = (name) => {
  axis = name;
};

export const legend = () =>
  STAGES.map(([kind, label]) =>
    h(
      "span",
      {},
      h("i", { class: `swatch ${kind}` }),
      kind === "settle" ? `${label}: usage is recorded after the answer; the client does not wait for it` : label,
    ),
  );

// Periods with their position on the axis: [from, to, x]; between two of them a pause is left out.
const pieces = (rows, width) => {
  const busy = [];
  for (const { at_ms: at, end } of rows) {
    const last = busy.at(-1);
    if (last && at <= last[1]) last[1] = Math.max(last[1], end);
    else busy.push([at, end]);
  }
  const total = busy.reduce((sum, [from, to]) => sum + to - from, 0);
  const joined = [];
  for (const [from, to] of busy) {
    const last = joined.at(-1);
    if (last && from - last[1] < total * PAUSE_SHARE) last[1] = to;
    else joined.push([from, to]);
  }
  const shown = joined.reduce((sum, [from, to]) => sum + to - from, 0) || 1;
  const scale = (width - CUT * (joined.length - 1)) / shown;
  let x = 0;
  return {
    scale,
    parts: joined.map(([from, to]) => {
      const part = [from, to, x];
      x += (to - from) * scale + CUT;
      return part;
    }),
  };
};

const ruler = (scale, width) => {
  const wanted = Math.min(90, width / 4) / scale;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const ms = power * ([1, 2, 5, 10].find((step) => step * power >= wanted) ?? 10);
  const x = width - ms * scale;
  return s(
    "g",
    {},
    s("path", { class: "rule", fill: "none", d: `M${x} 8v6h${ms * scale}v-6` }),
    s("text", { x: x - 6, y: 14, "text-anchor": "end" }, took(ms)),
  );
};

const details = (turn) => [
  h("b", {}, turn.id),
  h(
    "div",
    {},
    h("span", {}, `${turn.transport}${turn.lane ? ` · ${turn.lane}` : ""} · ${turn.model}`),
    h("span", {}, turn.status),
  ),
  ...stagesOf(turn).map(([, label, from, to]) =>
    h("div", {}, h("span", {}, label), h("span", {}, took(to - from))),
  ),
  ...(turn.tools
    ? [
        h(
          "div",
          {},
          h("span", {}, `paused for ${turn.tools} tool calls`),
          h("span", {}, took(pausesOf(turn).reduce((sum, [, , from, to]) => sum + to - from, 0))),
        ),
      ]
    : []),
  ...(turn.unseen
    ? [h("div", {}, h("span", {}, "images and audio as descriptions"), h("span", {}, `${turn.unseen}`))]
    : []),
  h(
    "div",
    {},
    h("span", {}, "tokens: reused, new, output"),
    h("span", {}, `${turn.reused} · ${turn.tokenized} · ${turn.output}`),
  ),
];

export const drawWaterfall = (past, open) => {
  const box = $("waterfall");
  const width = box.clientWidth;
  const isNarrow = width < 520;
  const turns = past.turns.slice(isNarrow ? -12 : -18);
  if (!turns.length) {
    box.replaceChildren(
      h("p", { class: "empty" }, "No turns yet. Start a race, or send a message in the playground."),
    );
    return;
  }
  if (past.missed)
    $("waterfall-sub").textContent = `${ABOUT} ${count(past.missed)} turns were skipped.`;
  const rows = turns.map((turn) => ({
    turn,
    at_ms: turn.at_ms,
    stages: stagesOf(turn),
    end: turn.at_ms + (stagesOf(turn).at(-1)?.[3] ?? 0),
  }));
  const left = isNarrow ? 64 : 128;
  const right = 62;
  const inner = Math.max(60, width - left - right);
  const height = TOP + rows.length * ROW + 4;
  const isAligned = axis === "aligned";
  const longest = Math.max(...rows.map(({ turn }) => turn.total_ms ?? 0), 0.1);
  const { scale, parts } = isAligned ? { scale: inner / longest, parts: [] } : pieces(rows, inner);
  const place = (at, ms) => {
    if (isAligned) return Math.min(inner, ms * scale);
    const when = at + ms;
    const part = parts.find(([from, to]) => when >= from - 1e-6 && when <= to + 1e-6) ?? parts.at(-1);
    return part[2] + (when - part[0]) * scale;
  };
  let labelled = -LABEL;
  const cuts = parts.slice(1).map(([from, , x], at) => {
    const middle = x - CUT / 2;
    const fits = middle - labelled >= LABEL;
    if (fits) labelled = middle;
    return s(
      "g",
      {},
      s("line", { class: "cut", x1: middle, x2: middle, y1: TOP - 4, y2: height }),
      fits
        ? s(
            "text",
            { class: "faint", x: middle, y: TOP - 10, "text-anchor": "middle" },
            took(from - parts[at][1]),
          )
        : null,
    );
  });
  const groups = rows.map(({ turn, stages }, at) => {
    const y = TOP + at * ROW;
    const bars = [...stages, ...pausesOf(turn)].map(([kind, , from, to]) => {
      const x = place(turn.at_ms, from);
      const wide = place(turn.at_ms, to) - x;
      return wide > 0.15 || kind === "settle"
        ? s("rect", {
            class: kind,
            x: left + x,
            y: y + (ROW - BAR) / 2,
            width: Math.max(kind === "settle" ? 0 : 0.8, wide),
            height: BAR,
            rx: Math.min(2, wide / 3),
          })
        : null;
    });
    const [figure, unit] = span(turn.total_ms ?? 0);
    return s(
      "g",
      {
        class: `turn-row ${turn.status}`,
        role: "button",
        tabindex: -1,
        "data-id": turn.id,
        "aria-label": `Turn ${short(turn.id)}, ${turn.transport}, ${figure} ${unit}, ${turn.status}`,
        onmousemove: (event) => tip.show(event, details(turn)),
        onmouseleave: tip.hide,
        onfocus: (event) => {
          focused = turn.id;
          tip.show(event, details(turn));
        },
        onblur: tip.hide,
        onclick: () => open(turn),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            open(turn);
          }
          else roving(event, [...box.querySelectorAll(".turn-row")], event.currentTarget);
        },
      },
      s("rect", { class: "hit", x: 0, y, width, height: ROW, rx: 5 }),
      s("text", { class: "mono", x: 6, y: y + 14.5 }, short(turn.id)),
      isNarrow
        ? null
        : s(
            "text",
            { class: "faint", x: 58, y: y + 14.5 },
            `${turn.transport === "websocket" ? "ws" : turn.transport} ${turn.lane.slice(0, 6)}`,
          ),
      ...bars,
      s("text", { x: width - 4, y: y + 14.5, "text-anchor": "end" }, `${figure} ${unit}`),
    );
  });
  (groups.find((one) => one.dataset.id === focused) ?? groups.at(-1)).setAttribute("tabindex", 0);
  const hadFocus = box.contains(document.activeElement);
  box.replaceChildren(
    s(
      "svg",
      {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "group",
        "aria-label": "Stages of the last turns",
      },
      s(
        "defs",
        {},
        s(
          "pattern",
          {
            id: "hatch",
            width: 5,
            height: 5,
            patternUnits: "userSpaceOnUse",
            patternTransform: "rotate(45)",
          },
          s("line", { class: "hatch", x1: 0, x2: 0, y1: 0, y2: 5 }),
        ),
      ),
      s("text", { class: "faint", x: isNarrow && !isAligned ? 6 : left, y: 14 }, isAligned ? "0" : clock(rows[0].at_ms)),
      s("g", { transform: `translate(${left} 0)` }, ...cuts, ruler(scale, inner)),
      ...groups,
    ),
  );
  if (hadFocus) box.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
};
